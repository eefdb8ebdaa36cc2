"""Saves the checkpoints of a run, at once or beside the training.

Beside the training, a save is two halves (``save.Saving``): what each rank is to write is copied,
for which training waits; a thread of each rank writes it and, over a process group of its own,
agrees with the others and gives the checkpoint its name. So one save is under way at most, and one
that fails does so in the threads of all ranks.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds4d.checkpoint.host_memory import HostMemory
from ds4d.checkpoint.logical import LogicalTensor
from ds4d.checkpoint.save import Plan, Saving


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint.

    Attributes:
        bytes: of all its files.
        background_seconds: that a thread wrote; None: training waited for all of it.
    """

    folder: Path
    bytes: int
    background_seconds: float | None = None


class Saver:
    """Use as a context, on every rank. At its end a save that is under way is waited for, unless
    the user stops the run.

    Args:
        root: the run folder.
        keep: how many checkpoints; None: all.
        group: of all ranks, on the CPU, used by nothing else, to save beside the training; None:
            at once.
    """

    def __init__(
        self, root: Path, *, keep: int | None, group: dist.ProcessGroup | None = None
    ) -> None:
        self._root, self._keep, self._group = root, keep, group
        self._memory = None if group is None else HostMemory()
        self._plan: Plan | None = None
        self._thread: threading.Thread | None = None
        self._saved: Saved | None = None
        self._error: BaseException | None = None

    def save(
        self,
        step: int,
        state: dict[str, LogicalTensor],
        *,
        extra: dict[str, Any],
        rank_state: dict[str, Any],
    ) -> None:
        """When this returns, ``state`` may change; ``take_saved`` has the checkpoint when it is
        complete. ``wait`` comes before.

        Raises:
            CheckpointError: the same on all ranks.
        Collective: the world.
        """
        assert self._thread is None, "the last save has not been waited for"
        saving = Saving(self._root, step, keep=self._keep, plan=self._plan)
        saving.take(state, extra=extra, rank_state=rank_state, memory=self._memory)
        self._plan = saving.plan
        if self._group is None:
            saving.write()
            self._saved = Saved(saving.folder, saving.bytes)
        else:
            self._thread = threading.Thread(target=self._write, args=(saving,), daemon=True)
            self._thread.start()

    def _write(self, saving: Saving) -> None:
        started = time.perf_counter()
        try:
            saving.write(group=self._group)
            seconds = time.perf_counter() - started
            self._saved = Saved(saving.folder, saving.bytes, seconds)
        except BaseException as error:
            self._error = error

    @property
    def has_failed(self) -> bool:
        """Whether this rank's thread has; those of the others do, if not yet."""
        return self._error is not None

    def wait(self) -> None:
        """For the save that is under way, if there is one.

        Raises:
            CheckpointError: it failed; the same on all ranks.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def take_saved(self) -> Saved | None:
        """The checkpoint that has become complete since the last call; its thread may end a moment
        later."""
        saved, self._saved = self._saved, None
        return saved

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception):
            with suppress(Exception):  # the first error is the one to show
                self.wait()

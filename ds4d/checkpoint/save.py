"""Saving: a checkpoint appears whole under its final name, or not at all.

1. Rank 0 clears what earlier crashes left and makes a temporary folder.
2. The ranks agree who writes what, as in the last save where nothing about it has changed on any:
   of many ranks, the plans of all are much to gather. With a ``HostMemory`` each copies its share of the tensors:
   from here on they may change, and the rest may be done on another thread.
3. Every rank writes its share and its own state; each file is hashed while it is written and
   flushed to the disk.
4. Rank 0 checks that all files are there, writes the manifest and flushes the folder.
5. Rank 0 renames the folder to its final name, then replaces ``latest``, then removes what is
   older than ``keep``.

All ranks agree after each phase. A failure on one rank ends the save on every rank with the same
error, and takes nothing from the checkpoints saved before.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
import warnings
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, Callable, Iterator, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import SavePlan
from torch.distributed.checkpoint.planner import WriteItem

from ds4d.checkpoint.errors import (
    CheckpointError,
    RanksFailed,
    dcp_failures,
    gather,
    together,
)
from ds4d.checkpoint.files import (
    TRASH,
    FileRecord,
    discard,
    replace_text,
    temp_beside,
    write_bytes,
)
from ds4d.checkpoint.find import list_checkpoints
from ds4d.checkpoint.folder import (
    FORMAT,
    LATEST,
    SET_ASIDE,
    Manifest,
    checkpoints_folder,
    complete_manifest,
    rank_state_name,
    read_manifest,
    step_folders,
    step_name,
)
from ds4d.checkpoint.host_memory import HostMemory
from ds4d.checkpoint.logical import LogicalTensor
from ds4d.checkpoint.planners import PieceSavePlanner
from ds4d.checkpoint.storage import SafetensorsWriter
from ds4d.durable import flush

T = TypeVar("T")

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
PACKAGES = ("ds4d", "torch", "deepspeed", "transformers")


def save(
    root: Path,
    step: int,
    state: dict[str, LogicalTensor],
    *,
    extra: dict[str, Any],
    rank_state: dict[str, Any],
    keep: int | None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """``Saving``, both halves at once.

    Returns:
        The checkpoint's folder.
    """
    saving = Saving(root, step, keep=keep)
    saving.take(state, extra=extra, rank_state=rank_state, group=group)
    saving.write(group=group)
    return saving.folder


@dataclass(frozen=True)
class Plan:
    """Who writes what.

    Attributes:
        offered: what this rank holds.
        assigned: what of it this rank writes.
        index: rank 0's.
    """

    offered: list[WriteItem]
    assigned: SavePlan
    index: dict[str, Any] | None


class Saving:
    """Writes ``OUTPUT/checkpoints/step-STEP``; a checkpoint of that step is replaced.

    Args:
        root: the run folder, on a file system that all ranks share.
        keep: how many complete checkpoints to keep, this one included; None keeps all.
        plan: of the run's last save, if there was one.

    Attributes:
        folder: the checkpoint's.
        plan: for the next save, after ``take``.
        bytes: of all its files, once they are written.

    Raises:
        CheckpointError: from both halves, the same on all ranks.
    """

    def __init__(
        self, root: Path, step: int, *, keep: int | None, plan: Plan | None = None
    ) -> None:
        assert keep is None or keep > 0, f"keep {keep} would remove the checkpoint just written"
        self.folder = checkpoints_folder(root) / step_name(step)
        self.bytes = 0
        self._step, self._keep = step, keep
        self.plan = plan
        self._planner = PieceSavePlanner()
        self._temp: Path | None = None

    def take(
        self,
        state: dict[str, LogicalTensor],
        *,
        extra: dict[str, Any],
        rank_state: dict[str, Any],
        memory: HostMemory | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Settle what is written. Without ``memory``, ``state`` must not change before ``write``
        is through.

        Args:
            state: what this rank holds, on any device.
            extra: JSON for all ranks; rank 0's is written.
            rank_state: tensors and plain Python values of this rank (random states).
        Collective: ``group`` (default: the world); without ``torch.distributed``, one rank.
        """
        with self._failing_alike(group):
            self._temp = _lead(lambda: _begin(self.folder), group)
            self._writer = SafetensorsWriter(self._temp, _rank(group), memory=memory)
            if all(gather(lambda: self._repeats(state), group=group)):
                together(self._repeat, group=group)
            else:
                self._agree(state, group)
            self._rank_state = together(lambda: _as_bytes(rank_state), group=group)
            self._extra = extra

    def _repeats(self, state: dict[str, LogicalTensor]) -> bool:
        """Whether this rank offers what it did in the last save."""
        self._planner.set_up_planner(state)
        offered = self._planner.create_local_plan().items
        return self.plan is not None and self.plan.offered == offered

    def _repeat(self) -> None:
        self._writer.write_data(self._planner.finish_plan(self.plan.assigned), self._planner)
        self._writer.index = self.plan.index

    def _agree(self, state: dict[str, LogicalTensor], group: dist.ProcessGroup | None) -> None:
        writer, planner = self._writer, self._planner
        with dcp_failures(), warnings.catch_warnings(action="ignore"):  # DCP on "one process"
            dcp.save(state, storage_writer=writer, planner=planner, process_group=group)
        self.plan = Plan(planner.offered, writer.plan, writer.index)

    def write(self, *, group: dist.ProcessGroup | None = None) -> None:
        """Bring it to the disk and give it its name. Collective: as ``take``; the group may be
        another one of the same ranks."""
        with self._failing_alike(group):
            records = gather(lambda: self._write_here(_rank(group)), group=group)
            manifest = _manifest(self._step, self._extra, records)
            _lead(lambda: _publish(self._temp, self.folder, manifest), group)
            self.bytes = sum(record.bytes for record in manifest.files)
        with self._failing_alike(group, "is saved, but the folder could not be tidied"):
            _lead(lambda: _tidy(self.folder, self._keep), group)

    def _write_here(self, rank: int) -> list[FileRecord]:
        path = self._temp / rank_state_name(rank)
        return [*self._writer.write(), write_bytes(path, self._rank_state)]

    @contextmanager
    def _failing_alike(
        self, group: dist.ProcessGroup | None, outcome: str = "was not saved"
    ) -> Iterator[None]:
        try:
            yield
        except RanksFailed as failed:
            needed = sum(gather(lambda: self._planner.planned_bytes, group=group))
            _lead(lambda: _remove(self._temp), group)
            text = f"the checkpoint of step {self._step} {outcome}: {failed}"
            raise CheckpointError(text + _hint(failed, self.folder.parent, needed)) from None
        except BaseException:  # a rank is lost, or the user stops the run
            if _rank(group) == 0:
                _remove(self._temp)
            raise


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def _lead(act: Callable[[], T], group: dist.ProcessGroup | None) -> T:
    """What rank 0 does, and what came of it, on all ranks."""
    return gather(lambda: act() if _rank(group) == 0 else None, group=group)[0]


def _begin(final: Path) -> Path:
    """Clear what crashes left and make a temporary folder."""
    parent = final.parent
    parent.mkdir(parents=True, exist_ok=True)
    for path in parent.iterdir():
        if path.name.startswith(TRASH):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif path.name.startswith(SET_ASIDE):
            successor = parent / path.name.removeprefix(SET_ASIDE)
            discard(path) if successor.exists() else os.rename(path, successor)
    temp = temp_beside(final)
    temp.mkdir()
    return temp


def _as_bytes(rank_state: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(rank_state, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)  # refuse now what could not be loaded later
    return buffer.getvalue()


def _manifest(step: int, extra: dict[str, Any], records: list[list[FileRecord]]) -> Manifest:
    return Manifest(
        format=FORMAT,
        step=step,
        generation=0,
        world_size=len(records),
        saved_at=datetime.now(timezone.utc).isoformat(sep=" ", timespec="seconds"),
        versions={name: version(name) for name in PACKAGES},
        files=[record for of_rank in records for record in of_rank],
        extra=extra,
    )


def _publish(temp: Path, final: Path, manifest: Manifest) -> None:
    """Give the temporary folder its manifest and its final name."""
    replace(manifest, generation=_last_generation(final.parent.parent) + 1).write(temp)
    complete_manifest(temp)
    flush(temp)
    aside = final.with_name(SET_ASIDE + final.name)
    if final.exists():
        os.rename(final, aside)
    try:
        os.rename(temp, final)
    except OSError:
        if aside.exists():
            os.rename(aside, final)
        raise
    flush(final.parent)


def _last_generation(root: Path) -> int:
    generations = [0]
    for _, folder in step_folders(root):
        with suppress(CheckpointError):  # a damaged one does not count
            generations.append(read_manifest(folder).generation)
    return max(generations)


def _tidy(final: Path, keep: int | None) -> None:
    """Point ``latest`` to the new checkpoint and remove what it makes superfluous."""
    replace_text(final.parent / LATEST, final.name + "\n")
    aside = final.with_name(SET_ASIDE + final.name)
    if aside.exists():
        discard(aside)
    if keep is not None:
        complete = [c.folder for c in list_checkpoints(final.parent.parent) if c.manifest]
        for folder in complete[keep:]:
            discard(folder)


def _remove(temp: Path | None) -> None:
    if temp is not None:
        shutil.rmtree(temp, ignore_errors=True)


def _hint(failed: RanksFailed, folder: Path, needed: int) -> str:
    codes = {failure.errno for failure in failed.failures}
    if codes & DISK_FULL:
        free = shutil.disk_usage(folder).free
        return f"; it needs {needed:,} bytes, and {free:,} are free in {folder}"
    if errno.ENOENT in codes:
        return "; the output folder must be on a file system that all hosts share"
    return ""

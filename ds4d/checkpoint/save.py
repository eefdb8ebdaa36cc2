"""Saving: a checkpoint appears whole under its final name, or not at all.

1. Rank 0 clears what earlier crashes left and makes a temporary folder.
2. Every rank writes its share of the tensors and its own state there; each file is hashed while it
   is written and flushed to the disk.
3. Rank 0 checks that all files are there, writes the manifest and flushes the folder.
4. Rank 0 renames the folder to its final name, then replaces ``latest``, then removes what is
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
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any, Callable

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ds4d.checkpoint.errors import CheckpointError, RanksFailed, dcp_failures, gather
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
from ds4d.checkpoint.logical import LogicalTensor
from ds4d.checkpoint.planners import PieceSavePlanner
from ds4d.checkpoint.storage import SafetensorsWriter
from ds4d.durable import flush

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
    """Write ``OUTPUT/checkpoints/step-STEP``; a checkpoint of that step is replaced.

    Args:
        root: the run folder, on a file system that all ranks share.
        state: what this rank holds, on any device.
        extra: JSON for all ranks; rank 0's is written.
        rank_state: tensors and plain Python values of this rank (random states).
        keep: how many complete checkpoints to keep, this one included; None keeps all.
    Returns:
        The checkpoint's folder.
    Raises:
        CheckpointError: the same on all ranks.
    Collective: ``group`` (default: the world); without ``torch.distributed``, one rank.
    """
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    assert keep is None or keep > 0, f"keep {keep} would remove the checkpoint just written"
    planner, temp = PieceSavePlanner(), None
    final = checkpoints_folder(root) / step_name(step)
    outcome = "was not saved"

    def lead(act: Callable[..., Any], *args: Any) -> Any:
        return gather(lambda: act(*args) if rank == 0 else None, group=group)[0]

    try:
        temp = lead(_begin, final)
        writer = SafetensorsWriter(temp, rank)
        with dcp_failures(), warnings.catch_warnings(action="ignore"):  # DCP on "one process"
            dcp.save(state, storage_writer=writer, planner=planner, process_group=group)
        records = gather(
            lambda: [*writer.records, _write_rank_state(temp, rank, rank_state)], group=group
        )
        lead(_publish, temp, final, _manifest(step, extra, records))
        outcome = "is saved, but the folder could not be tidied"
        lead(_tidy, final, keep)
    except RanksFailed as failed:
        needed = sum(gather(lambda: planner.planned_bytes, group=group))
        lead(_remove, temp)
        text = f"the checkpoint of step {step} {outcome}: {failed}"
        raise CheckpointError(text + _hint(failed, final.parent, needed)) from None
    except BaseException:  # a rank is lost, or the user stops the run
        if rank == 0:
            _remove(temp)
        raise
    return final


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


def _write_rank_state(folder: Path, rank: int, rank_state: dict[str, Any]) -> FileRecord:
    buffer = io.BytesIO()
    torch.save(rank_state, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)  # refuse now what could not be loaded later
    return write_bytes(folder / rank_state_name(rank), buffer.getvalue())


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

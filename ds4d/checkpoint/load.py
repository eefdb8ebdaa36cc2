"""Loading: every rank reads the boxes it holds, out of a checkpoint of any layout."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

from ds4d.checkpoint.errors import (
    CheckpointError,
    RanksFailed,
    dcp_failures,
    gather,
    together,
)
from ds4d.checkpoint.files import FileRecord, checksum, damage
from ds4d.checkpoint.folder import complete_manifest, rank_state_name, read_manifest
from ds4d.checkpoint.logical import LogicalTensor
from ds4d.checkpoint.planners import PieceLoadPlanner
from ds4d.checkpoint.storage import SafetensorsReader

SHOWN = 20  # tensors named in one message


def load(
    folder: Path,
    state: dict[str, LogicalTensor],
    *,
    verify: bool = False,
    group: dist.ProcessGroup | None = None,
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Fill the pieces of ``state`` in place.

    The checkpoint may hold more tensors than are asked for, and come from another layout.

    Args:
        folder: a complete checkpoint, see ``find``.
        verify: read every file once more and compare its checksum; the ranks share the work.
    Returns:
        ``extra`` as it was saved, and this rank's own state, or None when the checkpoint was
        saved by another number of ranks.
    Raises:
        CheckpointError: the same on all ranks; nothing has been loaded if a tensor is missing or
            has another shape or dtype.
    Collective: ``group`` (default: the world); without ``torch.distributed``, one rank.
    """
    distributed = dist.is_initialized()
    rank = dist.get_rank(group) if distributed else 0
    world_size = dist.get_world_size(group) if distributed else 1
    try:
        manifest = together(lambda: complete_manifest(folder), group=group)
        if verify:
            together(lambda: _verify(folder, manifest.files[rank::world_size]), group=group)
        reader = together(lambda: SafetensorsReader(folder), group=group)
        problems = gather(lambda: mismatches(reader.metadata, state), group=group)
        raise_mismatches(folder, sorted({each for rank in problems for each in rank}))
        with dcp_failures(), warnings.catch_warnings(action="ignore"):  # as in read_here
            planner = PieceLoadPlanner()
            dcp.load(dict(state), storage_reader=reader, planner=planner, process_group=group)
        rank_state = None
        if manifest.world_size == world_size:
            rank_state = together(lambda: _rank_state(folder, rank), group=group)
    except RanksFailed as failed:
        raise CheckpointError(f"cannot load {folder}: {failed}") from None
    return manifest.extra, rank_state


def read_extra(folder: Path) -> dict[str, Any]:
    """``extra`` as it was saved, without the tensors. Not collective."""
    return read_manifest(folder).extra


def read_here(reader: SafetensorsReader, state: dict[str, LogicalTensor]) -> None:
    """Fill the pieces of ``state`` in this process alone; they may have another dtype than was
    saved. What is asked for must be there, see ``mismatches``. Not collective."""
    with warnings.catch_warnings(action="ignore"):  # DCP says that it is one process
        dcp.load(dict(state), storage_reader=reader, planner=PieceLoadPlanner(), no_dist=True)


def _verify(folder: Path, records: list[FileRecord]) -> None:
    for record in records:
        found = checksum(folder / record.name)
        if found != record.xxh3:
            raise CheckpointError(damage(folder, record, found))


def mismatches(
    metadata: Metadata, state: dict[str, LogicalTensor], *, convert: bool = False
) -> list[str]:
    """What of ``state`` the checkpoint cannot give, one line a tensor."""
    saved = metadata.state_dict_metadata
    problems = []
    for name, logical in state.items():
        if not math.prod(logical.shape):
            continue  # nothing to save or load
        if name not in saved:
            problems.append(f"{name} {logical.shape}: not in the checkpoint")
        elif saved[name].size != logical.shape:
            problems.append(f"{name}: {tuple(saved[name].size)} saved, {logical.shape} here")
        elif logical.pieces and not convert and saved[name].properties.dtype != logical.dtype:
            problems.append(f"{name}: {saved[name].properties.dtype} saved, {logical.dtype} here")
    return problems


def raise_mismatches(folder: Path, problems: list[str]) -> None:
    if problems:
        more = f"\n  and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        shown = "\n  ".join(problems[:SHOWN])
        raise CheckpointError(f"{folder} does not fit this model:\n  {shown}{more}")


def _rank_state(folder: Path, rank: int) -> dict[str, Any]:
    return torch.load(folder / rank_state_name(rank), map_location="cpu", weights_only=True)

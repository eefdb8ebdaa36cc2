"""Logical tensors in the words of torch.distributed.checkpoint (DCP): who writes and reads what.

Saving. Every rank offers the boxes it holds; the coordinator gives each distinct box to one of its
holders, so that every byte is written once and the bytes are spread evenly; DCP then checks that
the boxes tile their tensors. Loading. Every rank asks for the boxes it holds; DCP intersects them
with the saved boxes, whatever layout those came from.
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections import defaultdict
from typing import Any

import torch
from torch.distributed.checkpoint import (
    DefaultSavePlanner,
    LoadPlan,
    LoadPlanner,
    SavePlan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    ReadItem,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import (
    create_read_items_for_chunk_list,
)

from ds4d.checkpoint.logical import LogicalTensor, Piece


class PieceSavePlanner(DefaultSavePlanner):
    """Plans the writing of ``dict[str, LogicalTensor]``."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.planned_bytes = 0  # what this rank is to write
        self.offered: list[WriteItem] = []

    def set_up_planner(
        self,
        state_dict: dict[str, LogicalTensor],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self.state_dict = state_dict
        self.is_coordinator = is_coordinator
        self._pieces: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, logical in self.state_dict.items():
            for piece in logical.pieces:
                if piece.tensor.numel():
                    items.append(_write_item(name, logical, piece))
                    self._pieces[items[-1].index] = piece.tensor
        self.offered = items
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return super().create_global_plan(write_once(all_plans))

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        self.planned_bytes = sum(map(_bytes_of, new_plan.items))
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._pieces[write_item.index]


class PieceLoadPlanner(LoadPlanner):
    """Plans the reading into the pieces of ``dict[str, LogicalTensor]``, in place."""

    def set_up_planner(
        self,
        state_dict: dict[str, LogicalTensor],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        assert metadata is not None, "DCP reads the metadata before it plans"
        self._state = state_dict
        self._saved = metadata.state_dict_metadata
        self._pieces: dict[MetadataIndex, torch.Tensor] = {}

    def create_local_plan(self) -> LoadPlan:
        items = []
        for name, logical in self._state.items():
            pieces = [piece for piece in logical.pieces if piece.tensor.numel()]
            self._pieces |= {MetadataIndex(name, p.offsets): p.tensor for p in pieces}
            if pieces:
                chunks = [_chunk(piece) for piece in pieces]
                items += create_read_items_for_chunk_list(name, self._saved[name], chunks)
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError(f"{read_item.storage_index.fqn}: only tensors are saved")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        box = self._pieces[read_item.dest_index].detach()
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths)):
            box = box.narrow(dim, start, length)
        return box

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: ``resolve_tensor`` gave a view of the piece itself."""


def write_once(plans: list[SavePlan]) -> list[SavePlan]:
    """Give every box that several ranks hold to one of them.

    DCP's own deduplication weighs a box by its whole tensor and drops a box that only *starts*
    where another does.

    Raises:
        ValueError: the ranks disagree about a tensor, or their boxes do not add up to it.
    """
    items: dict[MetadataIndex, WriteItem] = {}
    holders: dict[MetadataIndex, set[int]] = defaultdict(set)
    for rank, plan in enumerate(plans):
        for item in plan.items:
            known = items.setdefault(item.index, item)
            if item.tensor_data != known.tensor_data:
                raise ValueError(_disagreement(known, item))
            holders[item.index].add(rank)
    _check_totals(items)
    kept: list[list[WriteItem]] = [[] for _ in plans]
    written = [0] * len(plans)
    # boxes without a choice first, then from large to small: what can be moved evens out the rest
    for index in sorted(items, key=lambda i: (len(holders[i]) > 1, -_bytes_of(items[i]))):
        rank = min(holders[index], key=lambda r: (written[r], r))
        kept[rank].append(items[index])
        written[rank] += _bytes_of(items[index])
    return [dataclasses.replace(plan, items=mine) for plan, mine in zip(plans, kept)]


def _write_item(name: str, logical: LogicalTensor, piece: Piece) -> WriteItem:
    assert piece.tensor.dtype == logical.dtype, (
        f"{name}: a piece is {piece.tensor.dtype}, the tensor {logical.dtype}"
    )
    data = TensorWriteData(
        chunk=_chunk(piece),
        properties=TensorProperties(dtype=logical.dtype),
        size=torch.Size(logical.shape),
    )
    index = MetadataIndex(name, piece.offsets)
    return WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=data)


def _chunk(piece: Piece) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(piece.offsets), sizes=piece.tensor.shape)


def _bytes_of(item: WriteItem) -> int:
    data = item.tensor_data
    return math.prod(data.chunk.sizes) * data.properties.dtype.itemsize


def _disagreement(one: WriteItem, other: WriteItem) -> str:
    def words(data: Any) -> str:
        return f"{tuple(data.chunk.sizes)} of {tuple(data.size)} {data.properties.dtype}"

    return (
        f"{one.index.fqn}: two ranks hold different boxes at {tuple(one.index.offset)}: "
        f"{words(one.tensor_data)} and {words(other.tensor_data)}"
    )


def _check_totals(items: dict[MetadataIndex, WriteItem]) -> None:
    """With no overlap, which DCP checks, the right total means that nothing is missing."""
    held: dict[str, int] = defaultdict(int)
    sizes: dict[str, set[torch.Size]] = defaultdict(set)
    for item in items.values():
        held[item.index.fqn] += math.prod(item.tensor_data.chunk.sizes)
        sizes[item.index.fqn].add(item.tensor_data.size)
    for name, shapes in sizes.items():
        if len(shapes) > 1:
            raise ValueError(f"{name}: the ranks disagree about its shape: {sorted(shapes)}")
        shape = shapes.pop()
        if held[name] != math.prod(shape):
            raise ValueError(
                f"{name}: the ranks' pieces hold {held[name]} elements, "
                f"the tensor {tuple(shape)} has {math.prod(shape)}"
            )

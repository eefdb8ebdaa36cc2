"""DCP's storage: one safetensors file a rank, and one index of where every box lies.

safetensors is a JSON header and raw bytes: nothing in it is executed, any tool reads it, and a
reader reads just the boxes it needs. The library writes a file from tensors that are all in host
memory; a rank's share of a checkpoint may be larger than that, so the header, which follows from
the plan, is written first and the pieces after it, a few MiB at a time.
"""

from __future__ import annotations

import json
import math
import os
from collections import defaultdict
from pathlib import Path
from typing import Any, Iterator

import torch
from torch.distributed.checkpoint import (
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    StorageReader,
    StorageWriter,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ds4d.checkpoint.files import DurableFile, FileRecord, write_json
from ds4d.checkpoint.host_memory import HostMemory
from ds4d.tensor_file import DTYPES, TensorFile

INDEX = "index.json"
STAGING_BYTES = 1 << 24  # what is copied from a device, hashed and written at a time

SAFETENSORS_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class SafetensorsWriter(StorageWriter):
    """Writes this rank's boxes to ``data-RANK.safetensors``, and on the coordinator the index.

    DCP plans and collects, collectively; nothing is on the disk before ``write``, which is this
    rank's alone and may come later, on another thread.

    Args:
        memory: the boxes are copied there when DCP hands them over; None: ``write`` must come before
            they change.
    """

    def __init__(self, folder: Path, rank: int, *, memory: HostMemory | None = None) -> None:
        self.folder = folder
        self._memory = memory
        self._path = folder / f"data-{rank:05d}.safetensors"
        self._header = b""
        self._boxes: list[torch.Tensor] = []
        self.plan: SavePlan | None = None  # what this rank writes
        self.index: dict[str, Any] | None = None  # the coordinator's

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        assert checkpoint_id is None, "the folder is given to the constructor"

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the caller has made the folder."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.plan = plan
        # wide dtypes first: every tensor then starts at a multiple of its item size
        items = sorted(plan.items, key=lambda i: -i.tensor_data.properties.dtype.itemsize)
        self._header, sizes = _header(items)
        self._boxes = [planner.resolve_data(item) for item in items]
        if self._memory is not None:
            self._boxes = self._memory.copies(self._boxes)
        return _done([WriteResult(i.index, n, self._path.name) for i, n in zip(items, sizes)])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files = {each.index: each.storage_data for rank in results for each in rank}
        self.index = _index(metadata, files)

    def write(self) -> list[FileRecord]:
        """Bring it all to the disk. Not collective."""
        records = []
        if self._boxes:
            with DurableFile(self._path) as file:
                file.write(self._header)
                for box in self._boxes:
                    for block in _blocks(box):
                        file.write(block)
                records.append(file.finish())
        if self.index is not None:
            records.append(write_json(self.folder / INDEX, self.index))
        return records

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return False


class SafetensorsReader(StorageReader):
    """Reads boxes from the files of ``SafetensorsWriter``, only the bytes that are asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata = read_index(folder)

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        assert checkpoint_id is None, "the folder is given to the constructor"

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: the metadata is this reader's own."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            by_file[self.metadata.storage_data[item.storage_index]].append(item)
        for name, items in by_file.items():
            with TensorFile(self.folder / name) as file:
                for item in items:
                    target = planner.resolve_tensor(item)
                    box = [slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths)]
                    target.copy_(file.read(_key(item.storage_index), box))
                    planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        return False


def read_index(folder: Path) -> Metadata:
    """The index as DCP's metadata; ``storage_data`` says which file holds which box."""
    tensors, files = {}, {}
    for name, entry in json.loads((folder / INDEX).read_bytes()).items():
        chunks = []
        for offsets, sizes, file in entry["chunks"]:
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            files[MetadataIndex(name, offsets)] = file
        properties = TensorProperties(dtype=getattr(torch, entry["dtype"]))
        tensors[name] = TensorStorageMetadata(properties, torch.Size(entry["shape"]), chunks)
    return Metadata(tensors, storage_data=files)


def _index(metadata: Metadata, files: dict[MetadataIndex, str]) -> dict[str, Any]:
    return {
        name: {
            "dtype": str(tensor.properties.dtype).removeprefix("torch."),
            "shape": list(tensor.size),
            "chunks": [
                [list(c.offsets), list(c.sizes), files[MetadataIndex(name, c.offsets)]]
                for c in tensor.chunks
            ],
        }
        for name, tensor in metadata.state_dict_metadata.items()
    }


def _header(items: list[WriteItem]) -> tuple[bytes, list[int]]:
    """The safetensors header for these boxes in this order, and the bytes of each."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    sizes, start = [], 0
    for item in items:
        dtype, shape = item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes
        sizes.append(math.prod(shape) * dtype.itemsize)
        entries[_key(item.index)] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [start, start + sizes[-1]],
        }
        start += sizes[-1]
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, sizes


def _key(index: MetadataIndex) -> str:
    """``weight/model.norm.weight@0``: a box's name in its file."""
    return f"{index.fqn}@{','.join(map(str, index.offset))}"


def _blocks(tensor: torch.Tensor) -> Iterator[memoryview]:
    """A tensor's bytes in row-major order, in host memory, a staging block at a time."""
    if not tensor.is_contiguous():  # columns that a rank holds: copied some rows at a time
        rows = max(1, STAGING_BYTES // max(1, tensor[0].nbytes))
        for part in tensor.split(rows):
            yield from _blocks(part.contiguous())
        return
    flat = tensor.detach().view(-1)
    for block in flat.split(STAGING_BYTES // flat.itemsize):
        yield memoryview(block.cpu().view(torch.uint8).numpy())


def _done(value: Any) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future

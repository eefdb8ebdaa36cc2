"""Boxes of the tensors in a safetensors file, by plain reads: of memory, a box costs itself.

The library reads a slice so that the whole tensor is in memory first, or through a memory map,
whose pages count as the process's own as long as it is open. With many ranks on a host, each
reading its part, either is a copy of the model a rank. So the library checks the file and reads
whole tensors, and boxes are read here.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

BLOCK_BYTES = 1 << 22  # what is read and cut at a time, where a box is many short runs of bytes

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "BOOL": torch.bool,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
}  # fmt: skip


class TensorFile:
    """One file, open until ``close`` or the end of a ``with``.

    Raises:
        SafetensorError: the file is damaged or cut short.
    """

    def __init__(self, path: Path) -> None:
        self._whole = safe_open(path, framework="pt", backend="pread")
        self._path = path
        self._file = open(path, "rb", buffering=0)
        length = int.from_bytes(self._file.read(8), "little")
        self._entries = json.loads(self._file.read(length))
        self._entries.pop("__metadata__", None)
        self._begin = 8 + length

    def close(self) -> None:
        del self._whole
        self._file.close()

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

    def read(self, name: str, box: Sequence[slice] = ()) -> Tensor:
        """A box on the CPU, in memory of its own; dims that it leaves out are whole."""
        entry, shape = self._entries[name], self.shape(name)
        ranges = [part.indices(size)[:2] for part, size in zip(box, shape)]
        sizes = [stop - start for start, stop in ranges] + list(shape[len(ranges) :])
        if sizes == list(shape):
            return self._whole.get_tensor(name)
        if entry["dtype"] not in DTYPES:  # less than a byte an element, or newer than this list
            return self._whole.get_tensor(name)[tuple(box)].clone()
        out = torch.empty(sizes, dtype=DTYPES[entry["dtype"]])
        position = self._begin + entry["data_offsets"][0]
        if out.numel():
            offsets = [start for start, _ in ranges] + [0] * (len(shape) - len(ranges))
            self._read(out, position, shape, offsets)
        return out

    def _read(
        self, out: Tensor, position: int, shape: tuple[int, ...], offsets: Sequence[int]
    ) -> None:
        """Fill ``out`` from a tensor that begins at ``position`` of the file."""
        row_bytes = math.prod(shape[1:]) * out.itemsize
        if out.shape[1:] == shape[1:]:  # whole rows: one run of bytes
            self._fill(out, position + offsets[0] * row_bytes)
            return
        at_a_time = BLOCK_BYTES // row_bytes
        position += offsets[0] * row_bytes
        if at_a_time < 2:
            for row, part in enumerate(out):
                self._read(part, position + row * row_bytes, shape[1:], offsets[1:])
            return
        inner = [slice(o, o + n) for o, n in zip(offsets[1:], out.shape[1:])]
        for row in range(0, len(out), at_a_time):
            part = out[row : row + at_a_time]
            block = torch.empty(len(part), *shape[1:], dtype=out.dtype)
            self._fill(block, position + row * row_bytes)
            part.copy_(block[(slice(None), *inner)])

    def _fill(self, tensor: Tensor, position: int) -> None:
        """Read the bytes of a contiguous tensor."""
        view = memoryview(tensor.view(-1).view(torch.uint8).numpy())
        while view:
            count = os.preadv(self._file.fileno(), [view], position)
            if not count:
                raise OSError(f"{self._path} has become shorter while it was read")
            view, position = view[count:], position + count

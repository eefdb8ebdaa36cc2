"""Boxes of tensors in a file, and how much of it is read for them."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from ds4d import tensor_file
from ds4d.tensor_file import DTYPES, TensorFile
from ds4d.tensor_parallel.shard import Shard, even, packed, part_of

SHAPES = [(), (12,), (12, 5), (5, 12), (3, 12, 4), (3, 4, 12), (2, 3, 2, 4), (12, 0), (0, 12)]


def write(folder, dtype) -> tuple[TensorFile, dict[str, torch.Tensor]]:
    tensors = {str(shape): torch.randint(2, shape).to(dtype) for shape in SHAPES}
    save_file(tensors, folder / "a.safetensors")
    return TensorFile(folder / "a.safetensors"), tensors


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_whole_tensors_of_every_type(dtype, tmp_path):
    file, tensors = write(tmp_path, dtype)
    assert set(file.names) == set(tensors)
    for name, tensor in tensors.items():
        assert file.shape(name) == tensor.shape
        read = file.read(name)
        assert read.shape == tensor.shape and read.dtype == dtype
        assert read.view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8))


@pytest.mark.parametrize("block_bytes", [1, 40, 100, 1 << 24])
def test_every_box(block_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", block_bytes)
    file, tensors = write(tmp_path, torch.int32)
    for name, tensor in tensors.items():
        edges = [[(0, n), (0, n // 2), (n // 3, n), (n, n)] for n in tensor.shape]
        for ranges in itertools.product(*edges):
            box = tuple(slice(*edge) for edge in ranges)
            for part in (box, box[:1]):
                read = file.read(name, part)
                assert read.is_contiguous() and read.equal(tensor[part])


@pytest.mark.parametrize("block_bytes", [1, 64, 1 << 24])
def test_shards(block_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", block_bytes)
    file, tensors = write(tmp_path, torch.bfloat16)
    for name, tensor in tensors.items():
        for dim in [d for d, size in enumerate(tensor.shape) if size == 12]:
            shards = [packed(dim, (8, 4), rank, 2) for rank in range(2)]
            shards += [even(dim, 12, rank, 5, padded=True) for rank in range(5)]
            shards += [Shard(dim, 12, ((3, 4), (9, 12)), 2)]
            for shard in shards:
                read = shard.cut(lambda box, name=name: file.read(name, box), file.shape(name))
                assert torch.equal(read, part_of(tensor, shard))


def test_only_the_box_is_read(tmp_path, monkeypatch):
    tensor = torch.randn(64, 64)
    save_file({"a": tensor}, tmp_path / "a.safetensors")
    file, counts = TensorFile(tmp_path / "a.safetensors"), []
    preadv = os.preadv

    def counted(*args) -> int:
        counts.append(preadv(*args))
        return counts[-1]

    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 1024)
    file.read("a", (slice(16, 32),))
    assert sum(counts) == tensor.nbytes / 4
    counts.clear()
    file.read("a", (slice(0, 32), slice(16, 32)))  # columns: some rows at a time
    assert sum(counts) == tensor.nbytes / 2 and max(counts) <= 1024
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 64)
    counts.clear()
    file.read("a", (slice(0, 32), slice(16, 32)))  # rows are long: each run by itself
    assert sum(counts) == tensor.nbytes / 8


def test_short_reads_and_short_files(tmp_path, monkeypatch):
    tensors = {"a": torch.randn(12, 5), "b": torch.randn(3, 12)}
    path, box = tmp_path / "a.safetensors", (slice(1, 3), slice(0, 4))
    save_file(tensors, path)
    file, preadv = TensorFile(path), os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: preadv(fd, [views[0][:3]], at))
    assert all(torch.equal(file.read(name, box), t[box]) for name, t in tensors.items())
    os.truncate(path, path.stat().st_size - 140)
    with pytest.raises(OSError, match="shorter"):
        file.read("b", box)
    with pytest.raises(SafetensorError):
        TensorFile(path)

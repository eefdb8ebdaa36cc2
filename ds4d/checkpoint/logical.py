"""The common language of engine and checkpoint: logical tensors, held in pieces.

A logical tensor is what one plain process would have: a Hugging Face name and a full shape. A rank
holds some boxes of it, as views on its live storage, so that saving copies nothing and loading
writes in place. Names are ``KIND/NAME``:

    weight/NAME      the fp32 master (the parameter itself where there is no master)
    exp_avg/NAME     optimizer state of the same shape, under the optimizer's own word
    buffer/NAME      persistent buffers
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from ds4d.tensor_parallel.shard import Shard


@dataclass(frozen=True)
class Piece:
    """One box of a logical tensor. ``tensor`` has the box's shape and starts at ``offsets``."""

    offsets: tuple[int, ...]
    tensor: torch.Tensor


@dataclass(frozen=True)
class LogicalTensor:
    """``pieces`` may be empty on this rank; over all ranks they cover ``shape`` at least once."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


def pieces_of(
    box: torch.Tensor, offsets: tuple[int, ...], shard: Shard | None
) -> Iterator[Piece]:
    """A box of what a rank holds of a tensor as boxes of the logical tensor; views.

    Args:
        offsets: where in the rank's part it starts.
        shard: how the part was cut; None: it is the logical tensor.
    """
    if shard is None:
        yield Piece(offsets, box)
        return
    dim = shard.dim
    for skipped, start, length in shard.pieces(offsets[dim], box.shape[dim]):
        at = (*offsets[:dim], start, *offsets[dim + 1 :])
        yield Piece(at, box.narrow(dim, skipped, length))


def boxes_of_range(
    shape: Sequence[int], start: int, stop: int
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut elements [start, stop) of a row-major tensor into boxes, in order.

    A flat range of an n-d tensor is at most 2n - 1 boxes, each contiguous in the range: partial
    rows at both ends, whole rows between. This is how a ZeRO partition, which is flat, becomes
    slices of the tensors it holds.

    Returns:
        (offsets, sizes) of each box; sizes multiply to the elements it takes from the range.
    """
    shape = tuple(shape)
    if not shape:
        return [((), ())] if stop > start else []
    boxes = []
    # elements in one step of each dim: (prod of the later dims)
    strides = list(accumulate(reversed(shape[1:]), lambda a, b: a * b, initial=1))[::-1]
    while start < stop:
        # the outermost dim that start is aligned to and a whole step of which still fits
        dim = next(
            d for d, stride in enumerate(strides) if start % stride == 0 and start + stride <= stop
        )
        offsets = tuple(start // stride % size for stride, size in zip(strides, shape))
        count = min((stop - start) // strides[dim], shape[dim] - offsets[dim])
        sizes = (1,) * dim + (count,) + shape[dim + 1 :]
        boxes.append((offsets, sizes))
        start += math.prod(sizes)
    return boxes

"""How a logical tensor is cut over the tp ranks; pure, and the same words for weights, moments,
files and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Shard:
    """One rank's part of a logical tensor: ``ranges`` of its dim ``dim``, in this order, and then
    ``padding`` zeros. Over all ranks each element is in exactly one range.

    Attributes:
        dim: which is cut.
        size: the logical tensor's size along ``dim``.
        ranges: [start, stop) each; none is empty.
        padding: so that all ranks hold equal shapes (vocabularies that do not divide).
    """

    dim: int
    size: int
    ranges: tuple[tuple[int, int], ...]
    padding: int = 0

    @property
    def local_size(self) -> int:
        return sum(stop - start for start, stop in self.ranges) + self.padding

    def logical_shape(self, local: tuple[int, ...]) -> tuple[int, ...]:
        return (*local[: self.dim], self.size, *local[self.dim + 1 :])

    def local_shape(self, logical: tuple[int, ...]) -> tuple[int, ...]:
        return (*logical[: self.dim], self.local_size, *logical[self.dim + 1 :])

    def cut(self, read: Callable[[tuple[slice, ...]], Tensor], logical: tuple[int, ...]) -> Tensor:
        """This rank's tensor.

        Args:
            read: gives a box of the logical tensor, ``tensor.__getitem__`` or a file's reader.
            logical: its shape.
        """
        before = (slice(None),) * self.dim
        parts = [read((*before, slice(start, stop))) for start, stop in self.ranges]
        if self.padding or not parts:
            shape = (*logical[: self.dim], self.padding, *logical[self.dim + 1 :])
            like = parts[0] if parts else read((*before, slice(0, 0)))
            parts.append(torch.zeros(shape, dtype=like.dtype, device=like.device))
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def pieces(self, offset: int, length: int) -> Iterator[tuple[int, int, int]]:
        """Where elements [offset, offset + length) of the local dim are in the logical one.

        Yields:
            (how many elements after ``offset``, the logical index there, how many from there on);
            padding is nowhere.
        """
        local = 0
        for start, stop in self.ranges:
            first = max(offset, local)
            last = min(offset + length, local + stop - start)
            if first < last:
                yield first - offset, start + first - local, last - first
            local += stop - start


def part_of(tensor: Tensor, shard: Shard | None) -> Tensor:
    """A rank's part of a logical tensor, perhaps a view; None: all of it."""
    return tensor if shard is None else shard.cut(tensor.__getitem__, tuple(tensor.shape))


def even(dim: int, size: int, rank: int, ranks: int, *, padded: bool = False) -> Shard:
    """Equal stretches, one a rank.

    Args:
        padded: a size that does not divide is padded at its end; else it must divide.
    """
    part = -(-size // ranks)
    assert padded or part * ranks == size, f"{size} does not divide by {ranks}"
    start, stop = min(rank * part, size), min((rank + 1) * part, size)
    ranges = ((start, stop),) if start < stop else ()
    return Shard(dim, size, ranges, part - (stop - start))


def packed(dim: int, sizes: tuple[int, ...], rank: int, ranks: int) -> Shard:
    """Several blocks one after the other ([q | k | v], [gate | up]), each cut evenly."""
    ranges, start = [], 0
    for size in sizes:
        assert size % ranks == 0, f"{size} does not divide by {ranks}"
        part = size // ranks
        ranges.append((start + rank * part, start + (rank + 1) * part))
        start += size
    return Shard(dim, start, tuple(ranges))


def local_parameter(
    param: nn.Parameter, shard: Shard, memo: dict[int, nn.Parameter]
) -> nn.Parameter:
    """This rank's part of a parameter on meta, marked as one. A tied parameter stays one object.

    Args:
        memo: id of a whole parameter -> its part; of all who cut this model.
    """
    if id(param) not in memo:
        assert param.is_meta, "a model is cut before it has memory"
        data = torch.empty(shard.local_shape(tuple(param.shape)), dtype=param.dtype, device="meta")
        local = nn.Parameter(data, requires_grad=param.requires_grad)
        local.__dict__.update(param.__dict__)
        local.tp_shard = shard
        local.tensor_model_parallel = True  # DeepSpeed's mark: its norm counts every rank's part
        memo[id(param)] = local
    return memo[id(param)]

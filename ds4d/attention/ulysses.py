"""DeepSpeed-Ulysses' exchange: all heads of some tokens for some heads of all tokens.

Letters: B sequences, H heads, K key/value heads, s tokens of this rank, D head dim, u ranks.

Between the two exchanges a rank has u * s tokens of H / u heads, and computes attention as if it
were alone with them. Query heads must divide by u. Key heads that do not are repeated to the
fewest that do.

Source: Jacobs et al., "DeepSpeed Ulysses", 2023 (formulas.md 2.4).
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

from ds4d import comm  # noqa: F401 (its operators)

PURPOSE = "heads"


def to_heads(
    query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H | K, s, D] -> [B, H / u | K' / u, u * s, D], tokens in the order of the ranks.

    Collective: the group, once for all three.
    """
    size, heads = group.size(), query.shape[1]
    repeats = repeats_of(heads, key.shape[1], size)
    if repeats > 1:
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    return _Exchange.apply(group, True, query, key, value)


def to_tokens(out: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[B, H / u, u * s, D] -> [B, H, s, D]. Collective: the group."""
    return _Exchange.apply(group, False, out)[0]


def own_heads(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Of something with one number (or row of them) for each head."""
    return x.chunk(group.size(), dim)[group.rank()]


def repeats_of(heads: int, key_heads: int, size: int) -> int:
    """How often each key head is repeated, so that they divide and each rank has those of its query
    heads.

    Raises:
        ValueError: the query heads do not divide.
    """
    if heads % size:
        raise ValueError(f"{heads} attention heads can't be shared by {size} ranks")
    repeated = math.lcm(key_heads, size)
    return (repeated if heads % repeated == 0 else heads) // key_heads


class _Exchange(torch.autograd.Function):
    """Its gradient is the exchange back."""

    @staticmethod
    def forward(ctx, group: dist.ProcessGroup, to_heads: bool, *tensors: Tensor):
        ctx.group, ctx.to_heads = group, to_heads
        return _exchanged(tensors, group, to_heads)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        return None, None, *_exchanged(grads, ctx.group, not ctx.to_heads)


def _exchanged(
    tensors: tuple[Tensor, ...], group: dist.ProcessGroup, to_heads: bool
) -> tuple[Tensor, ...]:
    size = group.size()
    parts = [_by_rank(x, size, to_heads) for x in tensors]
    sent = torch.cat([part.flatten(1) for part in parts], dim=1)  # [u, numbers]
    came = torch.ops.ds4d.all_to_all(sent, group.group_name, PURPOSE)
    columns = came.split([part[0].numel() for part in parts], dim=1)
    # what comes from a rank is as what goes to it: [u, B, H / u, s, D]
    return tuple(
        _together(column.view(part.shape), to_heads) for column, part in zip(columns, parts)
    )


def _by_rank(x: Tensor, size: int, to_heads: bool) -> Tensor:
    """[u, B, H / u, s, D]: cut over heads, or over tokens."""
    return x.unflatten(1 if to_heads else 2, (size, -1)).movedim(1 if to_heads else 2, 0)


def _together(x: Tensor, to_heads: bool) -> Tensor:
    """[u, B, H / u, s, D]: put together along tokens, or heads."""
    dim = 2 if to_heads else 1
    return x.movedim(0, dim).flatten(dim, dim + 1)

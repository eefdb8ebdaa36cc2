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
    """All in one message, by tokens: what comes from the ranks then lies as models lay it."""
    size = group.size()
    parts = [_by_rank(x, size, to_heads) for x in tensors]
    widths = [part[0, 0, 0].numel() for part in parts]
    sent = tensors[0].new_empty(*parts[0].shape[:3], sum(widths))
    for part, columns in zip(parts, sent.split(widths, dim=-1)):
        columns.unflatten(-1, part.shape[3:]).copy_(part)
    came = torch.ops.ds4d.all_to_all(sent, group.group_name, PURPOSE)
    # [u, B, s, *] -> tokens of all ranks [B, u * s, *], a copy only where B > 1; or [B, s, u, *]
    came = came.transpose(0, 1).flatten(1, 2) if to_heads else came.movedim(0, 2)
    return tuple(
        _heads_first(columns.unflatten(-1, part.shape[3:]), to_heads)
        for part, columns in zip(parts, came.split(widths, dim=-1))
    )


def _by_rank(x: Tensor, size: int, to_heads: bool) -> Tensor:
    """[B, H, s, D] -> [u, B, s, H / u, D]: cut over heads; or over tokens."""
    return x.transpose(1, 2).unflatten(2 if to_heads else 1, (size, -1)).movedim(
        2 if to_heads else 1, 0
    )


def _heads_first(x: Tensor, to_heads: bool) -> Tensor:
    """[B, u * s, H / u, D], or [B, s, u, H / u, D] -> [B, H, s, D]"""
    return (x if to_heads else x.flatten(2, 3)).transpose(1, 2)

"""A row-parallel product whose sum over the ranks runs beside it.

Letters: t ranks, B sequences, S tokens, s = S / t, I input features of this rank, O outputs.

The tokens are taken in parts. While the sum of one part is under way, the product of the next is
computed; in the backward pass, while one part of the gradient is gathered, the product with the one
before. When the sequence is scattered a part is a stretch of every rank's tokens, so that each
rank's share of the sum is a stretch of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ds4d import comm
from ds4d.tensor_parallel.blocks import PURPOSE
from ds4d.tensor_parallel.state import TensorParallel
from ds4d.weight_gradients import weight_gradient

# In how many parts; on the CPU the sums take the cores from the products.
PARTS = {"cuda": 4, "cpu": 1}


def parts_for(x: Tensor, tp: TensorParallel) -> int:
    """In how many parts the product with ``x`` is computed; 1: all at once."""
    if not tp.overlap or tp.recompute == "selective" or x.dim() != 3:
        return 1
    tokens = x.shape[1] // (tp.size if tp.scattered else 1)
    return min(PARTS.get(x.device.type, 1), tokens)


def _stretches(tokens: int, parts: int) -> Iterator[slice]:
    bounds = [tokens * i // parts for i in range(parts + 1)]
    return (slice(a, b) for a, b in zip(bounds, bounds[1:]))


class _RowProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, tp: TensorParallel, parts: int) -> Tensor:
        ctx.tp, ctx.parts, ctx.scattered = tp, parts, tp.scattered
        ctx.save_for_backward(x, weight)
        begin = comm.begin_reduce_scatter if tp.scattered else comm.begin_all_reduce
        by_rank = _by_rank(x, ctx)
        pending = []
        for stretch in _stretches(by_rank.shape[2], parts):
            y = F.linear(by_rank[:, :, stretch], weight).flatten(1, 2)
            pending.append(begin(y, tp.group, purpose=PURPOSE))
        return torch.cat([part.wait() for part in pending], dim=1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        by_rank = _by_rank(x, ctx)
        whole = grad.new_empty(*by_rank.shape[:3], grad.shape[-1])  # [B, t, s, O]
        grad_x = torch.empty_like(by_rank)
        stretches = list(_stretches(by_rank.shape[2], ctx.parts))
        pending = [_begin_gather(grad[:, stretch], ctx) for stretch in stretches]
        for stretch, part in zip(stretches, pending):
            whole[:, :, stretch] = part.wait().unflatten(1, (by_rank.shape[1], -1))
            grad_x[:, :, stretch] = whole[:, :, stretch] @ weight
        grad_weight = weight_gradient(weight, whole.flatten(0, 2), x.flatten(0, 1))
        return grad_x.view_as(x), grad_weight, None, None


def _by_rank(x: Tensor, ctx) -> Tensor:
    """[B, S, I] -> [B, t, s, I]; whole: [B, 1, S, I]."""
    return x.unflatten(1, (ctx.tp.size if ctx.scattered else 1, -1))


def _begin_gather(grad: Tensor, ctx) -> comm.PendingSequence:
    if ctx.scattered:
        return comm.begin_gather(grad, ctx.tp.group, purpose=PURPOSE)
    return comm.PendingSequence(grad, None)


def row_product(x: Tensor, weight: Tensor, tp: TensorParallel, parts: int) -> Tensor:
    """[B, S, I], [O, I] -> x W^T summed over the ranks, [B, S, O]; scattered: [B, s, O].

    Collective: tp.
    """
    return _RowProduct.apply(x, weight, tp, parts)

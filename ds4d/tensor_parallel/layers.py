"""Linear layers that hold one tp rank's part of a weight, in the place of Hugging Face's.

Letters: t ranks, B sequences, S tokens, I and O input and output features of the whole layer.

They stand inside blocks: see ``blocks.py`` for what is whole, what is partial, and where it is
summed. Weights keep Hugging Face's names and layout ([O, I], or [I, O] for GPT-2's Conv1D).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ds4d import comm
from ds4d.tensor_parallel.blocks import PURPOSE, Entry, enter, entry_of
from ds4d.tensor_parallel.overlap import parts_for, row_product
from ds4d.tensor_parallel.state import TensorParallel
from ds4d.weight_gradients import linear, weight_gradient


class _ColumnProduct(torch.autograd.Function):
    """x W^T + b behind an entry: keeps what the entry says, adds the input's gradient to it."""

    @staticmethod
    def forward(ctx, x, weight, bias, entry: Entry, kept: Tensor | None):
        ctx.entry = entry
        entry.consumers += 1
        ctx.save_for_backward(x if kept is None else kept, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        entry = ctx.entry
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        if needs_weight and entry.keeps_shard:
            entry.begin_gather(x)
        grad = grad.reshape(-1, grad.shape[-1])  # [B * S, O / t]
        if needs_x:
            entry.add(grad, weight)
        entry.leave()  # from here on the sum over the ranks may be under way
        grad_weight = grad_bias = None
        if needs_weight:
            x = entry.gathered() if entry.keeps_shard else x
            grad_weight = weight_gradient(weight, grad, x.reshape(-1, x.shape[-1]))
        if needs_bias:
            grad_bias = grad.sum(0)
        return None, grad_weight, grad_bias, None, None


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    entry = entry_of(x)
    if entry is None or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, weight, bias)
    return _ColumnProduct.apply(x, weight, bias, entry, x.ds4d_kept)


class ParallelLinear(nn.Module):
    """What both kinds share.

    Args:
        like: the layer on meta whose place this takes.
        transposed: the weight is [I, O].
    """

    def __init__(self, like: nn.Module, tp: TensorParallel, *, transposed: bool) -> None:
        super().__init__()
        self.tp = tp
        self.transposed = transposed
        self.register_parameter("weight", like.weight)
        self.register_parameter("bias", like.bias)
        # on this rank; of the weight itself ZeRO-3 leaves no shape
        self.out_features, self.in_features = self.matrix.shape
        self.train(like.training)

    @property
    def matrix(self) -> Tensor:
        """The weight as [O, I]."""
        return self.weight.T if self.transposed else self.weight

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features} on each of {self.tp.size} ranks"


class ColumnLinear(ParallelLinear):
    """[B, S, I] -> [B, S, O / t]: this rank's output features.

    Args:
        enters: it is a block of its own, and its input what stands outside of blocks.
        arrange: of the output features (``arrange.py``).
    """

    def __init__(
        self,
        like: nn.Module,
        tp: TensorParallel,
        *,
        transposed: bool = False,
        enters: bool = False,
        arrange: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__(like, tp, transposed=transposed)
        self.enters = enters
        self.arrange = arrange

    def forward(self, x: Tensor) -> Tensor:
        if self.enters:
            x = enter(x, self.tp, early=True)
        y = _product(x, self.matrix, self.bias)
        return y if self.arrange is None else self.arrange(y)


class RowLinear(ParallelLinear):
    """[B, S, I / t] -> [B, S, O], summed over the ranks; scattered: [B, S / t, O].

    Args:
        exits: the sum is taken here; else at the end of the block, which is then told so.
        split: the input is whole, [B, S, I]: takes this rank's features of it.
        real: input features that are not padding.
    """

    def __init__(
        self,
        like: nn.Module,
        tp: TensorParallel,
        *,
        transposed: bool = False,
        exits: bool = True,
        split: Callable[[Tensor, dist.ProcessGroup], Tensor] | None = None,
        real: int | None = None,
    ) -> None:
        super().__init__(like, tp, transposed=transposed)
        self.exits = exits
        self.split = split
        self.real = real

    def forward(self, x: Tensor) -> Tensor:
        if self.split is not None:
            x = self.split(x, self.tp.group)
        weight = self.matrix
        if self.real is not None:  # padding neither adds nor learns
            x, weight = x[..., : self.real], weight[:, : self.real]
        product = linear if self.tp.split_backward else F.linear
        if not self.exits:
            y = product(x, weight)
            return y if self.bias is None else y + self.bias / self.tp.size
        if (parts := parts_for(x, self.tp)) > 1:
            y = row_product(x, weight, self.tp, parts)
        else:
            y = leave(product(x, weight), self.tp)
        return y if self.bias is None else y + self.bias


def leave(y: Tensor, tp: TensorParallel) -> Tensor:
    """The exit of a block: sum the ranks' partial outputs [B, S, E]; scattered: -> [B, S / t, E].

    Collective: tp.
    """
    total = comm.scatter_sum if tp.scattered else comm.reduce
    by_row = y if y.dim() == 3 else y[None]
    by_row = total(by_row, tp.group, purpose=PURPOSE, kept=tp.recompute == "selective")
    return by_row if y.dim() == 3 else by_row[0]

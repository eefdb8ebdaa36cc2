"""A small language model that is cut over tp by hand, with all that a checkpoint or an optimizer
may meet: a vocabulary that does not divide, fused [q | k | v] and [gate | up], columns, biases,
weights that every rank holds, and one of these with a partial gradient.

It has no attention over tokens: q, k and v of a token are mixed head by head.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from ds4d import comm
from ds4d.tensor_parallel.shard import Shard, even, packed, part_of

VOCAB, WIDTH, INNER, HEADS, KV_HEADS, LAYERS = 101, 32, 40, 8, 4, 2
HEAD = WIDTH // HEADS
QKV = (WIDTH, KV_HEADS * HEAD, KV_HEADS * HEAD)


class _Enter(torch.autograd.Function):
    """As it is; gradients are summed."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return comm.all_reduce(grad.clone(), ctx.group, purpose="toy"), None


class _Gather(torch.autograd.Function):
    """Columns of all ranks; of the gradient, which is whole on every rank, one's own."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.chunk(ctx.group.size(), -1)[ctx.group.rank()], None


class Tp:
    """A rank's place; without a group, one process that holds all."""

    def __init__(self, group: dist.ProcessGroup | None, dtype: torch.dtype, seed: int) -> None:
        self.group, self.dtype, self.seed = group, dtype, seed
        self.ranks = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()

    def enter(self, x: Tensor) -> Tensor:
        return x if self.ranks == 1 else _Enter.apply(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        return x if self.ranks == 1 else comm.reduce(x, self.group, purpose="toy")

    def gather(self, x: Tensor) -> Tensor:
        return x if self.ranks == 1 else _Gather.apply(x, self.group)

    def weight(self, seed: int, *shape: int, shard: Shard | None = None) -> nn.Parameter:
        generator = torch.Generator().manual_seed(self.seed + seed)
        full = torch.randn(shape, generator=generator) / 4 + (1 if len(shape) == 1 else 0)
        param = nn.Parameter(part_of(full, shard).to(self.dtype).clone())
        if shard is not None and self.ranks > 1:
            param.tp_shard, param.tensor_model_parallel = shard, True
        return param

    def even(self, dim: int, size: int, **kwargs) -> Shard:
        return even(dim, size, self.rank, self.ranks, **kwargs)

    def packed(self, *sizes: int) -> Shard:
        return packed(0, sizes, self.rank, self.ranks)


class Scale(nn.Module):
    def __init__(self, tp: Tp, seed: int, *, partial: bool = False) -> None:
        super().__init__()
        self.weight = tp.weight(seed, WIDTH)
        if partial and tp.ranks > 1:
            self.weight.tp_partial = True

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,)) * self.weight


class Columns(nn.Module):
    def __init__(self, tp: Tp, seed: int, size: int, shard: Shard, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = tp.weight(seed, size, WIDTH, shard=shard)
        self.bias = tp.weight(seed + 1, size, shard=shard) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Rows(nn.Module):
    def __init__(self, tp: Tp, seed: int, size: int) -> None:
        super().__init__()
        self.tp = tp
        self.weight = tp.weight(seed, WIDTH, size, shard=tp.even(1, size))
        self.bias = tp.weight(seed + 1, WIDTH)  # whole, and with a whole gradient

    def forward(self, x: Tensor) -> Tensor:
        return self.tp.leave(F.linear(x, self.weight)) + self.bias


class Embedding(nn.Module):
    def __init__(self, tp: Tp, seed: int) -> None:
        super().__init__()
        self.tp, self.shard = tp, tp.even(0, VOCAB, padded=True)
        self.weight = tp.weight(seed, VOCAB, WIDTH, shard=self.shard)

    def forward(self, ids: Tensor) -> Tensor:
        ((start, stop),) = self.shard.ranges
        here = (ids >= start) & (ids < stop)
        found = F.embedding((ids - start).where(here, 0), self.weight)
        return self.tp.leave(found * here[..., None])


class Layer(nn.Module):
    def __init__(self, tp: Tp, seed: int) -> None:
        super().__init__()
        self.tp = tp
        self.norm = Scale(tp, seed)
        self.inner_norm = Scale(tp, seed + 1, partial=True)  # each rank sees its own heads' part
        self.qkv = Columns(tp, seed + 2, sum(QKV), tp.packed(*QKV))
        self.out = Rows(tp, seed + 4, WIDTH)
        self.gate_up = Columns(tp, seed + 6, 2 * INNER, tp.packed(INNER, INNER), bias=True)
        self.down = Rows(tp, seed + 8, INNER)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.inner_norm(self.tp.enter(self.norm(x)))).split(
            [size // self.tp.ranks for size in QKV], -1
        )
        x = x + self.out(q * _for_each_head(k).sigmoid() + _for_each_head(v))
        gate, up = self.gate_up(self.tp.enter(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def _for_each_head(x: Tensor) -> Tensor:
    """Keys or values, each for the heads that share it."""
    return x.unflatten(-1, (-1, HEAD)).repeat_interleave(HEADS // KV_HEADS, -2).flatten(-2)


class ToyModel(nn.Module):
    """Args:
    group: tp; None: one process.
    seed: other numbers.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.tp = tp = Tp(group, dtype, seed)
        self.embed = Embedding(tp, 1)
        self.layers = nn.ModuleList(Layer(tp, 100 * n) for n in range(1, 1 + LAYERS))
        self.norm = Scale(tp, 2)
        self.head = Columns(tp, 3, VOCAB, tp.even(0, VOCAB, padded=True))

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, use_cache=False):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.tp.gather(self.head(self.tp.enter(self.norm(x))))
        return CausalLMOutput(logits=logits[..., :VOCAB])

"""Attention of one rank's queries over keys that lie on several ranks.

Letters: B sequences, H heads, K key/value heads, s tokens of this place in the ring, n of another
place's keys that are needed here, D head dim, R places.

Keys and values travel, heads as they are stored (never repeated for their query heads), and of them
only what the receiver's queries see: half of a later place's under a causal mask, the borders under
a window, nothing without a common document. In step i each place gets the keys of the place i
before it, straight from there, while it computes with those of step i - 1. What a step finds is
merged into what was found before, in fp32, by the logarithms of the sums of exponentials
(formulas.md 3, "CP").

The backward pass goes the same way: keys arrive once more, and their gradients go back to where
they came from, in the keys' dtype, and are added up there in fp32. Nothing of another rank is kept in
between.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ds4d import comm
from ds4d.attention.blockwise import BlockKernel, empty_output, zeros_by_token
from ds4d.attention.pairs import Pair, Seen, Spans, pair

PURPOSE = "context"

# One operator, so that selective recomputation can keep what it gives, and nothing travels twice.
comm.library.define("attend_over_ranks(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
comm.library.impl(
    "attend_over_ranks",
    lambda query, key, value: _running[-1].compute(query, key, value),
    "CompositeExplicitAutograd",
)
_running: list["Ring | Gathered"] = []


class _Way:
    """What both ways for ``flash.Attend`` share.

    Args:
        kernel: computes blocks.
        spans: what each place holds.
        seen: what the mask leaves visible in the whole sequence.
    """

    def __init__(
        self, kernel: BlockKernel, spans: Sequence[Spans], seen: Seen, group: dist.ProcessGroup
    ) -> None:
        self.kernel, self.spans, self.seen, self.group = kernel, spans, seen, group
        self.here = group.rank()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, bias: None):
        _running.append(self)
        try:
            return torch.ops.ds4d.attend_over_ranks(query, key, value)
        finally:
            _running.pop()

    def add_forward(self, blocks, query: Tensor, key: Tensor, value: Tensor, out, lse) -> None:
        query, key, value = self._alike(query, key, value)
        self.kernel.add_forward(blocks, query, key, value, None, out, lse)

    def add_backward(self, blocks, inputs: Sequence[Tensor], output, grads) -> None:
        self.kernel.add_backward(blocks, (*self._alike(*inputs), None), output, (*grads, None))

    def empty_output(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        query, _, value = self._alike(query, key, value)
        return empty_output(query, value, torch.promote_types(query.dtype, torch.float32))

    def finished(self, out: Tensor, lse: Tensor, query: Tensor, value: Tensor):
        out = out[..., : value.shape[-1]].to(query.dtype)
        return out, lse.masked_fill_(lse == float("-inf"), 0.0)

    def widened(self, *tensors: Tensor, like: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
        """Values' gradients and outputs, as wide as the kernel wants them."""
        wide = max(x.shape[-1] for x in like) if self.kernel.equal_dims else 0
        return tuple(F.pad(x, (0, max(0, wide - x.shape[-1]))) for x in tensors)

    def new_grads(self, *tensors: Tensor) -> list[Tensor]:
        return [
            zeros_by_token(x, torch.promote_types(x.dtype, torch.float32))
            for x in self._alike(*tensors)
        ]

    def _alike(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Zeros at the end of a head change no score and only add zeros to the output."""
        wide = max(x.shape[-1] for x in tensors)
        if not self.kernel.equal_dims or all(x.shape[-1] == wide for x in tensors):
            return tensors
        return tuple(F.pad(x, (0, wide - x.shape[-1])) for x in tensors)


class _Step(NamedTuple):
    """Attributes:
    to, wanted: the place whose queries need keys from here, and which.
    source, pair: the place whose keys are needed here, and for what.
    """

    to: int
    wanted: Pair
    source: int
    pair: Pair


class Ring(_Way):
    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        size = self.group.size()
        self.own = self._pair(self.here, self.here)
        self.steps = []
        for distance in range(1, size):
            to, source = (self.here + distance) % size, (self.here - distance) % size
            self.steps.append(
                _Step(to, self._pair(to, self.here), source, self._pair(self.here, source))
            )

    def _pair(self, queries: int, keys: int) -> Pair:
        return pair(self.spans[queries], self.spans[keys], self.seen)

    def compute(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = self.empty_output(query, key, value)
        coming = self._begin(0, key, value)
        self.add_forward(self.own.blocks, query, key, value, out, lse)
        for number, step in enumerate(self.steps):
            k, v = coming.wait()
            coming = self._begin(number + 1, key, value)
            self.add_forward(step.pair.blocks, query, k, v, out, lse)
        return self.finished(out, lse, query, value)

    def backward(self, grad_out, query, key, value, bias, out, lse):
        output = (*self.widened(grad_out, out, like=(key, value)), lse)
        dq, dk, dv = self.new_grads(query, key, value)
        coming, returning = self._begin(0, key, value), None
        self.add_backward(self.own.blocks, (query, key, value), output, (dq, dk, dv))
        for number, step in enumerate(self.steps):
            k, v = coming.wait()
            coming = self._begin(number + 1, key, value)
            grads = self.new_grads(k, v)
            self.add_backward(step.pair.blocks, (query, k, v), output, (dq, *grads))
            if returning is not None:
                returning.add_to(dk, dv)
            returning = self._begin_return(step, key, value, *grads)
        if returning is not None:
            returning.add_to(dk, dv)
        grads = zip((dq, dk, dv), (query, key, value))
        return *(grad[..., : x.shape[-1]].to(x.dtype) for grad, x in grads), None

    def _begin(self, number: int, key: Tensor, value: Tensor) -> "_Coming | None":
        """Send and receive the keys and values of a step."""
        if number == len(self.steps):
            return None
        step = self.steps[number]
        coming = _Coming(step.pair.num_keys, key, value)
        sends, receives = [], []
        if step.wanted.keys:
            sends = [(_packed(step.wanted.keys, key, value, key.dtype), step.to)]
        if step.pair.keys:
            receives = [(coming.memory, step.source)]
        coming.exchange = comm.begin_exchange(sends, receives, self.group, purpose=PURPOSE)
        return coming

    def _begin_return(self, step: _Step, key: Tensor, value: Tensor, dk: Tensor, dv: Tensor):
        """Send the gradients of a step's keys to their place, and receive those of the keys that
        were sent from here."""
        returning = _Returning(step.wanted, key, value)
        whole = ((0, step.pair.num_keys),)
        dk, dv = dk[..., : key.shape[-1]], dv[..., : value.shape[-1]]
        sends, receives = [], []
        if step.pair.keys:
            sends = [(_packed(whole, dk, dv, key.dtype), step.source)]
        if step.wanted.keys:
            receives = [(returning.memory, step.to)]
        returning.exchange = comm.begin_exchange(
            sends, receives, self.group, purpose=f"{PURPOSE} gradients"
        )
        return returning


class _Coming:
    """Keys and values on their way here."""

    exchange: comm.Exchange

    def __init__(self, n: int, key: Tensor, value: Tensor) -> None:
        self.memory = _memory(n, key, value, key.dtype)
        self._like = key, value

    def wait(self) -> tuple[Tensor, Tensor]:
        self.exchange.wait()
        return _views(self.memory, *self._like)


class _Returning(_Coming):
    """Gradients on their way back to the keys they are of."""

    def __init__(self, wanted: Pair, key: Tensor, value: Tensor) -> None:
        super().__init__(wanted.num_keys, key, value)
        self._ranges = wanted.keys

    def add_to(self, dk: Tensor, dv: Tensor) -> None:
        for grad, came in zip((dk, dv), self.wait()):
            for (start, stop), part in zip(self._ranges, _parts(came, self._ranges)):
                grad[:, :, start:stop, : came.shape[-1]] += part


class Gathered(_Way):
    """All keys on all ranks, in one collective: for short sequences, where a ring's many small
    steps cost more than they hide."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.pair = pair(self.spans[self.here], ((0, self.seen.length),), self.seen)

    def compute(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = self.empty_output(query, key, value)
        self.add_forward(self.pair.blocks, query, *self._gather(key, value), out, lse)
        return self.finished(out, lse, query, value)

    def backward(self, grad_out, query, key, value, bias, out, lse):
        output = (*self.widened(grad_out, out, like=(key, value)), lse)
        k, v = self._gather(key, value)
        dq, dk, dv = self.new_grads(query, k, v)
        self.add_backward(self.pair.blocks, (query, k, v), output, (dq, dk, dv))
        dk, dv = self._scatter(dk[..., : k.shape[-1]], dv[..., : v.shape[-1]], key.dtype)
        grads = zip((dq[..., : query.shape[-1]], dk, dv), (query, key, value))
        return *(grad.to(x.dtype) for grad, x in grads), None

    def _gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """[B, K, s, D] -> [B, K, S, D], in the order of the sequence."""
        mine = _packed(((0, key.shape[2]),), key, value, key.dtype)
        by_place = comm.begin_all_gather(mine, self.group, purpose=PURPOSE).wait()
        whole = _views(_memory(self.seen.length, key, value, key.dtype), key, value)
        for memory, spans in zip(by_place, self.spans):
            for held, into in zip(_views(memory, key, value), whole):
                for (start, stop), part in zip(spans, _parts(held, spans)):
                    into[:, :, start:stop] = part
        return whole

    def _scatter(self, dk: Tensor, dv: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """[B, K, S, D] -> [B, K, s, D], summed. They travel as keys do, and are added up in fp32,
        which a reduction on the way would not do."""
        by_place = torch.stack([_packed(spans, dk, dv, dtype) for spans in self.spans])
        came = comm.all_to_all(by_place, self.group, purpose=f"{PURPOSE} gradients")
        return _views(came.sum(0, dtype=dk.dtype), dk, dv)


def _memory(n: int, key: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """For n of [B, K, ., D] and n of [B, K, ., Dv], in one row."""
    (batch, heads, _, depth), value_depth = key.shape, value.shape[-1]
    return key.new_empty(batch * heads * n * (depth + value_depth), dtype=dtype)


def _views(memory: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """[B, K, n, D] and [B, K, n, Dv] in such a row."""
    (batch, heads, _, depth), value_depth = key.shape, value.shape[-1]
    n = memory.numel() // (batch * heads * (depth + value_depth))
    k, v = memory.split([batch * heads * n * d for d in (depth, value_depth)])
    return k.view(batch, heads, n, depth), v.view(batch, heads, n, value_depth)


def _packed(ranges: Spans, key: Tensor, value: Tensor, dtype: torch.dtype) -> Tensor:
    """Some ranges of the tokens of key and value in such a row."""
    n = sum(stop - start for start, stop in ranges)
    memory = _memory(n, key, value, dtype)
    for x, into in zip((key, value), _views(memory, key, value)):
        for (start, stop), part in zip(ranges, _parts(into, ranges)):
            part.copy_(x[:, :, start:stop])
    return memory


def _parts(x: Tensor, ranges: Spans) -> tuple[Tensor, ...]:
    """[B, K, n, D] as the ranges that lie in it, one after the other."""
    return x.split([stop - start for start, stop in ranges], dim=2)

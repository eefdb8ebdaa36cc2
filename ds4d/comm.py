"""Collectives over one group: plain, and as autograd knows them; they count their bytes when asked.

Letters: t ranks of the group, B sequences, s tokens of this rank's shard, S = t * s, E hidden size.

Each function takes the group that has to call it. On a group of one rank it communicates nothing
and copies nothing. The plain ones can be begun early and waited for late (``Pending``). Those that
autograd knows are Megatron-LM's pairs (formulas.md 3, "Mappings") and a few more:

    name                      forward             backward
    ``reduce``                sum                 as it is
    ``scatter_sum``           sum, keep shard     gather
    ``gather_complete``       gather              own stretch
    ``gather_last``           gather columns      sum, keep own columns
    ``gather_last_complete``  gather columns      own columns
    ``split_last``            own columns         zeros elsewhere
    ``split_last_complete``   own columns         gather
    ``sum_both_ways``         sum                 sum

``gather_last``, ``split_last`` and ``sum_both_ways`` are for inside a block (``blocks.py``), where
gradients are *partial*: what a rank holds has still to be summed over the group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from ds4d import shared_memory
from ds4d.shared_memory import Parcel

# their names before torch 2.13
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_to_all = dist.all_to_all_single


Work = dist.Work | shared_memory.Work


@dataclass(frozen=True)
class _Native:
    """What the group was made with: NCCL, gloo."""

    group: dist.ProcessGroup

    def all_reduce(self, x: Tensor, op: dist.ReduceOp) -> Work:
        return dist.all_reduce(x, op, group=self.group, async_op=True)

    def all_gather(self, out: Tensor, x: Tensor) -> Work:
        """x -> out [t, *x.shape]"""
        return _all_gather(out.flatten(0, 1), x, group=self.group, async_op=True)

    def reduce_scatter(self, out: Tensor, x: Tensor) -> Work:
        """x [t, *out.shape] -> out"""
        return _reduce_scatter(out, x.flatten(0, 1), group=self.group, async_op=True)

    def all_to_all(self, out: Tensor, x: Tensor) -> Work:
        """x [t, ...], a part for each rank -> out [t, ...], a part from each"""
        return _all_to_all(out.flatten(0, 1), x.flatten(0, 1), group=self.group, async_op=True)

    # In a batch NCCL uses the group's communicator, which is there; else it would first make one
    # of the two ranks, and the program would wait for the other one.

    def send(self, x: Tensor, peer: int) -> Work:
        operation = dist.P2POp(dist.isend, x, group=self.group, group_peer=peer)
        return dist.batch_isend_irecv([operation])[0]

    def recv(self, out: Tensor, peer: int) -> Work:
        operation = dist.P2POp(dist.irecv, out, group=self.group, group_peer=peer)
        return dist.batch_isend_irecv([operation])[0]

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel]) -> list[Work]:
        """In one batch, without which two ranks that both send first would wait for each other."""
        operations = [dist.P2POp(dist.isend, x, group=self.group, group_peer=p) for x, p in sends]
        operations += [
            dist.P2POp(dist.irecv, out, group=self.group, group_peer=p) for out, p in receives
        ]
        return dist.batch_isend_irecv(operations)


def _transport(x: Tensor, group: dist.ProcessGroup) -> _Native | shared_memory.Channel:
    """What carries tensors like ``x``: on CPUs of one host their memory."""
    channel = shared_memory.channel_of(group) if x.device.type == "cpu" else None
    return channel or _Native(group)


@dataclass
class Traffic:
    """What this rank sent, in bytes, were each collective a ring (formulas.md 2.4).

    Attributes:
        sent: bytes by (purpose, collective).
        calls: collectives by (purpose, collective).
    """

    sent: Counter = field(default_factory=Counter)
    calls: Counter = field(default_factory=Counter)

    def of(self, purpose: str) -> int:
        """Bytes sent for one purpose."""
        return sum(count for (what, _), count in self.sent.items() if what == purpose)


_counting: list[Traffic] = []


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what is sent from here on. Nested counters all count."""
    traffic = Traffic()
    _counting.append(traffic)
    try:
        yield traffic
    finally:
        _counting.remove(traffic)


# collective -> how often a ring sends (t - 1) / t of the full tensor
_PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "broadcast": 1, "all_to_all": 1}


def _count(collective: str, full: Tensor, group: dist.ProcessGroup, purpose: str) -> None:
    size = group.size()
    for traffic in _counting:
        traffic.calls[purpose, collective] += 1
        traffic.sent[purpose, collective] += _PASSES[collective] * full.nbytes * (size - 1) // size


class Pending:
    """A result under way. ``wait()`` once; on a GPU it stops the stream, not the program."""

    def __init__(self, result: Tensor, work: Work | None, shape: tuple[int, ...]) -> None:
        self._result, self._work, self._shape = result, work, shape

    def wait(self) -> Tensor:
        if self._work is not None:
            self._work.wait()
        return self._result.view(self._shape)


# -- plain ----------------------------------------------------------------------------------------


def begin_all_reduce(
    x: Tensor, group: dist.ProcessGroup, *, purpose: str, op=dist.ReduceOp.SUM
) -> Pending:
    """Sum (or ``op``) in place. ``x`` must not be touched until it is waited for."""
    work = None
    if group.size() > 1:
        work = _transport(x, group).all_reduce(x, op)
        _count("all_reduce", x, group, purpose)
    return Pending(x, work, x.shape)


def all_reduce(
    x: Tensor, group: dist.ProcessGroup, *, purpose: str, op=dist.ReduceOp.SUM
) -> Tensor:
    """Sum (or ``op``) in place; returns ``x``."""
    begin_all_reduce(x, group, purpose=purpose, op=op).wait()
    return x


def broadcast(x: Tensor, source: int, group: dist.ProcessGroup, *, purpose: str) -> Tensor:
    """To all from rank ``source`` of the group, in place; returns ``x``."""
    if group.size() > 1:
        dist.broadcast(x, group=group, group_src=source)
        _count("broadcast", x, group, purpose)
    return x


def open_transport(group: dist.ProcessGroup, device: torch.device) -> None:
    """Before the first ``begin_send``, ``begin_receive`` and ``begin_exchange``, which must not wait
    for other ranks to make connections. Collective: the group."""
    if group.size() > 1:
        x = torch.zeros(1, device=device)
        _transport(x, group).all_reduce(x, dist.ReduceOp.SUM).wait()


def begin_send(x: Tensor, to: int, group: dist.ProcessGroup, *, purpose: str) -> Work:
    """Send to rank ``to`` of the group, which receives in the order in which is sent. ``x`` must
    stay as it is until the work is completed."""
    for traffic in _counting:
        traffic.calls[purpose, "send"] += 1
        traffic.sent[purpose, "send"] += x.nbytes
    return _transport(x, group).send(x, to)


def begin_receive(out: Tensor, source: int, group: dist.ProcessGroup) -> Pending:
    """Receive into ``out`` what rank ``source`` of the group sends next; its sender counts it."""
    return Pending(out, _transport(out, group).recv(out, source), out.shape)


class Exchange:
    """Tensors under way in both directions. ``wait()`` once, before what has been sent is changed
    or what is received is read; on a GPU it stops the stream, not the program."""

    def __init__(self, sends: Sequence[Parcel], receives: Sequence[Parcel], works: Sequence[Work]):
        self._kept = [*sends, *receives]
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._kept = []


def begin_exchange(
    sends: Sequence[Parcel], receives: Sequence[Parcel], group: dist.ProcessGroup, *, purpose: str
) -> Exchange:
    """Send contiguous tensors to ranks of the group and receive others from ranks of it.

    Both ends of each transfer begin their exchanges in the same order.
    """
    for x, _ in sends:
        for traffic in _counting:
            traffic.calls[purpose, "send"] += 1
            traffic.sent[purpose, "send"] += x.nbytes
    parcels = [*sends, *receives]
    works = _transport(parcels[0][0], group).exchange(sends, receives) if parcels else []
    return Exchange(sends, receives, works)


def begin_all_gather(x: Tensor, group: dist.ProcessGroup, *, purpose: str) -> Pending:
    """[...] -> [t, ...]"""
    x = x.contiguous()
    out = x.new_empty(group.size(), *x.shape)
    work = _transport(x, group).all_gather(out, x)
    _count("all_gather", out, group, purpose)
    return Pending(out, work, out.shape)


def all_to_all(x: Tensor, group: dist.ProcessGroup, *, purpose: str) -> Tensor:
    """[t, ...], a part for each rank -> [t, ...], a part from each."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _transport(x, group).all_to_all(out, x).wait()
    _count("all_to_all", x, group, purpose)
    return out


def begin_gather(x: Tensor, group: dist.ProcessGroup, *, purpose: str) -> "PendingSequence":
    """[B, s, E] -> [B, S, E], along dim 1."""
    if group.size() == 1:
        return PendingSequence(x, None)
    x = x.contiguous()
    out = x.new_empty(group.size(), *x.shape)  # [t, B, s, E]
    work = _transport(x, group).all_gather(out, x)
    _count("all_gather", out, group, purpose)
    return PendingSequence(out, work)


class PendingSequence:
    """A gathered sequence under way: the ranks' shards one after the other in memory."""

    def __init__(self, out: Tensor, work: Work | None) -> None:
        self._out, self._work = out, work

    def wait(self) -> Tensor:
        if self._work is None:
            return self._out
        self._work.wait()
        # [t, B, s, E] -> [B, t, s, E] -> [B, S, E]; a copy only where B > 1
        return self._out.transpose(0, 1).flatten(1, 2)


def begin_reduce_scatter(x: Tensor, group: dist.ProcessGroup, *, purpose: str) -> Pending:
    """[B, S, E] -> [B, s, E]: this rank's stretch of dim 1 of the sum."""
    size, (batch, length, *rest) = group.size(), x.shape
    if size == 1:
        return Pending(x, None, x.shape)
    part = length // size
    # [B, S, E] -> [B, t, s, E] -> [t, B, s, E]; a copy only where B > 1
    by_rank = x.reshape(batch, size, part, *rest).transpose(0, 1).contiguous()
    out = x.new_empty(batch, part, *rest)
    work = _transport(x, group).reduce_scatter(out, by_rank)
    _count("reduce_scatter", by_rank, group, purpose)
    return Pending(out, work, out.shape)


def gather_sequence(x: Tensor, group: dist.ProcessGroup, *, purpose: str) -> Tensor:
    """[B, s, E] -> [B, S, E], along dim 1."""
    return begin_gather(x, group, purpose=purpose).wait()


def reduce_scatter_sequence(x: Tensor, group: dist.ProcessGroup, *, purpose: str) -> Tensor:
    """[B, S, E] -> [B, s, E]: this rank's stretch of dim 1 of the sum."""
    return begin_reduce_scatter(x, group, purpose=purpose).wait()


# What selective recomputation keeps (``model/build.py``) it knows by operator: so what a forward
# pass sums or puts together inside a layer are operators, and it is not communicated again.

library = torch.library.Library("ds4d", "DEF")
library.define("all_reduce(Tensor x, str group, str purpose) -> Tensor")
library.define("reduce_scatter(Tensor x, str group, str purpose) -> Tensor")
library.impl(
    "all_reduce",
    lambda x, group, purpose: all_reduce(
        x.clone(), _resolve_process_group(group), purpose=purpose
    ),
    "CompositeExplicitAutograd",
)
library.impl(
    "reduce_scatter",
    lambda x, group, purpose: reduce_scatter_sequence(
        x, _resolve_process_group(group), purpose=purpose
    ),
    "CompositeExplicitAutograd",
)
library.define("gather_last(Tensor x, str group, str purpose) -> Tensor")
library.impl(
    "gather_last",
    lambda x, group, purpose: _all_gather_last(x, _resolve_process_group(group), purpose),
    "CompositeExplicitAutograd",
)


library.define("all_to_all(Tensor x, str group, str purpose) -> Tensor")
library.impl(
    "all_to_all",
    lambda x, group, purpose: all_to_all(x, _resolve_process_group(group), purpose=purpose),
    "CompositeExplicitAutograd",
)


def _all_gather_last(x: Tensor, group: dist.ProcessGroup, purpose: str) -> Tensor:
    """[..., C] -> [..., t * C]"""
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    out = rows.new_empty(group.size(), *rows.shape)  # [t, N, C]
    _transport(x, group).all_gather(out, rows).wait()
    _count("all_gather", out, group, purpose)
    # [t, N, C] -> [N, t, C] -> [..., t * C]
    return out.transpose(0, 1).reshape(*x.shape[:-1], -1)


# -- as autograd knows them -----------------------------------------------------------------------


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, purpose: str, kept: bool) -> Tensor:
        if kept:
            return torch.ops.ds4d.all_reduce(x, group.group_name, purpose)
        ctx.mark_dirty(x)
        return all_reduce(x, group, purpose=purpose)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None, None, None


def reduce(x: Tensor, group: dist.ProcessGroup, *, purpose: str, kept: bool = False) -> Tensor:
    """Sum over the group; the gradient, complete on every rank, passes as it is.

    Args:
        x: taken over: it must be nobody's but the caller's (or ``kept``).
        kept: selective recomputation keeps the result.
    """
    return x if group.size() == 1 else _Reduce.apply(x, group, purpose, kept)


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, purpose: str, kept: bool) -> Tensor:
        ctx.group, ctx.purpose = group, purpose
        if kept:
            return torch.ops.ds4d.reduce_scatter(x, group.group_name, purpose)
        return reduce_scatter_sequence(x, group, purpose=purpose)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return gather_sequence(grad, ctx.group, purpose=ctx.purpose), None, None, None


def scatter_sum(x: Tensor, group: dist.ProcessGroup, *, purpose: str, kept: bool = False) -> Tensor:
    """[B, S, E] -> [B, s, E]: sum over the group, keep this rank's stretch of the sequence."""
    return x if group.size() == 1 else _ScatterSum.apply(x, group, purpose, kept)


class _GatherComplete(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, purpose: str) -> Tensor:
        ctx.start, ctx.length = group.rank() * x.shape[1], x.shape[1]
        return gather_sequence(x, group, purpose=purpose)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.narrow(1, ctx.start, ctx.length), None, None


def gather_complete(x: Tensor, group: dist.ProcessGroup, *, purpose: str) -> Tensor:
    """[B, s, E] -> [B, S, E], for what every rank then computes alike: the gradient is complete."""
    return x if group.size() == 1 else _GatherComplete.apply(x, group, purpose)


class _GatherLast(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, purpose: str) -> Tensor:
        ctx.group, ctx.purpose = group, purpose
        return torch.ops.ds4d.gather_last(x, group.group_name, purpose)

    @staticmethod
    def backward(ctx, grad: Tensor):
        size, columns = ctx.group.size(), grad.shape[-1] // ctx.group.size()
        # [..., t * C] -> [t, N, C]
        by_rank = grad.reshape(-1, size, columns).transpose(0, 1).contiguous()
        out = by_rank.new_empty(by_rank.shape[1:])
        _transport(out, ctx.group).reduce_scatter(out, by_rank).wait()
        _count("reduce_scatter", by_rank, ctx.group, ctx.purpose)
        return out.view(*grad.shape[:-1], columns), None, None


def gather_last(x: Tensor, group: dist.ProcessGroup, *, purpose: str) -> Tensor:
    """[..., C] -> [..., t * C]; partial gradients are summed."""
    return x if group.size() == 1 else _GatherLast.apply(x, group, purpose)


class _GatherLastComplete(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, purpose: str) -> Tensor:
        ctx.group = group
        return torch.ops.ds4d.gather_last(x, group.group_name, purpose)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return split_last(grad, ctx.group), None, None


def gather_last_complete(x: Tensor, group: dist.ProcessGroup, *, purpose: str) -> Tensor:
    """[..., C] -> [..., t * C], for what every rank then computes alike."""
    return x if group.size() == 1 else _GatherLastComplete.apply(x, group, purpose)


def split_last(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[..., t * C] -> [..., C]: this rank's columns; the gradient of the others is zero here."""
    size = x.shape[-1] // group.size()
    return x.narrow(-1, group.rank() * size, size)


class _SplitLastComplete(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return split_last(x, group).contiguous()

    @staticmethod
    def backward(ctx, grad: Tensor):
        return _all_gather_last(grad, ctx.group, "split inputs"), None


def split_last_complete(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[..., t * C] -> [..., C], of what every rank has computed alike."""
    return x if group.size() == 1 else _SplitLastComplete.apply(x, group)


class _SumBothWays(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup, purpose: str) -> Tensor:
        ctx.group, ctx.purpose = group, purpose
        return torch.ops.ds4d.all_reduce(x, group.group_name, purpose)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return all_reduce(grad.clone(), ctx.group, purpose=ctx.purpose), None, None


def sum_both_ways(x: Tensor, group: dist.ProcessGroup, *, purpose: str) -> Tensor:
    """Sum over the group, where each rank goes on to compute a part with it."""
    return x if group.size() == 1 else _SumBothWays.apply(x, group, purpose)

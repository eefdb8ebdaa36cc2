"""In which order each pipeline rank makes its passes. Pure: no tensors, no processes.

Letters: p ranks, v chunks on each, r a rank, m micro-batches; F a forward pass, B a full backward
pass, I and W its two halves (of inputs, of weights).

A rank's order holds no communication: a pass starts when its rank is free and what it needs is
there. In every schedule each chunk takes the micro-batches in their order, in every kind of pass,
so gradients are summed in the same order whatever the schedule. ``simulate.py`` gives the time and
the activations that an order takes, and finds one that cannot be run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple

from ds4d.pipeline.actions import Action, Kind, Placement, Schedule

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT
# Where a pass's time decides; a weight half is products alone, the others have attention and norms.
# Of two ranks the first has the last stage too, and the head with it. There weight halves are taken
# for shorter: fewer are made early, and one is left for each wait of that rank, the busier one. Of
# more ranks, those who wait for it lose more.
TICKS = {F: 4, I: 4, W: 3}
TICKS_OF_TWO_RANKS = {F: 5, I: 8, W: 3}


def make_schedule(name: str, *, ranks: int, chunks: int, micro_batches: int) -> Schedule:
    """The order of passes of a training step.

    Args:
        name: ``ds4d.pipeline.schedule``.
        ranks: p.
        chunks: ``ds4d.pipeline.chunks``, v; see ``chunks_of``.
        micro_batches: m, of one rank's step: the accumulation steps.
    Raises:
        ValueError: this schedule cannot have so many chunks or so few micro-batches.
    """
    placement = placement_of(name, ranks, chunks)
    rule = _RULES[name]
    if micro_batches < rule.micro_batches_per_rank * ranks:
        needed = rule.micro_batches_per_rank * ranks
        raise ValueError(
            f"gradient_accumulation_steps {micro_batches} is too few for ds4d.pipeline.schedule "
            f"{name!r}: it fills the pipeline from both ends, which takes "
            f"{rule.micro_batches_per_rank} micro-batches for each of the {ranks} pipeline ranks; "
            f"use {needed} or more, or another schedule"
        )
    orders = [rule.order(rank, placement, micro_batches) for rank in range(ranks)]
    if rule.late_weights:
        orders = _with_late_weights(orders, placement)
    return Schedule(name, placement, micro_batches, tuple(map(tuple, orders)))


def placement_of(name: str, ranks: int, chunks: int) -> Placement:
    """Where a schedule has the virtual stages.

    Raises:
        ValueError: as ``chunks_of``.
    """
    return _RULES[name].placement(ranks, chunks_of(name, chunks))


def chunks_of(name: str, asked: int) -> int:
    """Chunks on each rank. 1 is what a file has that says nothing of chunks.

    Raises:
        ValueError: the schedule has another number, always.
    """
    fixed = _RULES[name].chunks
    if fixed is None:
        return asked
    if asked not in (1, fixed):
        raise ValueError(
            f"ds4d.pipeline.chunks {asked}: ds4d.pipeline.schedule {name!r} has always {fixed} on "
            f'each rank; leave chunks out, or use schedule "interleaved"'
        )
    return fixed


def forward_passes(schedule: Schedule) -> Schedule:
    """A schedule's forward passes alone, on each rank in the order in which they are there."""
    actions = (tuple(a for a in order if a.kind is F) for order in schedule.actions)
    return replace(schedule, actions=tuple(actions))


def forward_only(placement: Placement, micro_batches: int) -> Schedule:
    """The order of an evaluation, for any placement: whenever a rank is free it takes, of the
    passes that are ready, the one furthest along the model. So the pipeline never runs empty, and
    few activations wait between stages. Found by letting every pass take one tick."""
    last = placement.stages - 1
    orders: list[list[Action]] = [[] for _ in range(placement.ranks)]
    # of each rank, a heap of (stages that come after, micro-batch)
    ready: list[list[tuple[int, int]]] = [[] for _ in range(placement.ranks)]
    ready[placement.places[0].rank] = [(last, i) for i in range(micro_batches)]
    while any(ready):
        for after, i in [heappop(passes) for passes in ready if passes]:
            rank, chunk = placement.places[last - after]
            orders[rank].append(Action(F, chunk, i))
            if after:
                heappush(ready[placement.places[last - after + 1].rank], (after - 1, i))
    return Schedule("forward only", placement, micro_batches, tuple(map(tuple, orders)))


# -- one rank's order -------------------------------------------------------------------------


def _gpipe(rank: int, placement: Placement, micro_batches: int) -> list[Action]:
    """All forwards, then all backwards."""
    forwards, backwards = _passes(F, 0, micro_batches), _passes(B, 0, micro_batches)
    return _alternate(forwards, zip(backwards), ahead=micro_batches)


def _one_f_one_b(rank: int, placement: Placement, micro_batches: int) -> list[Action]:
    """A rank is so many forwards ahead as ranks come after it; then each forward is followed by a
    backward, which frees what the forward will hold. Source: PipeDream-Flush, arXiv 2006.09503."""
    forwards, backwards = _passes(F, 0, micro_batches), _passes(B, 0, micro_batches)
    return _alternate(forwards, zip(backwards), ahead=placement.ranks - rank - 1)


def _interleaved(rank: int, placement: Placement, micro_batches: int) -> list[Action]:
    """A group of micro-batches goes through chunk 0, then through chunk 1, ...; then the next
    group. Backwards take the chunks the other way round.

    Groups have p micro-batches where p divides m, else a few more: a smaller one would come back to
    the first rank before that is free of the group before it, and could deadlock. So m >= p costs
    the same bubble for every m, and holds (v - 1)(N - p) chunks more, N the largest group.

    Source: arXiv 2104.04473, section 2.2; the lead of the first ranks is that of Megatron-LM.
    """
    ranks, chunks = placement.ranks, placement.chunks
    if chunks == 1:
        return _one_f_one_b(rank, placement, micro_batches)
    groups = _even_groups(micro_batches, at_least=ranks)

    def grouped(kind: Kind, chunk_order: Sequence[int]) -> list[Action]:
        return [Action(kind, chunk, i) for group in groups for chunk in chunk_order for i in group]

    forwards = grouped(F, range(chunks))
    backwards = grouped(B, range(chunks)[::-1])
    ahead = 2 * (ranks - rank - 1) + (chunks - 1) * len(groups[0])
    return _alternate(forwards, zip(backwards), ahead=ahead)


def _even_groups(count: int, *, at_least: int) -> list[range]:
    """Cut 0 .. count - 1 into groups whose sizes differ by one at most, the larger ones first."""
    groups = max(count // at_least, 1)
    size, larger = divmod(count, groups)
    starts = [group * size + min(group, larger) for group in range(groups + 1)]
    return list(map(range, starts, starts[1:]))


def _dualpipev(rank: int, placement: Placement, micro_batches: int) -> list[Action]:
    """Forwards of one chunk beside backwards of the other: the first stages and the last ones are
    on the same rank, so it has both kinds of work early. Same order as DeepSpeed's
    DualPipeVSchedule, with full backwards.

    The published bubble needs weight halves made late, and a forward and a backward at once. This
    order leaves each rank idle for max((p - 1)(F + B), 2(p - 1)B - F), with F <= B the times of one
    chunk: 2/3 of 1F1B's where B = 2F. That was found by simulation, as the published one does not
    apply; the tests hold it.

    Source: https://github.com/deepseek-ai/DualPipe."""
    after = placement.ranks - rank - 1
    f0, f1, b0, b1 = (
        iter(_passes(kind, chunk, micro_batches)) for kind in (F, B) for chunk in (0, 1)
    )
    phases = [
        (2 * after, [f0]),
        (rank + 1, [f0, f1]),
        (after, [b1, f1]),
        (micro_batches - placement.ranks - after, [f0, b1, f1, b0]),
        (after, [b1, f1, b0]),
        (rank + 1, [b1, b0]),
        (after, [b0]),
    ]
    return [next(each) for times, passes in phases for _ in range(times) for each in passes]


def _zb_h1(rank: int, placement: Placement, micro_batches: int) -> list[Action]:
    """1F1B with backwards in halves. The input half goes at once, for the rank before waits for
    it; the weight half of rank r comes r micro-batches later, so that the last r of them fill the
    time in which 1F1B only waits for gradients. Activations are held for p micro-batches on every
    rank, which is what 1F1B holds on its first. Source: arXiv 2401.10241, section 2 (ZB-H1)."""
    forwards, inputs, weights = (_passes(kind, 0, micro_batches) for kind in (F, I, W))
    on_time = max(micro_batches - rank, 0)
    halves = [*zip(inputs[:rank]), *zip(inputs[rank:], weights[:on_time], strict=True)]
    halves[-1] += tuple(weights[on_time:])
    return _alternate(forwards, halves, ahead=placement.ranks - rank - 1)


def _zbv(rank: int, placement: Placement, micro_batches: int) -> list[Action]:
    """ZB-V: down the ranks and up again, so that the last stage is on the first rank, whose
    backwards begin as its last forwards do. Forwards and input halves are in the order of torch's
    ScheduleZBVZeroBubble, which is for 2p - 1 micro-batches or more; of fewer, the others are left
    out. With the weight halves between them each rank is idle for (p - 1)I, the time of a chunk, if
    W <= F <= I <= 2W and m >= 2p - 1: a sixth of 1F1B's where F = I = W. That was found by
    simulation; the tests hold it.

    Source: arXiv 2401.10241, section 6; 2405.15362."""
    after = placement.ranks - rank - 1
    made = max(micro_batches, 2 * placement.ranks - 1)
    f0, f1, i0, i1 = (iter(_passes(kind, chunk, made)) for kind in (F, I) for chunk in (0, 1))
    phases = [
        (2 * after + 1, [f0]),
        (rank, [f1, f0]),
        (after + 1, [f1, i1]),
        (made - placement.ranks - after, [f0, i0, f1, i1]),
        (after, [i0, f1, i1]),
        (rank, [i0, i1]),
        (after + 1, [i0]),
    ]
    order = (next(each) for times, passes in phases for _ in range(times) for each in passes)
    return [action for action in order if action.micro_batch < micro_batches]


def _with_late_weights(
    orders: Sequence[Sequence[Action]], placement: Placement
) -> list[list[Action]]:
    """Add the weight halves to orders without. A rank makes the oldest one when it would wait, or
    when its next forward would be more than it may hold: p * v chunks, which is what 1F1B holds on
    its first rank. When that is, is found by letting every pass take its ``TICKS``."""
    ticks = TICKS_OF_TWO_RANKS if placement.ranks == 2 else TICKS
    others = [deque(order) for order in orders]
    weights: list[deque[Action]] = [deque() for _ in orders]
    done: list[list[Action]] = [[] for _ in orders]
    room = [placement.stages] * placement.ranks
    free_at = [0] * placement.ranks
    made_at: dict[tuple[Kind, int, int], int] = {}  # (kind, stage, micro-batch) -> when

    def take(rank: int, now: int) -> Action | None:
        if others[rank]:
            kind, chunk, i = others[rank][0]
            needed = placement.stage_of(rank, chunk) + (-1 if kind is F else 1)
            inside = 0 <= needed < placement.stages
            is_there = not inside or made_at.get((kind, needed, i), now + 1) <= now
            if is_there and (room[rank] or kind is not F):
                return others[rank].popleft()
        return weights[rank].popleft() if weights[rank] else None

    for now in count():
        if not any(others) and not any(weights):
            return done
        for rank in range(placement.ranks):
            if free_at[rank] > now or (action := take(rank, now)) is None:
                continue
            kind, chunk, i = action
            done[rank].append(action)
            free_at[rank] = now + ticks[kind]
            made_at[kind, placement.stage_of(rank, chunk), i] = free_at[rank]
            if kind is I:
                weights[rank].append(action._replace(kind=W))
            else:
                room[rank] += 1 if kind is W else -1
        assert max(free_at) > now, "these orders can't be run: every rank waits"


def _passes(kind: Kind, chunk: int, micro_batches: int) -> list[Action]:
    return [Action(kind, chunk, i) for i in range(micro_batches)]


def _alternate(
    forwards: Sequence[Action], backwards: Iterable[tuple[Action, ...]], *, ahead: int
) -> list[Action]:
    """``ahead`` forwards; then a forward and a backward in turn; then the backwards left."""
    order = list(forwards[:ahead])
    backwards = iter(backwards)
    for forward in forwards[ahead:]:
        order += (forward, *next(backwards))
    for backward in backwards:
        order += backward
    return order


class _Rule(NamedTuple):
    """``chunks``: None if any number will do. ``micro_batches_per_rank``: at least.
    ``late_weights``: ``order`` has no weight halves; ``_with_late_weights`` adds them."""

    order: Callable[[int, Placement, int], list[Action]]
    placement: Callable[[int, int], Placement] = Placement.loop
    chunks: int | None = 1
    micro_batches_per_rank: int = 0
    late_weights: bool = False


def _vee(ranks: int, _chunks: int) -> Placement:
    return Placement.vee(ranks)


_RULES = {
    "gpipe": _Rule(_gpipe),
    "1f1b": _Rule(_one_f_one_b),
    "interleaved": _Rule(_interleaved, chunks=None),
    "zb-h1": _Rule(_zb_h1),
    "dualpipev": _Rule(_dualpipev, _vee, chunks=2, micro_batches_per_rank=2),
    "zbv": _Rule(_zbv, _vee, chunks=2, late_weights=True),
}

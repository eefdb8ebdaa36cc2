"""Which layers each virtual stage of a pipeline holds.

The largest stage sets the pace of the whole pipeline, so stages are cut by what their layers cost,
embedding and head included, not by number. Pure: no processes, and torch only to count a model.

Letters: p ranks, v chunks on each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from typing import TYPE_CHECKING, NamedTuple

from ds4d.config.errors import nearest, show
from ds4d.pipeline.actions import Placement
from ds4d.pipeline.costs import ModelCosts, model_costs
from ds4d.pipeline.schedules import placement_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from ds4d.config.types import RunConfig

Bounds = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Split:
    """Attributes:
    bounds: [start, stop) of the layers of each virtual stage, in the order of the model.
    costs: of each virtual stage, embedding and head included; the unit is that of ``costs.py``.
    placement: which rank holds which virtual stage.
    """

    bounds: Bounds
    costs: tuple[float, ...]
    placement: Placement

    @property
    def counts(self) -> tuple[int, ...]:
        """Layers of each virtual stage."""
        return tuple(stop - start for start, stop in self.bounds)

    @cached_property
    def rank_costs(self) -> tuple[float, ...]:
        """Of each rank, all its chunks together."""
        placement = self.placement
        return tuple(
            sum(self.costs[stage] for stage in placement.of_rank(rank))
            for rank in range(placement.ranks)
        )

    @property
    def imbalance(self) -> float:
        """How much more than the mean the busiest rank has to do; 0.1 is 10 % more."""
        return max(self.rank_costs) * len(self.rank_costs) / sum(self.rank_costs) - 1


def split_of(run: RunConfig, config: PreTrainedConfig) -> Split:
    """The split of a run: as the file says, else by cost.

    Raises:
        ValueError: the file's split does not fit the model, or there are too few layers.
    """
    pipeline = run.pipeline
    costs = model_costs(
        config,
        seq_len=run.data.seq_len,
        sequences=run.batch.micro,
        recompute=run.recompute,
    )
    placement = placement_of(pipeline.schedule, run.parallel.pp, pipeline.chunks)
    return make_split(costs, placement, pipeline.split)


def make_split(
    costs: ModelCosts, placement: Placement, asked: Sequence[int | str] | None = None
) -> Split:
    """Cut a model for a placement.

    Args:
        asked: ``ds4d.pipeline.split``; None: by cost.

    Raises:
        ValueError: as ``split_of``.
    """
    even = cut(costs.layers, placement.stages, first=costs.first, last=costs.last)
    if placement.chunks > 1:
        even = even_ranks(even, costs.layers, placement, first=costs.first, last=costs.last)
    bounds = even if asked is None else _as_asked(asked, even, costs.path)
    whole = [sum(costs.layers[start:stop]) for start, stop in bounds]
    whole[0] += costs.first
    whole[-1] += costs.last
    return Split(bounds, tuple(whole), placement)


# -- by cost ----------------------------------------------------------------------------------


def cut(costs: Sequence[float], parts: int, *, first: float = 0.0, last: float = 0.0) -> Bounds:
    """Cut consecutive layers into pieces whose largest cost is as small as can be; of all such
    cuts the most even one (least sum of squares), and of those the one whose pieces are shorter in
    front, where a pipeline holds the most activations.

    Args:
        costs: of each layer, not negative.
        parts: pieces, each of one layer at least.
        first: added to the first piece.
        last: added to the last one.

    Returns:
        [start, stop) of each piece.

    Raises:
        ValueError: there are fewer layers than parts.
    """
    count = len(costs)
    if parts > count:
        raise ValueError(f"{count} layers cannot fill {parts} stages")
    *layers, first, last = _whole_numbers([*costs, first, last])
    upto = list(accumulate(layers, initial=0))

    def cost(start: int, stop: int) -> int:
        ends = (first if start == 0 else 0) + (last if stop == count else 0)
        return upto[stop] - upto[start] + ends

    candidates = sorted({cost(*piece) for piece in combinations(range(count + 1), 2)})
    enough = bisect_left(candidates, True, key=lambda limit: _fits(cost, count, parts, limit))
    return _evenest(cost, count, parts, candidates[enough])


def even_ranks(
    bounds: Bounds,
    costs: Sequence[float],
    placement: Placement,
    *,
    first: float = 0.0,
    last: float = 0.0,
) -> Bounds:
    """A cut with less for the busiest rank, whose chunks together set the pace. Edges are moved by a
    layer as long as that helps: the busiest rank first, then the largest piece, then evenness.

    Args:
        bounds, costs, first, last: as of ``cut``.
    """
    *layers, first, last = _whole_numbers([*costs, first, last])
    upto = list(accumulate(layers, initial=0))
    ranks = [place.rank for place in placement.places]

    def burden(edges: list[int]) -> tuple[int, int, int]:
        pieces = [upto[stop] - upto[start] for start, stop in pairwise(edges)]
        pieces[0] += first
        pieces[-1] += last
        loads = [0] * placement.ranks
        for rank, piece in zip(ranks, pieces, strict=True):
            loads[rank] += piece
        return max(loads), max(pieces), sum(piece**2 for piece in pieces)

    edges = [start for start, _ in bounds] + [len(costs)]
    while True:
        moved = [
            [*edges[:i], edges[i] + step, *edges[i + 1 :]]
            for i in range(1, len(edges) - 1)
            for step in (-1, 1)
            if edges[i - 1] < edges[i] + step < edges[i + 1]
        ]
        better = min(moved, key=burden, default=edges)
        if burden(better) >= burden(edges):
            return tuple(pairwise(edges))
        edges = better


Cost = Callable[[int, int], int]


def _whole_numbers(costs: Sequence[float]) -> list[int]:
    """The same costs in a smaller unit: sums of floats depend on their order, and what is equal
    would not be found equal."""
    ratios = [cost.as_integer_ratio() for cost in costs]
    unit = max(denominator for _, denominator in ratios)  # all are powers of two
    return [numerator * (unit // denominator) for numerator, denominator in ratios]


def _fits(cost: Cost, count: int, parts: int, limit: int) -> bool:
    """Whether ``parts`` pieces of at most ``limit`` hold all layers. Pieces as long as can be are
    the fewest; more of them only cost less."""
    start = 0
    for _ in range(parts):
        stop = start
        while stop < count and cost(start, stop + 1) <= limit:
            stop += 1
        start = stop
    return start == count


class _Cut(NamedTuple):
    """Of all layers from one on."""

    squares: int
    stop: int
    behind: _Cut | None


def _evenest(cost: Cost, count: int, parts: int, limit: int) -> Bounds:
    """Of the cuts whose pieces cost at most ``limit``, the one with the least sum of squares; of
    equal ones the first piece as short as can be, then the second, ..."""

    def cut_from(start: int, behind: dict[int, _Cut]) -> _Cut | None:
        cuts = []
        for stop in range(start + 1, count + 1):
            size = cost(start, stop)
            if size > limit:
                break
            if stop in behind:
                cuts.append(_Cut(size**2 + behind[stop].squares, stop, behind[stop]))
        return min(cuts, key=lambda cut: cut.squares, default=None)  # the first of equal ones

    cuts = {count: _Cut(0, count, None)}
    for before in reversed(range(parts)):
        starts = range(before, count) if before else (0,)
        found = {start: cut_from(start, cuts) for start in starts}
        cuts = {start: cut for start, cut in found.items() if cut is not None}
    bounds, start, cut = [], 0, cuts[0]
    while cut.behind is not None:
        bounds.append((start, cut.stop))
        start, cut = cut.stop, cut.behind
    return tuple(bounds)


# -- as asked ---------------------------------------------------------------------------------


def _as_asked(asked: Sequence[int | str], even: Bounds, path: str) -> Bounds:
    """The bounds that ``ds4d.pipeline.split`` asks for.

    Args:
        even: the cut by cost, which has the right form.
        path: of the list of layers.
    """
    if all(isinstance(entry, int) for entry in asked):
        return _by_counts(asked, even)
    if all(isinstance(entry, str) for entry in asked):
        return _by_names(asked, even, path)
    raise ValueError(f"{show(asked)}: give numbers of layers, or names of layers, not both")


def _by_counts(counts: Sequence[int], even: Bounds) -> Bounds:
    layers, fitting = even[-1][1], show([stop - start for start, stop in even])
    fix = f"leave it out to cut by cost, which gives {fitting}"
    if len(counts) != len(even):
        raise ValueError(
            f"{show(counts)}: the {len(even)} stages (ds4d.parallel.pp x ds4d.pipeline.chunks) "
            f"need {len(even)} numbers of layers, not {len(counts)}; {fix}"
        )
    if min(counts) < 1:
        raise ValueError(
            f"{show(counts)}: stage {counts.index(min(counts))} would have {min(counts)} layers; "
            f"each needs 1 or more; {fix}"
        )
    if sum(counts) != layers:
        raise ValueError(
            f"{show(counts)} makes {sum(counts)} layers, and the model has {layers}; {fix}"
        )
    return tuple(pairwise(accumulate(counts, initial=0)))


def _by_names(names: Sequence[str], even: Bounds, path: str) -> Bounds:
    layers = [f"{path}.{index}" for index in range(even[-1][1])]
    fix = f"leave it out to cut by cost, which gives {show([layers[s] for s, _ in even[1:]])}"
    if len(names) != len(even) - 1:
        raise ValueError(
            f"{show(names)}: the {len(even)} stages (ds4d.parallel.pp x ds4d.pipeline.chunks) "
            f"need {len(even) - 1} names of layers, where each after the first one begins, not "
            f"{len(names)}; {fix}"
        )
    for name in names:
        if name not in layers:
            near = nearest(name, layers)
            hint = f"did you mean {show(near)}?" if near else fix
            raise ValueError(
                f"{show(name)} is no layer of this model, whose layers are {layers[0]} to "
                f"{layers[-1]}; {hint}"
            )
    starts = [0, *map(layers.index, names), len(layers)]
    for (start, stop), name in zip(pairwise(starts), names, strict=False):
        if stop <= start:
            raise ValueError(
                f"{show(names)}: {show(name)} does not come after {layers[start]}, where the stage "
                f"before it begins, and that stage would be empty; {fix}"
            )
    return tuple(pairwise(starts))

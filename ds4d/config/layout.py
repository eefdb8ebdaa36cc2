"""Where every rank stands, as arithmetic: rank <-> (pp, dp, cp, tp).

Rank order is pp, dp, cp, tp with tp innermost, so that the ranks that talk most are neighbours.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate, product
from typing import NamedTuple

from ds4d.config.types import ContextConfig, ParallelConfig

AXES = ("pp", "dp", "cp", "tp")

# name -> the axes that vary inside one group of that name
GROUP_AXES = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp_cp": ("dp", "cp"),  # DeepSpeed's data axis: gradients are averaged over it
    "model": ("pp", "tp"),  # all shards of one replica of the model
    "pp_dp_cp": ("pp", "dp", "cp"),  # losses, which are known to the last stages, are summed over it
}


class Coordinate(NamedTuple):
    pp: int
    dp: int
    cp: int
    tp: int


def rank_of(coordinate: Coordinate, parallel: ParallelConfig) -> int:
    """The global rank at a coordinate."""
    rank = 0
    for axis in AXES:
        rank = rank * getattr(parallel, axis) + getattr(coordinate, axis)
    return rank


def coordinate_of(rank: int, parallel: ParallelConfig) -> Coordinate:
    """The coordinate of a global rank."""
    parts = []
    for axis in reversed(AXES):
        rank, part = divmod(rank, getattr(parallel, axis))
        parts.append(part)
    return Coordinate(*reversed(parts))


def group_ranks(name: str, parallel: ParallelConfig) -> list[list[int]]:
    """All groups of one name, each a sorted list of global ranks; together every rank once."""
    return ranks_along(GROUP_AXES[name], parallel)


def ranks_along(inner: Sequence[str], parallel: ParallelConfig) -> list[list[int]]:
    """Groups of the ranks that differ in some axes alone, as ``group_ranks``."""
    outer = [axis for axis in AXES if axis not in inner]
    groups = []
    for fixed in product(*(range(getattr(parallel, axis)) for axis in outer)):
        coordinate = dict(zip(outer, fixed))
        members = product(*(range(getattr(parallel, axis)) for axis in AXES if axis in inner))
        names = [axis for axis in AXES if axis in inner]
        places = (Coordinate(**coordinate, **dict(zip(names, m))) for m in members)
        groups.append(sorted(rank_of(place, parallel) for place in places))
    return groups


def hosts_of_ranks(ranks: list[int], slots: Mapping[str, int]) -> list[str]:
    """The hosts that some ranks stand on, each once.

    Args:
        slots: hosts with the number of ranks on each; the first has rank 0.
    """
    ends = list(accumulate(slots.values()))
    return list(dict.fromkeys(list(slots)[bisect_right(ends, rank)] for rank in sorted(ranks)))


def context_ranks(parallel: ParallelConfig, context: ContextConfig) -> dict[str, list[list[int]]]:
    """The groups of "ulysses", neighbours in each cp group, and of "ring", across those."""
    size = ulysses_size(parallel.cp, context)
    lists = group_ranks("cp", parallel)
    return {
        "ulysses": [
            ranks[start : start + size] for ranks in lists for start in range(0, len(ranks), size)
        ],
        "ring": [ranks[start::size] for ranks in lists for start in range(size)],
    }


def ulysses_size(cp: int, context: ContextConfig) -> int:
    """Ranks that exchange heads: 1 is a ring alone, cp none."""
    return {"ring": 1, "ulysses": cp, "hybrid": context.ulysses_size}[context.method]


def cut_multiple(cp: int, ulysses: int, parts: int) -> int:
    """What the length of a sequence is padded to a multiple of: two chunks for each place in the
    ring, whose tokens go evenly to its ulysses ranks and there into ``parts`` (over tp)."""
    ring = cp // ulysses
    return ring * math.lcm(2 if ring > 1 else 1, ulysses * parts)

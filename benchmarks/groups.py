"""What the process groups of a layout cost a rank: ``python -m benchmarks.groups``.

torch's fake process group stands in for the other ranks, so one process does the work that each rank
of a world of any size does: it makes its own groups and passes over those of others. What is not in
these seconds is the network: gloo connects the members of a group, NCCL does at its first use.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds4d.config.types import ParallelConfig
from ds4d.mesh import Mesh

LAYOUTS = (
    ParallelConfig(dp=64),
    ParallelConfig(tp=2, pp=2, cp=2, dp=8),
    ParallelConfig(tp=8, pp=8, cp=2, dp=8),
    ParallelConfig(tp=8, pp=16, cp=4, dp=32),
    ParallelConfig(dp=16_384),
)


@dataclass(frozen=True)
class Cost:
    """Of one rank.

    Attributes:
        groups: that it is a member of, the world among them.
    """

    parallel: ParallelConfig
    seconds: float
    groups: int


def cost(parallel: ParallelConfig, rank: int) -> Cost:
    """Make the groups of one rank in a world that is not there."""
    dist.init_process_group(
        "fake", rank=rank, world_size=parallel.world_size, store=FakeStore()
    )
    try:
        started = time.perf_counter()
        mesh = Mesh.create(parallel)
        seconds = time.perf_counter() - started
        groups = {*mesh.groups.values(), *mesh.lanes.values(), dist.group.WORLD}
        return Cost(parallel, seconds, len(groups))
    finally:
        dist.destroy_process_group()


def costs() -> Iterator[Cost]:
    for parallel in LAYOUTS:
        yield cost(parallel, rank=parallel.world_size // 3)


def main() -> None:
    table = Table("ranks", "pp x dp x cp x tp", "groups a rank is in", "seconds to make them")
    for each in costs():
        p = each.parallel
        degrees = f"{p.pp} x {p.dp} x {p.cp} x {p.tp}"
        table.add_row(f"{p.world_size:,}", degrees, str(each.groups), f"{each.seconds:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()

"""The groups of large worlds, made in one process by torch's fake process group."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ds4d.config.layout import context_ranks, group_ranks
from ds4d.config.types import ContextConfig, ParallelConfig
from ds4d.mesh import Mesh

# layout -> groups that a rank is in: the world, those of its size-1 axes as one, a group for each
# set of larger axes, four lanes and the ends of a pipeline
GROUPS = {
    ParallelConfig(dp=64): 2,
    ParallelConfig(tp=2, pp=2, cp=2, dp=8): 11,
    ParallelConfig(tp=8, pp=8, cp=2, dp=8): 13,
}


@pytest.mark.parametrize("parallel", GROUPS, ids=lambda p: f"{p.world_size}-{p.tp}")
def test_a_rank_is_in_few_groups_and_in_the_right_ones(parallel):
    rank = parallel.world_size // 3
    dist.init_process_group(
        "fake", rank=rank, world_size=parallel.world_size, store=FakeStore()
    )
    try:
        mesh = Mesh.create(parallel)
        groups = {*mesh.groups.values(), *mesh.lanes.values(), dist.group.WORLD}
        assert len(groups) == GROUPS[parallel]
        context = context_ranks(parallel, ContextConfig())
        for name, group in mesh.groups.items():
            if name == "pp_ends":
                continue
            lists = context.get(name) or group_ranks(name, parallel)
            (members,) = (ranks for ranks in lists if rank in ranks)
            assert dist.get_process_group_ranks(group) == members, name
    finally:
        dist.destroy_process_group()

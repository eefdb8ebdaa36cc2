"""A script's loader."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from ds4d.accelerate import Accelerator
from tests.script_cases.common import (
    Samples,
    case,
    collate,
)


@case
def ranks_agree_on_samples_without_a_seed(dp):
    torch.manual_seed(100 + dist.get_rank())  # as scripts without set_seed
    accelerator = Accelerator()
    loader = accelerator.prepare(
        DataLoader(Samples(24), batch_size=2, shuffle=True, collate_fn=collate)
    )
    for _ in range(2):
        mine = [int(i) for batch in loader for i in batch["id"]]
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        shares = {tuple(ids) for ids in everyone}
        assert len(shares) == dp
        assert sorted(i for ids in shares for i in ids) == list(range(24))
    assert accelerator.prepare(loader) is loader
    assert accelerator.num_processes == dp


@case
def an_error_of_the_data_is_raised_by_all_ranks(dp):
    class Broken(Samples):
        def __getitem__(self, index):
            if index == 2:
                raise KeyError("no such file")
            return super().__getitem__(index)

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Broken(8), batch_size=4, collate_fn=collate))
    failed = [False]
    try:
        list(loader)
    except KeyError:
        failed = [True]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, failed[0])
    mesh = accelerator._these.mesh
    assert everyone[dist.get_rank()] == (mesh.coordinate.dp == 0), everyone

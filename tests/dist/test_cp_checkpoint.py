"""What ranks saved that share sequences any other layout loads, bit for bit, and the run goes on as
one process's."""

from __future__ import annotations

import pytest
import torch

from tests.dist.test_cp_parity import by
from tests.dist.test_pp_checkpoint import go_on
from tests.harness import run_distributed
from tests.parity import ADAMW, batches, folder_of, make_run, plain
from tests.reference import assemble

WALKS = {  # each saves after its steps, the next one goes on
    "two": [by("ring", stage=1), dict(dp=2, stage=0), by("ulysses", stage=3), dict(tp=2, stage=1)],
    "four": [
        by("ring", dp=2, stage=2),
        by("hybrid", 4, stage=3),
        dict(dp=4, stage=1),
        by("gathered", pp=2, stage=0),
        by("ulysses", tp=2, sequence_parallel=True, stage=1),
    ],
}
FAMILIES = ["llama tied", "gpt2"]


@pytest.mark.parametrize("ranks", WALKS)
def test_a_walk_through_layouts_is_one_run(ranks, tmp_path):
    walk, world, previous = WALKS[ranks], {"two": 2, "four": 4}[ranks], {}
    for step, how in enumerate([*walk, {}]):  # at last one process
        runs = [make_run(folder_of(name, 4), optimizer=ADAMW, **how) for name in FAMILIES]
        given = dict(runs=runs, batch=batches(4)[4][min(step, 4)], step=step, root=tmp_path)
        found = run_distributed(go_on, world if how else 1, **given)
        for index, (name, run) in enumerate(zip(FAMILIES, runs, strict=True)):
            if step:
                loaded = assemble([rank[index][0] for rank in found])
                assert loaded.keys() == previous[name].keys(), (name, how)
                for key, tensor in loaded.items():
                    assert torch.equal(tensor, previous[name][key]), (name, how, key)
            previous[name] = assemble([rank[index][2] for rank in found])
            reference, _ = plain(run)
            if step < len(reference.losses):
                result = found[0][index][1]
                assert result.loss == pytest.approx(reference.losses[step], rel=1e-5), (name, how)
                norm = reference.grad_norms[step]
                assert result.grad_norm == pytest.approx(norm, rel=1e-5), (name, how)

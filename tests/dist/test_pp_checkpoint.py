"""What a pipeline saved any other layout loads, bit for bit, and the run goes on as one process's:
every placement of stages, tied weights, moments, both precisions."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from ds4d.checkpoint.export import export as export_model
from ds4d.checkpoint.find import find
from ds4d.checkpoint.load import load, read_extra
from ds4d.checkpoint.save import save
from ds4d.model.config import hf_config
from tests.dist.test_pp_edges import CHANGES, SPLIT, freeze
from tests.harness import run_distributed
from tests.parity import ADAMW, batches, folder_of, make_engine, make_run, plain, share_of
from tests.reference import assemble

WALK = [  # each saves after its steps, the next one goes on
    dict(pp=2, stage=1),
    dict(dp=2, stage=0),
    dict(pp=2, schedule="dualpipev", chunks=2, stage=0),
    dict(tp=2, stage=1),
    dict(pp=2, schedule="interleaved", chunks=2, stage=1),
]
FAMILIES = ["llama tied", "gpt2", "opt"]


def copies(state):
    return {
        name: (tensor.shape, [(p.offsets, p.tensor.detach().clone()) for p in tensor.pieces])
        for name, tensor in state.items()
    }


def go_on(runs, batch, step, root, change=None):
    """[(state as it was loaded, the result of a step, state after it)] of each run."""
    out = []
    for index, run in enumerate(runs):
        engine, mesh = make_engine(run, change)
        folder, loaded = root / str(index), None
        if step:
            checkpoint = find(folder, "latest")
            with engine.restoring(read_extra(checkpoint)["scalars"], step=step) as state:
                load(checkpoint, state, verify=True)
            loaded = copies(engine.logical_state())
        result = engine.train_step(share_of(batch, run, mesh))
        state, config = engine.logical_state(), hf_config(run.model)
        extra = {"scalars": engine.scalars(), "hf_config": config.to_dict(), "dtype": "fp32"}
        save(folder, step + 1, state, extra=extra, rank_state={}, keep=1)
        out.append((loaded, result, copies(state)))
    return out


def test_a_walk_through_layouts_is_one_run(tmp_path):
    previous = {}
    for step, how in enumerate(WALK):
        runs = [make_run(folder_of(name, 5), optimizer=ADAMW, **how) for name in FAMILIES]
        batch = batches(4)[4][step]
        ranks = run_distributed(go_on, 2, runs=runs, batch=batch, step=step, root=tmp_path)
        for index, (name, run) in enumerate(zip(FAMILIES, runs, strict=True)):
            reference, _ = plain(run)
            result = ranks[0][index][1]
            assert result.loss == pytest.approx(reference.losses[step], rel=1e-5), (name, how)
            assert result.grad_norm == pytest.approx(reference.grad_norms[step], rel=1e-5)
            if step:
                loaded = assemble([rank[index][0] for rank in ranks])
                assert loaded.keys() == previous[name].keys(), (name, how)
                for key, tensor in loaded.items():
                    assert torch.equal(tensor, previous[name][key]), (name, how, key)
            previous[name] = assemble([rank[index][2] for rank in ranks])
    for index, name in enumerate(FAMILIES):
        check_names(name, previous[name])
        export_model(tmp_path / str(index), tmp_path / f"out-{index}")


def check_names(name, state):
    """Those that one process has, a tied weight once."""
    reference, _ = plain(make_run(folder_of(name, 5), optimizer=ADAMW))
    weights = {key.partition("/")[2] for key in state if key.startswith("weight/")}
    assert weights == reference.weights.keys()


def test_on_four_stages_and_half_precision(tmp_path):
    """The middle ones have neither end of a tied weight."""
    runs = [
        make_run(folder_of("llama tied", 5), optimizer=ADAMW, precision="bf16", rows=8, **how)
        for how in (dict(pp=4), dict(dp=2, tp=2, stage=2))
    ]
    batch = batches(8)[8]
    losses = [
        run_distributed(go_on, 4, runs=[run], batch=batch[step], step=step, root=tmp_path)[0][0][1]
        for step, run in enumerate(runs)
    ]
    reference, _ = plain(runs[0])
    for step, result in enumerate(losses):
        assert result.loss == pytest.approx(reference.losses[step], rel=2e-2)


@pytest.mark.parametrize("what", ["the first stage", "vectors"])
def test_with_parts_that_are_not_trained(what, tmp_path):
    change = {**CHANGES, "vectors": partial(freeze, parts=("",), dims=(1,))}[what]
    walks = {"alone": [{}] * 3, "moved": [dict(pp=2, split=SPLIT), {}, dict(pp=2, split=SPLIT)]}
    found = {}
    for name, layouts in walks.items():
        for step, how in enumerate(layouts):
            runs = [
                make_run(folder_of("llama", 5), optimizer=ADAMW, stage=stage, **how)
                for stage in (0, 1)
            ]
            given = dict(runs=runs, batch=batches(4)[4][step], step=step, change=change)
            ranks = run_distributed(go_on, how.get("pp", 1), root=tmp_path / name, **given)
            found[name, step] = [(each[1].loss, each[1].grad_norm) for each in ranks[0]]
    for step in range(3):
        for alone, moved in zip(found["alone", step], found["moved", step], strict=True):
            assert moved == pytest.approx(alone, rel=1e-5), step

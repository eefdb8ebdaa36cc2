"""Checkpoints through the engine: to the bit at the same layout, within fp32 rounding when the
number of ranks, the micro-batch or the ZeRO stage changes (cases D05, D06)."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.dist.test_engine import (
    GLOBAL_BATCH,
    STEPS,
    export,
    global_batches,
    make_engine,
    make_run,
    plain_adamw,
    share,
)
from tests.harness import run_distributed
from tests.reference import assemble, tiny_model

HALF_WAY = STEPS // 2
COSINE = {"type": "cosine", "params": {"warmup_steps": 1, "min_lr_ratio": 0.1}}
SCHEDULES = [
    None,
    {"type": "linear", "params": {"total_steps": 6}},
    {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3}},
    {"type": "WarmupDecayLR", "params": {"total_num_steps": 6, "warmup_num_steps": 2}},
    {"type": "WarmupCosineLR", "params": {"total_num_steps": 6, "warmup_num_steps": 2}},
    {"type": "LRRangeTest", "params": {"lr_range_test_step_size": 2}},
    # moves betas too
    {"type": "OneCycle", "params": {"cycle_min_lr": 1e-3, "cycle_max_lr": 1e-2,
     "cycle_first_step_size": 3}},
]  # fmt: skip
FROZEN = ("model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight")


def straight(run, batches, folder, **changes):
    """All steps in one go, saving half way."""
    from ds4d.checkpoint.save import save

    engine = make_engine(run, **changes)
    results = []
    for step, batch in enumerate(batches, start=1):
        results.append(engine.train_step(share(batch, run)))
        if step == HALF_WAY:
            extra = {"optimizer": engine.scalars()}
            save(folder, step, engine.logical_state(), extra=extra, rank_state={}, keep=None)
    return results, export(engine.logical_state())


def resumed(run, batches, folder, **changes):
    """The second half, from the checkpoint, on a model of other weights."""
    from ds4d.checkpoint.find import find
    from ds4d.checkpoint.load import load, read_extra

    engine = make_engine(run, seed=99, **changes)
    checkpoint = find(folder, "latest")
    with engine.restoring(read_extra(checkpoint)["optimizer"], step=HALF_WAY) as state:
        load(checkpoint, state)
    results = [engine.train_step(share(batch, run)) for batch in batches[HALF_WAY:]]
    return results, export(engine.logical_state())


def check_to_the_bit(run, folder, **changes):
    how = dict(run=run, batches=global_batches(), folder=folder, **changes)
    whole = run_distributed(straight, run.parallel.dp, **how)
    again = run_distributed(resumed, run.parallel.dp, **how)
    assert again[0][0] == whole[0][0][HALF_WAY:]
    expected = assemble([state for _, state in whole])
    actual = assemble([state for _, state in again])
    assert {name for name in expected if not torch.equal(actual[name], expected[name])} == set()
    return expected


IN_SHORT = {(0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "bf16")}
PAIRS = [
    pytest.param(*pair, marks=() if pair in IN_SHORT else pytest.mark.slow)
    for pair in itertools.product((0, 1, 2, 3), ("fp32", "bf16", "fp16"))
]


@pytest.mark.parametrize("stage, precision", PAIRS)
def test_the_same_layout_goes_on_to_the_bit(tmp_path, stage, precision):
    run = make_run(stage=stage, dp=2, micro=2, precision=precision, scheduler=COSINE)
    check_to_the_bit(run, tmp_path)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: s["type"] if s else "constant")
def test_every_schedule_goes_on_to_the_bit(tmp_path, schedule):
    keys = {"scheduler": schedule} if schedule else {}
    check_to_the_bit(make_run(stage=1, dp=1, micro=8, **keys), tmp_path)


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_parameters_are_saved_whole(tmp_path, stage):
    run = make_run(stage=stage, dp=2, micro=2)
    state = check_to_the_bit(run, tmp_path, frozen=FROZEN)
    plain = dict(tiny_model().named_parameters())
    for name in FROZEN:
        assert torch.equal(state[f"weight/{name}"], plain[name])
        assert f"exp_avg/{name}" not in state


# (stage, dp, micro) saved -> resumed: another stage, more and fewer ranks, uneven parts
MOVES = [
    ((0, 1, 4), (1, 2, 2)),
    ((1, 4, 1), (1, 2, 4)),
    ((1, 2, 1), (3, 4, 2)),
    ((2, 2, 4), (2, 4, 1)),
    ((3, 4, 2), (0, 2, 1)),
    ((3, 2, 2), (2, 1, 8)),
]


@pytest.mark.parametrize("saved, wanted", MOVES)
def test_another_layout_goes_on_with_the_same_curve(tmp_path, saved, wanted):
    reference = plain_adamw()
    runs = {
        layout: make_run(stage=layout[0], dp=layout[1], micro=layout[2])
        for layout in (saved, wanted)
    }
    batches = global_batches()
    run_distributed(straight, saved[1], run=runs[saved], batches=batches, folder=tmp_path)
    ranks = run_distributed(resumed, wanted[1], run=runs[wanted], batches=batches, folder=tmp_path)
    losses = [result.loss for result in ranks[0][0]]
    norms = [result.grad_norm for result in ranks[0][0]]
    assert losses == pytest.approx(reference.losses[HALF_WAY:], rel=1e-5)
    assert norms == pytest.approx(reference.grad_norms[HALF_WAY:], rel=1e-5)
    weights = assemble([state for _, state in ranks])
    for name, expected in reference.weights.items():
        torch.testing.assert_close(weights[f"weight/{name}"], expected, rtol=1e-4, atol=1e-6)


def test_the_global_batch_stays_the_same():
    """The moves above compare equal curves only because each run sees the same samples a step."""
    for layouts in MOVES:
        assert all(GLOBAL_BATCH % (dp * micro) == 0 for _, dp, micro in layouts)

"""What goes wrong on one stage of a pipeline: a step that is not finite is skipped on all ranks and
its origin named; a rank that raises ends the job, with its own traceback."""

from __future__ import annotations

import math
import sys
import time
from contextlib import contextmanager

import pytest
import torch

from ds4d.pipeline.stage import StandIn
from tests.dist.test_launch import finish, left_over, start
from tests.dist.test_pp_edges import steps_of
from tests.dist.test_pp_parity import with_schedule
from tests.harness import run_distributed
from tests.parity import ADAMW, export, folder_of, make_engine, make_run

LAYERS = 8
STEPS = steps_of([(1, 23)] * 8, [(1, 23)] * 8)


def _spoil_output(_module, _args, output):
    return output * float("inf")


def _spoil_gradient(_module, _args, output) -> None:
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * float("inf"))


SPOIL = {"the output": _spoil_output, "the gradient at the input": _spoil_gradient}


@contextmanager
def spoiled(engine, what: str, name: str):
    """A module's outputs, or the gradients that it gets, are infinite, on the rank that has it."""
    module = dict(engine.module.named_modules()).get(name)
    held = module is not None and not isinstance(module, StandIn)
    handle = module.register_forward_hook(SPOIL[what]) if held else None
    yield
    if held:
        handle.remove()


def train_with_a_bad_step(cases):
    """Of each case: the results of three steps, the second of them spoiled; whether weights moved
    in that step; and what ``find_nonfinite`` says of it."""
    from ds4d.nonfinite import find_nonfinite

    out = []
    for run, *where in cases:
        engine, _ = make_engine(run)
        results = [engine.train_step(STEPS[0])]
        before = export(engine.logical_state())
        with spoiled(engine, *where):
            results.append(engine.train_step(STEPS[1]))
        after = export(engine.logical_state())
        moved = any(
            not torch.equal(a, b)
            for name in before
            for (_, a), (_, b) in zip(before[name][1], after[name][1], strict=True)
        )
        results.append(engine.train_step(STEPS[0]))
        with spoiled(engine, *where):
            out.append((results, moved, find_nonfinite(engine, STEPS[1])))
    return out


# precision, ZeRO
STATES = [("fp32", 0), ("fp32", 1), ("bf16", 1), ("fp16", 1)]


@pytest.mark.parametrize("pp", [2, 4])
def test_a_step_that_is_not_finite_is_skipped_everywhere_and_its_origin_named(pp):
    """With fp16 the loss scale is halved on all ranks, too."""
    places = {
        "1f1b": [("lm_head", pp - 1), ("model.layers.0.mlp.down_proj", 0)],
        "gpipe": [("model.layers.7.mlp.down_proj", pp - 1)],
        "zb-h1": [("model.layers.5.mlp.up_proj", 5 * pp // 8)],
        "zbv": [("model.layers.4.mlp.up_proj", pp - 1)],
        "interleaved": [("model.layers.3.mlp.down_proj", pp - 1), ("lm_head", pp - 1)],
        "dualpipev": [("model.layers.4.mlp.down_proj", pp - 1), ("lm_head", 0)],
    }
    cases = [
        (what, name, rank, precision, stage, schedule)
        for schedule, modules in places.items()
        for name, rank in modules
        for what in SPOIL
        if (what, name) != ("the gradient at the input", "lm_head")  # computed in its forward pass
        for precision, stage in (STATES if schedule == "1f1b" else STATES[1:2])
    ]
    runs = []
    for what, name, _, precision, stage, schedule in cases:
        options = with_schedule(schedule, pp=pp, stage=stage, precision=precision)
        run = make_run(folder_of("llama", LAYERS), optimizer=ADAMW, rows=8, **options)
        runs.append((run, what, name))
    ranks = run_distributed(train_with_a_bad_step, pp, timeout=300, cases=runs)
    for index, (what, name, rank, precision, *more) in enumerate(cases):
        case = what, name, rank, precision, *more
        for results, moved, found in (each[index] for each in ranks):
            assert [r.skipped for r in results] == [False, True, False], case
            assert not moved, case
            assert found == f"rank {rank}: {what} of {name}", case
            assert math.isfinite(results[2].loss + results[2].grad_norm), case
            if precision == "fp16":
                assert [r.loss_scale for r in results] == [256.0, 128.0, 128.0], case


START = """
import sys
from ds4d.launch.launcher import Job, run_job
arguments = tuple(sys.argv[1:])
sys.exit(run_job(Job(arguments, int(arguments[2]), module="tests.dist.launched_pipeline")))
"""
SECONDS = 20  # of which DeepSpeed's launcher may take some to see that a rank has ended


@pytest.mark.parametrize(
    "pp, stage, micro_batch, where",
    [(2, 1, 1, "forward"), (2, 0, 0, "backward"), (4, 2, 3, "forward"), (4, 1, 2, "backward")],
)
def test_a_layer_that_raises_ends_the_job(pp, stage, micro_batch, where, tmp_path):
    """E07"""
    layer = str(stage * LAYERS // pp)
    arguments = [str(folder_of("llama", LAYERS)), str(pp), layer, str(micro_batch), where]
    code, screen = finish(start([sys.executable, "-c", START, str(tmp_path), *arguments]))
    assert time.time() - (tmp_path / "stumbled").stat().st_mtime < SECONDS
    assert code == 1
    assert screen.count("Traceback") == 1
    assert f"rank {stage} of {pp}" in screen
    assert f"ArithmeticError: layer {layer} stumbles in its {where} pass" in screen
    assert not left_over(tmp_path)

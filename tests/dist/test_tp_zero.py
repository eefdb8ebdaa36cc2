"""Tensor parallelism under every ZeRO stage, with a model cut by hand: losses, norms, clipping and
weights are those of one plain process, and partial gradients are summed, once."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from unittest import mock

import pytest
import torch

from ds4d.comm import count_traffic
from ds4d.config.types import ParallelConfig, PrecisionConfig
from tests.dist.test_engine import (
    ADAMW,
    CLIP,
    HOW_NOT_WHAT,
    SGD,
    STEPS,
    export,
    global_batches,
    make_run,
)
from tests.harness import run_distributed
from tests.reference import assemble, relative, rows, train_plainly
from tests.toy_tp import LAYERS, WIDTH, ToyModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def tp_run(*, tp, dp, stage, micro=2, accumulate="fp32", **kwargs):
    run = make_run(stage=stage, dp=dp, micro=micro, **kwargs)
    precision = PrecisionConfig(run.precision.param_dtype, accumulate)
    return dataclasses.replace(run, parallel=ParallelConfig(dp=dp, tp=tp), precision=precision)


def toy_engine(run, frozen=(), seed=0):
    """The engine, and the mesh."""
    from ds4d.engine import Engine
    from ds4d.mesh import Mesh
    from ds4d.optim import of_run

    mesh = Mesh.create(run.parallel)

    def build(partition):
        model = ToyModel(mesh.group("tp"), DTYPES[run.precision.param_dtype], seed)
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        for module in model.modules() if partition else ():
            partition(module)
        return model

    device = torch.device("cpu")
    return Engine.create(run, mesh, build, device=device, **of_run(run, total_steps=STEPS)), mesh


def share(batch, run, mesh):
    micro, dp = run.batch.micro, run.parallel.dp
    starts = [(a * dp + mesh.dp) * micro for a in range(run.batch.accumulation)]
    return [rows(batch, start, start + micro) for start in starts]


@contextlib.contextmanager
def shapes_of_partial_gradients():
    """Those of every step, as ``sum_partial_gradients`` is called."""
    from ds4d import gradients

    summed, shapes = gradients.sum_partial_gradients, []

    def spy(engine, group):
        shapes.append([tuple(g.shape) for g in gradients.partial_gradients(engine)])
        summed(engine, group)

    with mock.patch.object(gradients, "sum_partial_gradients", spy):
        yield shapes


@dataclasses.dataclass
class Trained:
    results: list
    state: dict
    shapes: list  # of the partial gradients, a step
    sums: int  # of partial gradients, in all steps


def train(runs, batches):
    """Every run in turn."""
    out = []
    for run in runs:
        engine, mesh = toy_engine(run)
        with count_traffic() as traffic, shapes_of_partial_gradients() as shapes:
            results = [engine.train_step(share(batch, run, mesh)) for batch in batches]
        sums = traffic.calls["replicated gradients", "all_reduce"]
        out.append(Trained(results, export(engine.logical_state()), shapes, sums))
    return out


def assemble_checked(states):
    """``assemble``, where boxes that several ranks hold must be equal to the bit."""
    boxes = {}
    for rank in states:
        for name, (_, pieces) in rank.items():
            for offsets, tensor in pieces:
                known = boxes.setdefault((name, offsets, tensor.shape), tensor)
                assert torch.equal(known, tensor), (name, offsets)
    return assemble(states)


@functools.cache
def plain():
    from ds4d.optim import build_optimizer

    model = ToyModel()
    optimizer = build_optimizer(model.named_parameters(), ADAMW, decay_all=False)
    return train_plainly(model, global_batches(), optimizer, clip=CLIP)


@pytest.mark.parametrize("tp, dp", [(2, 1), (2, 2), (4, 1)])
def test_losses_norms_and_weights_equal_one_plain_process(tp, dp):
    reference = plain()
    assert min(reference.grad_norms) > CLIP  # it clips
    runs = [tp_run(tp=tp, dp=dp, stage=stage) for stage in range(4)]
    ranks = run_distributed(train, tp * dp, runs=runs, batches=global_batches())
    for stage in range(4):
        results = ranks[0][stage].results
        assert all(rank[stage].results == results for rank in ranks), stage
        assert [r.loss for r in results] == pytest.approx(reference.losses, rel=1e-5), stage
        norms = [r.grad_norm for r in results]
        assert norms == pytest.approx(reference.grad_norms, rel=1e-5), stage
        state = assemble_checked([rank[stage].state for rank in ranks])
        for name, expected in reference.weights.items():
            assert state[f"weight/{name}"].shape == expected.shape == state[f"exp_avg/{name}"].shape
            assert relative(state[f"weight/{name}"], expected) < 1e-5, (stage, name)


# How DeepSpeed may be told to hold gradients: precision, accumulation, stage, keys.
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
NOT_WITH_TP = "zero_hpz_partition_size"  # its groups are neighbours, and so are tp ranks
HELD = [
    *(
        ("fp32", "fp32", stage, keys)
        for stage, keys in HOW_NOT_WHAT
        if NOT_WITH_TP not in keys.get("zero_optimization", {})
    ),
    *(("fp32", "fp32", stage, {"zero_optimization": OFFLOAD}) for stage in (1, 2, 3)),
    *(("bf16", accumulate, stage, {"zero_optimization": zero})
      for accumulate in ("fp32", "bf16") for stage in (1, 2, 3) for zero in ({}, OFFLOAD)),
    ("bf16", "fp32", 0, {}),
    ("bf16", "fp32", 1, {"bf16": {"enabled": True, "immediate_grad_update": True}}),
    ("bf16", "fp32", 2, {"zero_optimization": {"contiguous_gradients": False}}),
    ("bf16", "fp32", 2, {"zero_optimization": {"reduce_scatter": False, "overlap_comm": True}}),
    ("bf16", "fp32", 2, {"zero_optimization": {"parameter_alignment": True, **OFFLOAD}}),
    ("bf16", "fp32", 3, {"zero_optimization": {"reduce_scatter": False, "sub_group_size": 3000}}),
    ("fp32", "fp32", 1, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
    *(("fp16", "fp32", stage, {"zero_optimization": zero})
      for stage in (1, 2, 3) for zero in ({}, OFFLOAD)),
]  # fmt: skip


def held_run(precision, accumulate, stage, keys):
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    zero |= keys.get("zero_optimization", {})
    if precision == "fp16":
        keys = {"fp16": {"enabled": True, "initial_scale_power": 8}, **keys}
    if precision != "fp32":
        keys = {precision: {"enabled": True}, **keys}
    keys = {"precision": precision, "accumulate": accumulate, **keys, "zero_optimization": zero}
    return tp_run(tp=2, dp=2, stage=stage, optimizer=SGD, clip=0.0, **keys)


@functools.cache
def plain_gradients(dtype):
    """Gradients in fp32 of the model with its weights rounded, and these weights."""
    model = ToyModel(dtype=dtype).float()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    return train_plainly(model, global_batches()[:1], sgd).gradients, before


def test_every_gradient_is_right_however_deepspeed_holds_it():
    runs = [held_run(*case) for case in HELD]
    ranks = run_distributed(train, 4, runs=runs, batches=global_batches()[:1], timeout=300)
    for index, case in enumerate(HELD):
        expected, before = plain_gradients(DTYPES[case[0]])
        exact = case[0] == "fp32" and "torch_autocast" not in case[3]
        state = assemble_checked([rank[index].state for rank in ranks])
        found = {
            name: (weight - state[f"weight/{name}"]) / SGD["params"]["lr"]
            for name, weight in before.items()
        }
        for name, gradient in expected.items():
            error = relative(found[name], gradient)
            assert error < (1e-5 if exact else 5e-2), (case, name, error)
        norm = torch.cat([g.flatten() for g in found.values()]).norm()
        reported = ranks[0][index].results[0].grad_norm
        assert reported == pytest.approx(float(norm), rel=1e-4), case
        check_shapes([rank[index] for rank in ranks], case)


def check_shapes(ranks, case):
    """Of one step on tp 2 x dp 2: tp ranks, which are neighbours, agree."""
    held = []
    for first, second in (ranks[:2], ranks[2:]):
        assert first.shapes == second.shapes, case
        (shapes,) = first.shapes
        held.append(sum(torch.Size(shape).numel() for shape in shapes))
        assert first.sums == second.sums == (1 if shapes else 0), case
    assert LAYERS * WIDTH <= sum(held) <= 2 * LAYERS * WIDTH, case


def train_with_a_bad_shard(runs, batches):
    """In step 2 the gradient of one tp rank's part of one weight is infinite."""
    out = []
    for run in runs:
        engine, mesh = toy_engine(run)
        results = [engine.train_step(share(batches[0], run, mesh))]
        before = export(engine.logical_state())
        if mesh.coordinate.tp == 1:
            weight = engine.module.layers[0].down.weight
            hook = weight.register_hook(lambda grad: grad * float("inf"))
        results.append(engine.train_step(share(batches[1], run, mesh)))
        after = export(engine.logical_state())
        if mesh.coordinate.tp == 1:
            hook.remove()
        moved = any(
            not torch.equal(a, b)
            for name in before
            for (_, a), (_, b) in zip(before[name][1], after[name][1])
        )
        out.append(([r.skipped for r in results], moved))
    return out


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_on_one_tp_rank_stops_the_step_on_all(precision):
    runs = [tp_run(tp=2, dp=2, stage=stage, precision=precision) for stage in range(4)]
    ranks = run_distributed(train_with_a_bad_shard, 4, runs=runs, batches=global_batches())
    for rank in ranks:
        for stage, outcome in enumerate(rank):
            assert outcome == ([False, True], False), stage


def sum_nothing(run, batch):
    engine, mesh = toy_engine(run)
    for param in engine.module.parameters():
        param.tp_partial = False
    with count_traffic() as traffic:
        engine.train_step(share(batch, run, mesh))
    return traffic.of("replicated gradients")


def test_nothing_is_sent_where_nothing_is_partial():
    for stage in (0, 1, 3):
        run = tp_run(tp=2, dp=1, stage=stage)
        assert run_distributed(sum_nothing, 2, run=run, batch=global_batches()[0]) == [0, 0]

"""The engine against one plain process: ZeRO 0-3 x dp x accumulation, fp32 to 1e-5, and what bf16
and fp16 must keep."""

from __future__ import annotations

import functools

import pytest
import torch

from ds4d.config.types import (
    BatchSizes,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    SourceConfig,
    TrainingConfig,
)
from tests.harness import run_distributed
from tests.reference import (
    TINY_LLAMA,
    assemble,
    relative,
    rows,
    samples,
    tiny_model,
    train_plainly,
)

STEPS, GLOBAL_BATCH, CLIP = 4, 8, 0.5
# eps well above rounding: with a tiny one Adam turns the noise of a near-zero gradient into a step
ADAMW_PARAMS = {"lr": 1e-2, "betas": [0.9, 0.95], "eps": 1e-5, "weight_decay": 0.1}
ADAMW = {"type": "AdamW", "params": ADAMW_PARAMS}
SGD = {"type": "SGD", "params": {"lr": 64.0}}  # so large that (before - after) / lr is exact
# (dp, micro) of one global batch of 8
SPLITS = [(1, 8), (1, 1), (2, 2), (2, 1), (4, 2), (4, 1)]
STAGES = [0, 1, 2, 3]


def make_run(*, stage, dp, micro, optimizer=ADAMW, clip=CLIP, precision="fp32", **deepspeed):
    accumulation = GLOBAL_BATCH // (dp * micro)
    # no parameter of these models is large enough to be split by default
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0 if stage == 3 else 10**5}
    keys = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
        "optimizer": optimizer,
        "gradient_clipping": clip,
        "zero_optimization": zero,
        **deepspeed,
    }
    if precision != "fp32":
        keys[precision] = {"enabled": True}
    return RunConfig(
        model=ModelConfig(config=TINY_LLAMA),
        data=DataConfig(seq_len=24, train=SourceConfig("tokens")),
        parallel=ParallelConfig(dp=dp),
        batch=BatchSizes(GLOBAL_BATCH, micro, accumulation),
        deepspeed=keys,
        zero_stage=stage,
        precision=PrecisionConfig(precision, "fp32"),
    )


def build(dtype, partition, frozen=(), **changes):
    from ds4d.tensor_parallel.vocab import install_head

    model = tiny_model(dtype=dtype, **changes)
    install_head(model)
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    if partition is not None:
        for module in model.modules():
            partition(module)
    return model


def make_engine(run, **changes):
    from ds4d.engine import Engine
    from ds4d.mesh import Mesh
    from ds4d.optim import of_run

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    return Engine.create(
        run,
        Mesh.create(run.parallel),
        functools.partial(build, dtype[run.precision.param_dtype], **changes),
        device=torch.device("cpu"),
        **of_run(run, total_steps=STEPS),
    )


def share(batch, run):
    """The micro-batches of this rank, as the loader cuts them."""
    import torch.distributed as dist

    micro, dp = run.batch.micro, run.parallel.dp
    starts = [(a * dp + dist.get_rank()) * micro for a in range(run.batch.accumulation)]
    return [rows(batch, start, start + micro) for start in starts]


def export(state):
    return {
        name: (tensor.shape, [(p.offsets, p.tensor.detach().clone()) for p in tensor.pieces])
        for name, tensor in state.items()
    }


def train(runs, batches):
    """Every run in turn; [(results, logical state)] of this rank."""
    out = []
    for run in runs:
        engine = make_engine(run)
        results = [engine.train_step(share(batch, run)) for batch in batches]
        out.append((results, export(engine.logical_state())))
    return out


def global_batches():
    return [samples(GLOBAL_BATCH, seed=step) for step in range(STEPS)]


def plain(optimizer, steps=STEPS, dtype=torch.float32, clip=CLIP):
    from ds4d.optim import build_optimizer

    model = tiny_model(dtype=dtype)
    made = build_optimizer(model.named_parameters(), optimizer, decay_all=False)
    return train_plainly(model, global_batches()[:steps], made, clip=clip)


@functools.cache
def plain_adamw():
    return plain(ADAMW)


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_losses_norms_and_weights_equal_one_plain_process(dp):
    reference = plain_adamw()
    cases = [(s, micro) for s in STAGES for d, micro in SPLITS if d == dp]
    runs = [make_run(stage=stage, dp=dp, micro=micro) for stage, micro in cases]
    ranks = run_distributed(train, dp, runs=runs, batches=global_batches())
    for index, case in enumerate(cases):
        results = [rank[index][0] for rank in ranks]
        assert all(r == results[0] for r in results), case
        assert [r.loss for r in results[0]] == pytest.approx(reference.losses, rel=1e-5), case
        norms = [r.grad_norm for r in results[0]]
        assert norms == pytest.approx(reference.grad_norms, rel=1e-5), case
        state = assemble([rank[index][1] for rank in ranks])
        for name, expected in reference.weights.items():
            assert relative(state[f"weight/{name}"], expected) < 1e-5, (case, name)
            assert state[f"exp_avg/{name}"].shape == expected.shape


@pytest.mark.parametrize("dp", [1, 2, 4])
def test_every_gradient_equals_one_plain_process(dp):
    reference = plain(SGD, steps=1, clip=0.0)
    before = {name: p.detach().clone() for name, p in tiny_model().named_parameters()}
    runs = [make_run(stage=s, dp=dp, micro=1, optimizer=SGD, clip=0.0) for s in STAGES]
    ranks = run_distributed(train, dp, runs=runs, batches=global_batches()[:1])
    for stage in STAGES:
        state = assemble([rank[stage][1] for rank in ranks])
        for name, expected in reference.gradients.items():
            gradient = (before[name] - state[f"weight/{name}"]) / SGD["params"]["lr"]
            assert relative(gradient, expected) < 1e-5, (stage, name)


OBJECTIVE = {"label_smoothing": 0.1, "z_loss": 1e-2}


def losses_of(run, batch):
    """Training loss, and (sum, count) of the held-out loss on this rank, of one batch."""
    engine = make_engine(run)
    micro_batches = share(batch, run)
    loss = engine.train_step(micro_batches).loss
    sums = [torch.stack(pair) for pair in engine.eval_sums(micro_batches)]
    return loss, [float(x) for x in sum(sums)]


@pytest.mark.parametrize("stage", STAGES)
def test_smoothing_and_z_loss_are_of_the_training_loss_alone(stage):
    run = make_run(stage=stage, dp=2, micro=2, optimizer={"type": "SGD", "params": {"lr": 0.0}})
    run = run.replace(training=TrainingConfig(**OBJECTIVE))
    batch, model = global_batches()[0], tiny_model()
    targets = batch.targets.flatten()
    z = model(input_ids=batch.input_ids).logits.flatten(0, 1)[targets >= 0]
    smoothed = torch.nn.functional.cross_entropy(z, targets[targets >= 0], label_smoothing=0.1)
    trained = smoothed + 1e-2 * z.logsumexp(-1).square().mean()
    plain = torch.nn.functional.cross_entropy(z, targets[targets >= 0])
    ranks = run_distributed(losses_of, 2, run=run, batch=batch)
    loss, tokens = (sum(rank[1][i] for rank in ranks) for i in (0, 1))
    assert loss / tokens == pytest.approx(float(plain), rel=1e-5)
    assert [rank[0] for rank in ranks] == pytest.approx([float(trained)] * 2, rel=1e-5)


LOSS_SCALE = {"bf16": {}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_no_further_from_fp32_than_plain_half(precision):
    exact, half = plain_adamw(), plain(ADAMW, dtype=HALF[precision])
    runs = [
        make_run(stage=stage, dp=2, micro=1, precision=precision, **LOSS_SCALE[precision])
        for stage in STAGES
    ]
    ranks = run_distributed(train, 2, runs=runs, batches=global_batches())
    allowed = max(abs(h - e) for h, e in zip(half.losses, exact.losses))
    for stage in STAGES:
        results = ranks[0][stage][0]
        assert not any(r.skipped for r in results)
        distance = max(abs(r.loss - e) for r, e in zip(results, exact.losses))
        # both forward passes round alike: what remains of the losses is noise, the weights tell
        assert distance <= 1.5 * allowed, (stage, distance, allowed)
        weights = assemble([rank[stage][1] for rank in ranks])
        errors = {n: relative(weights[f"weight/{n}"], w) for n, w in exact.weights.items()}
        limits = {n: relative(half.weights[n], w) for n, w in exact.weights.items()}
        assert sum(errors.values()) <= sum(limits.values()), stage


def test_optimizer_offload_changes_nothing():
    reference = plain_adamw()
    runs = [
        make_run(stage=stage, dp=2, micro=2, zero_optimization={"stage": stage, **offload})
        for stage, offload in [
            (1, {"offload_optimizer": {"device": "cpu"}}),
            (2, {"offload_optimizer": {"device": "cpu"}}),
            (3, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}),
        ]
    ]
    for results, _ in run_distributed(train, 2, runs=runs, batches=global_batches())[1]:
        assert [r.loss for r in results] == pytest.approx(reference.losses, rel=1e-5)
        assert [r.grad_norm for r in results] == pytest.approx(reference.grad_norms, rel=1e-5)


# What DeepSpeed may be told about how to communicate and lay out memory: no number may change.
HOW_NOT_WHAT = [
    (0, {"prescale_gradients": True}),
    (0, {"gradient_predivide_factor": 4.0}),
    (1, {"prescale_gradients": True, "zero_optimization": {"reduce_scatter": False}}),
    (1, {"zero_optimization": {"overlap_comm": True, "contiguous_gradients": False}}),
    (1, {"zero_optimization": {"round_robin_gradients": True, "parameter_alignment": True}}),
    (2, {"zero_optimization": {"overlap_comm": True, "use_multi_rank_bucket_allreduce": False}}),
    (2, {"zero_optimization": {"round_robin_gradients": True, "parameter_alignment": True}}),
    (2, {"zero_optimization": {"allgather_partitions": False, "allgather_bucket_size": 1000}}),
    (2, {"zero_optimization": {"reduce_bucket_size": 1000, "ignore_unused_parameters": False}}),
    (3, {"zero_optimization": {"memory_efficient_linear": False, "sub_group_size": 3000}}),
    (3, {"zero_optimization": {"stage3_use_all_reduce_for_fetch_params": True}}),
    (3, {"zero_optimization": {"zero_hpz_partition_size": 2, "overlap_comm": True}}),
    (3, {"zero_optimization": {"leaf_module": {"classes": ["LlamaMLP"]}}}),
    (3, {"flops_profiler": {"enabled": True, "profile_step": 2}, "wall_clock_breakdown": True}),
]


def test_how_deepspeed_communicates_changes_no_number():
    reference = plain_adamw()
    runs = []
    for stage, keys in HOW_NOT_WHAT:
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
        zero |= keys.get("zero_optimization", {})
        runs.append(make_run(stage=stage, dp=4, micro=1, **{**keys, "zero_optimization": zero}))
    ranks = run_distributed(train, 4, runs=runs, batches=global_batches())
    for index, case in enumerate(HOW_NOT_WHAT):
        results = ranks[0][index][0]
        assert [r.loss for r in results] == pytest.approx(reference.losses, rel=1e-5), case
        norms = [r.grad_norm for r in results]
        assert norms == pytest.approx(reference.grad_norms, rel=1e-5), case
        state = assemble([rank[index][1] for rank in ranks])
        for name, expected in reference.weights.items():
            assert relative(state[f"weight/{name}"], expected) < 1e-5, (case, name)


def train_with_a_bad_step(runs, batches):
    """In step 2, rank 1's logits are infinite: (results, weights moved in step 2, first bad)."""
    import torch.distributed as dist

    from ds4d.nonfinite import find_nonfinite

    out = []
    for run in runs:
        engine = make_engine(run)
        results = [engine.train_step(share(batches[0], run))]
        before = export(engine.logical_state())
        head = engine.module.get_output_embeddings()
        bad = dist.get_rank() == 1
        hook = head.register_forward_hook(lambda m, i, o: o * float("inf") if bad else o)
        results.append(engine.train_step(share(batches[1], run)))
        after = export(engine.logical_state())
        moved = any(
            not torch.equal(a, b)
            for name in before
            for (_, a), (_, b) in zip(before[name][1], after[name][1])
        )
        where = find_nonfinite(engine, share(batches[1], run))
        hook.remove()
        engine._engine.optimizer.zero_grad()
        out.append((results, moved, where))
    return out


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_that_is_not_finite_is_skipped_everywhere_and_its_origin_named(precision):
    scheduler = {"type": "linear", "params": {"total_steps": 10}}
    runs = [
        make_run(stage=stage, dp=2, micro=2, precision=precision, scheduler=scheduler)
        for stage in STAGES
    ]
    ranks = run_distributed(train_with_a_bad_step, 2, runs=runs, batches=global_batches())
    for rank in ranks:
        for stage, (results, moved, where) in enumerate(rank):
            assert [r.skipped for r in results] == [False, True], stage
            assert not moved, stage
            assert where == "rank 1: the output of lm_head", stage


def learning_rates(run, batches):
    engine = make_engine(run)
    return [engine.train_step(share(batch, run)).lr for batch in batches]


@pytest.mark.parametrize(
    "scheduler, expected",
    [
        (None, [1e-2] * 4),
        ({"type": "linear", "params": {"warmup_steps": 2, "total_steps": 4}}, [0, 0.5, 1, 0.5]),
        ({"type": "cosine", "params": {"warmup_ratio": 0.5}}, [0, 0.5, 1, 0.5]),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_type": "linear",
          "warmup_num_steps": 4}}, [0, 0, 0.25, 0.5]),
    ],
)  # fmt: skip
def test_the_learning_rate_depends_on_optimizer_steps_only(scheduler, expected):
    """Case G01: not on ranks, accumulation or the kind of schedule."""
    keys = {"scheduler": scheduler} if scheduler else {}
    expected = [1e-2 * e if scheduler else e for e in expected]
    for dp, micro in [(1, 8), (2, 1)]:
        run = make_run(stage=1, dp=dp, micro=micro, **keys)
        for lrs in run_distributed(learning_rates, dp, run=run, batches=global_batches()):
            assert lrs == pytest.approx(expected)


def begun(runs):
    """Of each run the masters, and the parameters that are computed with where they are whole."""
    from ds4d.model.initial import InitialValues
    from ds4d.model.meta import logical_model

    found = []
    for run in runs:
        engine = make_engine(run)
        values = InitialValues(logical_model(engine.module.config), seed=9)
        before = [p.detach().clone() for p in engine.module.parameters()]
        engine.begin_masters(values)
        same = all(map(torch.equal, before, engine.module.parameters()))
        wanted = {name: values(name) for name, _ in tiny_model().named_parameters()}
        found.append((export(engine.logical_state()), wanted, same))
    return found


def test_masters_begin_with_values_that_are_not_rounded():
    runs = [make_run(stage=stage, dp=2, micro=2, precision="bf16") for stage in STAGES]
    ranks = run_distributed(begun, 2, runs=runs)
    for results in zip(*ranks):
        whole = assemble([state for state, *_ in results])
        _, wanted, _ = results[0]
        for name, value in wanted.items():
            assert torch.equal(whole[f"weight/{name}"], value)
            assert value.dim() < 2 or not torch.equal(value, value.bfloat16().float())
        assert all(same for *_, same in results), "what is computed with stays as it is"

"""Layouts against one plain Hugging Face process: loss, every gradient, norm, weights after SGD and
losses under AdamW, in fp32 to 1e-5.

Models are random Hugging Face folders, so that what is tested includes reading them by slices.
"""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds4d.config.types import (
    BatchSizes,
    ContextConfig,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    PipelineConfig,
    PrecisionConfig,
    RunConfig,
    SourceConfig,
)
from tests.harness import run_distributed
from tests.reference import assemble, relative, rows, samples, train_plainly
from tests.tp_families import FAMILIES, ROUTED, with_layers

LENGTH, CLIP = 23, 0.5  # an odd length, padded where the sequence is cut
ADAMW = {
    "type": "AdamW",
    "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-5, "weight_decay": 0.1},
}
SGD = {"type": "SGD", "params": {"lr": 0.25}}
STEPS = {"SGD": 3, "AdamW": 5}
# 256, halved at the first overflow
LOSS_SCALE = {"fp16": {"initial_scale_power": 8, "hysteresis": 1}}


@lru_cache
def _scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="ds4d-models-")


@lru_cache(maxsize=None)
def folder_of(name: str, layers: int | None = None, **changes) -> Path:
    """A random model of a family; large enough weights for every gradient to be one."""
    torch.manual_seed(0)
    config = (FAMILIES | ROUTED)[name]
    config = config if layers is None else with_layers(config, layers)
    config = config | changes
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            center = 0.5 if parameter.dim() == 1 else 0.0
            torch.nn.init.normal_(parameter, center, 0.15)
    words = map(str, (*name.split(), layers, *changes.values()))
    folder = Path(_scratch().name) / "-".join(words)
    model.save_pretrained(folder)
    return folder


def make_run(folder, *, tp=1, pp=1, cp=1, dp=1, method="ring", ulysses=None, exchange="p2p", sequence_parallel=False, stage=1, optimizer=SGD,
             clip=CLIP, micro=1, rows=4, recompute="none", precision="fp32", overlap=True,
             schedule="1f1b", chunks=1, split=None):  # fmt: skip
    """Args:
    rows: of the global batch.
    """
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0 if stage == 3 else 10**5}
    keys = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": rows // (dp * micro),
        "optimizer": optimizer,
        "gradient_clipping": clip,
        "zero_optimization": zero,
    }
    if precision != "fp32":
        keys[precision] = {"enabled": True, **LOSS_SCALE.get(precision, {})}
    return RunConfig(
        model=ModelConfig(path=str(folder)),
        data=DataConfig(seq_len=LENGTH, train=SourceConfig("tokens")),
        parallel=ParallelConfig(
            tp=tp, pp=pp, cp=cp, dp=dp, sequence_parallel=sequence_parallel, tp_overlap=overlap
        ),
        pipeline=PipelineConfig(schedule, chunks, split),
        context=ContextConfig(method, ulysses, exchange),
        batch=BatchSizes(rows, micro, rows // (dp * micro)),
        deepspeed=keys,
        zero_stage=stage,
        recompute=recompute,
        precision=PrecisionConfig(precision, "fp32"),
    )


def make_engine(run, change=None):
    """Args:
    change: called with the model before it is wrapped.
    """
    from ds4d import attention
    from ds4d.engine import Engine
    from ds4d.mesh import Mesh
    from ds4d.model.build import DTYPES, build_model
    from ds4d.model.config import hf_config
    from ds4d.optim import of_run
    from ds4d.pipeline.stage import stage_cutter

    attention.register()
    mesh = Mesh.create(run.parallel, run.context)
    config = hf_config(run.model)

    def build(partition):
        model = build_model(
            run.model,
            config=config,
            dtype=DTYPES[run.precision.param_dtype],
            device="cpu",
            seed=0,
            attn_implementation=attention.implementation_for(config),
            recompute=run.recompute,
            partition=partition,
            tp=mesh.tensor_parallel(),
            cp=mesh.context_parallel(run.context),
            cut=stage_cutter(run, mesh, config),
        )
        if change is not None:
            change(model)
        return model

    engine = Engine.create(
        run, mesh, build, device=torch.device("cpu"), **of_run(run, total_steps=10)
    )
    return engine, mesh


def export(state):
    return {
        name: (tensor.shape, [(p.offsets, p.tensor.detach().clone()) for p in tensor.pieces])
        for name, tensor in state.items()
        if name.startswith("weight/")
    }


def share_of(batch, run, mesh) -> list:
    """This rank's micro-batches of a global batch."""
    micro, dp = run.batch.micro, run.parallel.dp
    starts = [(a * dp + mesh.coordinate.dp) * micro for a in range(run.batch.accumulation)]
    return [mesh.cutter(rows(batch, start, start + micro)) for start in starts]


def train(runs, batches):
    """Every run in turn; [(results, weights after step 1, weights at the end)] of this rank."""
    out = []
    for run in runs:
        engine, mesh = make_engine(run)
        results, first = [], {}
        for batch in batches[run.batch.train][: STEPS[run.deepspeed["optimizer"]["type"]]]:
            results.append(engine.train_step(share_of(batch, run, mesh)))
            first = first or export(engine.logical_state())
        out.append((results, first, export(engine.logical_state())))
    return out


def batches(*counts: int, data=samples) -> dict[int, list]:
    """By the rows of a global batch: one for each step."""
    return {count: [data(count, LENGTH, seed=step) for step in range(5)] for count in counts}


@lru_cache(maxsize=None)
def _plain(folder: Path, optimizer: str, count: int, clip: float, dtype: torch.dtype, data):
    from ds4d.optim import build_optimizer

    # eager falcon adds alibi twice, once of its own and once with the mask
    attention = "sdpa" if "falcon" in folder.name else "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    config = {"SGD": SGD, "AdamW": ADAMW}[optimizer]
    made = build_optimizer(model.named_parameters(), config, decay_all=False)
    steps = batches(count, data=data)[count][: STEPS[optimizer]]
    return train_plainly(model, steps, made, clip=clip), before


def plain(run, dtype=torch.float32, data=samples):
    """(the run, the initial weights) of one Hugging Face process."""
    optimizer = run.deepspeed["optimizer"]["type"]
    clip = run.deepspeed["gradient_clipping"]
    return _plain(Path(run.model.path), optimizer, run.batch.train, clip, dtype, data)


def check(case, ranks, index, run, data=samples) -> None:
    agree(case, run, [rank[index] for rank in ranks], *plain(run, data=data))


def agree(case, run, ranks, reference, before) -> None:
    """Args:
    ranks: what ``train`` gives of the run, on each rank.
    before: the initial weights.
    """
    results = [rank[0] for rank in ranks]
    assert all(r == results[0] for r in results), case
    assert [r.loss for r in results[0]] == pytest.approx(reference.losses, rel=1e-5), case
    balances = [r.router_loss for r in results[0] if r.router_loss is not None]
    assert balances == pytest.approx(reference.router_losses, rel=1e-5), case
    norms = [r.grad_norm for r in results[0]]
    assert norms == pytest.approx(reference.grad_norms, rel=1e-5), case
    if run.deepspeed["optimizer"] != SGD:
        return
    # (before - after) / lr is the clipped gradient, rounded as the weights are
    clip = run.deepspeed["gradient_clipping"]
    scale = min(1.0, clip / reference.grad_norms[0]) if clip else 1.0
    after = assemble([rank[1] for rank in ranks])
    final = assemble([rank[2] for rank in ranks])
    for name, gradient in reference.gradients.items():
        moved = (before[name] - after[f"weight/{name}"]) / SGD["params"]["lr"] / scale
        assert moved.shape == gradient.shape, (case, name)
        error = float((moved.double() - gradient.double()).norm())
        rounding = 2e-7 * float(before[name].norm()) / SGD["params"]["lr"] / scale
        allowed = 1e-5 * float(gradient.norm()) + 1e-6 * reference.grad_norms[0] + rounding
        assert error <= allowed, (case, name, error, allowed)
        assert relative(final[f"weight/{name}"], reference.weights[name]) < 1e-5, (case, name)


def compare(cases, world, *, layers: int | None = None, body=train, data=samples, **kwargs) -> None:
    """Args:
    cases: (family, keywords of ``make_run``); all in the same workers.
    layers: of each model, instead of the family's own.
    data: makes global batches.
    body: what the ranks do, ``train`` with ``kwargs`` or something around it.
    """
    runs = [make_run(folder_of(name, layers), **options) for name, options in cases]
    given = batches(*{run.batch.train for run in runs}, data=data)
    ranks = run_distributed(body, world, timeout=600, runs=runs, batches=given, **kwargs)
    for index, (case, run) in enumerate(zip(cases, runs, strict=True)):
        check(case, ranks, index, run, data)


def check_half_precision(runs, world) -> None:
    """No further from fp32 than plain bf16 is: losses about, the distances that weights have moved
    together.

    Args:
        runs: in bf16, of one model and one optimizer.
    """
    exact, before = plain(runs[0])
    half, _ = plain(runs[0], torch.bfloat16)
    given = batches(runs[0].batch.train)
    ranks = run_distributed(train, world, timeout=600, runs=runs, batches=given)
    moved = {name: weight - before[name] for name, weight in exact.weights.items()}
    limits = [relative(half.weights[name] - before[name], m) for name, m in moved.items()]
    allowed = max(abs(h - e) for h, e in zip(half.losses, exact.losses, strict=True))
    for index, run in enumerate(runs):
        case = (run.parallel, run.pipeline)
        losses = [r.loss for r in ranks[0][index][0]]
        distance = max(abs(r - e) for r, e in zip(losses, exact.losses, strict=True))
        assert distance <= 1.5 * allowed, case  # noise: the weights tell
        final = assemble([rank[index][2] for rank in ranks])
        errors = [relative(final[f"weight/{n}"] - before[n], m) for n, m in moved.items()]
        assert sum(errors) <= sum(limits), case

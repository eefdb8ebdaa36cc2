"""Tensor parallelism against one plain Hugging Face process: every family, loss, every gradient,
norm, weights after SGD and losses under AdamW, in fp32 to 1e-5.

Models are random Hugging Face folders, so that what is tested includes reading them by slices.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds4d.config.types import (
    BatchSizes,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
    SourceConfig,
)
from tests.harness import run_distributed
from tests.reference import assemble, relative, rows, samples, train_plainly
from tests.tp_families import FAMILIES, OWN_ATTENTION

GLOBAL_BATCH, LENGTH, CLIP = 4, 23, 0.5  # an odd length, padded where the sequence is cut
ADAMW = {
    "type": "AdamW",
    "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": 1e-5, "weight_decay": 0.1},
}
SGD = {"type": "SGD", "params": {"lr": 0.25}}
STEPS = {"SGD": 3, "AdamW": 5}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    return {}


def folder_of(name: str, folders, tmp_path_factory) -> Path:
    """A random model of a family; large enough weights for every gradient to be one."""
    if name not in folders:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**FAMILIES[name]))
        with torch.no_grad():
            for parameter in model.parameters():
                center = 0.5 if parameter.dim() == 1 else 0.0
                torch.nn.init.normal_(parameter, center, 0.15)
        folders[name] = tmp_path_factory.mktemp("models") / name.replace(" ", "-")
        model.save_pretrained(folders[name])
    return folders[name]


def make_run(folder, *, tp, dp=1, sequence_parallel, stage, optimizer, clip=CLIP, micro=1,
             recompute="none", precision="fp32", overlap=True):  # fmt: skip
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0 if stage == 3 else 10**5}
    keys = {
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": GLOBAL_BATCH // (dp * micro),
        "optimizer": optimizer,
        "gradient_clipping": clip,
        "zero_optimization": zero,
    }
    if precision != "fp32":
        keys[precision] = {"enabled": True}
    return RunConfig(
        model=ModelConfig(path=str(folder)),
        data=DataConfig(seq_len=LENGTH, train=SourceConfig("tokens")),
        parallel=ParallelConfig(
            tp=tp, dp=dp, sequence_parallel=sequence_parallel, tp_overlap=overlap
        ),
        batch=BatchSizes(GLOBAL_BATCH, micro, GLOBAL_BATCH // (dp * micro)),
        deepspeed=keys,
        zero_stage=stage,
        recompute=recompute,
        precision=PrecisionConfig(precision, "fp32"),
    )


def make_engine(run):
    from ds4d import attention
    from ds4d.engine import Engine
    from ds4d.mesh import Mesh
    from ds4d.model.build import DTYPES, build_model
    from ds4d.model.config import hf_config

    attention.register()
    mesh = Mesh.create(run.parallel)
    config = hf_config(run.model)

    def build(partition):
        return build_model(
            run.model,
            config=config,
            dtype=DTYPES[run.precision.param_dtype],
            device="cpu",
            seed=0,
            attn_implementation=attention.implementation_for(config),
            recompute=run.recompute,
            partition=partition,
            tp=mesh.tensor_parallel(),
        )

    engine = Engine.create(run, mesh, build, device=torch.device("cpu"), total_steps=10)
    return engine, mesh


def export(state):
    return {
        name: (tensor.shape, [(p.offsets, p.tensor.detach().clone()) for p in tensor.pieces])
        for name, tensor in state.items()
        if name.startswith("weight/")
    }


def train(runs, batches):
    """Every run in turn; [(results, weights after step 1, weights at the end)] of this rank."""
    out = []
    for run in runs:
        engine, mesh = make_engine(run)
        micro, dp = run.batch.micro, run.parallel.dp
        starts = [(a * dp + mesh.coordinate.dp) * micro for a in range(run.batch.accumulation)]
        results, first = [], {}
        for batch in batches[: STEPS[run.deepspeed["optimizer"]["type"]]]:
            results.append(engine.train_step([rows(batch, s, s + micro) for s in starts]))
            first = first or export(engine.logical_state())
        out.append((results, first, export(engine.logical_state())))
    return out


def batches() -> list:
    return [samples(GLOBAL_BATCH, LENGTH, seed=step) for step in range(5)]


def plain(folder: Path, optimizer, *, clip=CLIP, dtype=torch.float32):
    """(the run, the initial weights) of one Hugging Face process."""
    from ds4d.optim import build_optimizer

    # eager falcon adds alibi twice, once of its own and once with the mask
    attention = "sdpa" if "falcon" in folder.name else "eager"
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention, dtype=dtype)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    made = build_optimizer(model.named_parameters(), optimizer, decay_all=False)
    return train_plainly(model, batches()[: STEPS[optimizer["type"]]], made, clip=clip), before


def check(case, ranks, index, reference, before, optimizer, clip) -> None:
    results = [rank[index][0] for rank in ranks]
    assert all(r == results[0] for r in results), case
    assert [r.loss for r in results[0]] == pytest.approx(reference.losses, rel=1e-5), case
    norms = [r.grad_norm for r in results[0]]
    assert norms == pytest.approx(reference.grad_norms, rel=1e-5), case
    if optimizer is not SGD:
        return
    # (before - after) / lr is the clipped gradient, rounded as the weights are
    scale = min(1.0, clip / reference.grad_norms[0]) if clip else 1.0
    after = assemble([rank[index][1] for rank in ranks])
    final = assemble([rank[index][2] for rank in ranks])
    for name, gradient in reference.gradients.items():
        moved = (before[name] - after[f"weight/{name}"]) / SGD["params"]["lr"] / scale
        assert moved.shape == gradient.shape, (case, name)
        error = float((moved.double() - gradient.double()).norm())
        rounding = 2e-7 * float(before[name].norm()) / SGD["params"]["lr"] / scale
        allowed = 1e-5 * float(gradient.norm()) + 1e-6 * reference.grad_norms[0] + rounding
        assert error <= allowed, (case, name, error, allowed)
        assert relative(final[f"weight/{name}"], reference.weights[name]) < 1e-5, (case, name)


def compare(cases, world, folders, factory) -> None:
    """Args:
    cases: (family, keywords of ``make_run``); all in the same workers.
    """
    runs, references = [], {}
    for name, options in cases:
        folder = folder_of(name, folders, factory)
        runs.append(make_run(folder, **options))
        key = (name, options["optimizer"]["type"])
        if key not in references:
            references[key] = plain(folder, options["optimizer"])
    ranks = run_distributed(train, world, timeout=600, runs=runs, batches=batches())
    for index, (name, options) in enumerate(cases):
        reference, before = references[name, options["optimizer"]["type"]]
        check((name, options), ranks, index, reference, before, options["optimizer"], CLIP)


def cut_along_the_sequence(name: str) -> list[bool]:
    return [False] if name in OWN_ATTENTION else [False, True]


ON_TWO = [name for name in FAMILIES if name != "llama, 9 heads, 3 key heads"]


@pytest.mark.parametrize("name", ON_TWO)
def test_every_family_on_two_ranks(name, folders, tmp_path_factory):
    cases = [
        (name, dict(tp=2, sequence_parallel=cut, stage=1, optimizer=optimizer, micro=2))
        for cut in cut_along_the_sequence(name)
        for optimizer in (SGD, ADAMW)
    ]
    compare(cases, 2, folders, tmp_path_factory)


def test_three_ranks(folders, tmp_path_factory):
    cases = [
        ("llama, 9 heads, 3 key heads", dict(tp=3, sequence_parallel=cut, stage=1, optimizer=SGD))
        for cut in (False, True)
    ]
    compare(cases, 3, folders, tmp_path_factory)


ON_FOUR = [
    "llama, 20 heads, 10 key heads",
    "llama", "llama, one key head", "llama, odd inner size", "llama tied", "mistral", "phi3",
    "gpt2", "gpt_neox", "bloom", "falcon, one key head", "mixtral", "gpt_oss", "opt", "gemma2",
]  # fmt: skip


@pytest.mark.parametrize("name", ON_FOUR)
def test_four_ranks_one_more_than_there_are_key_heads(name, folders, tmp_path_factory):
    cases = [
        (name, dict(tp=4, sequence_parallel=cut, stage=1, optimizer=SGD))
        for cut in cut_along_the_sequence(name)
    ]
    compare(cases, 4, folders, tmp_path_factory)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2", "llama tied", "olmo2", "mixtral"])
def test_with_zero_and_data_parallelism(name, folders, tmp_path_factory):
    cases = [
        (name, dict(tp=2, dp=2, sequence_parallel=cut, stage=stage, optimizer=SGD))
        for cut in (False, True)
        for stage in (0, 1, 2, 3)
    ]
    compare(cases, 4, folders, tmp_path_factory)


def test_zero_3_where_parameters_are_used_in_unusual_ways(folders, tmp_path_factory):
    """Shared by ranks, with a head bias, chosen from, by head."""
    cases = [
        (name, dict(tp=2, sequence_parallel=name != "bloom", stage=3, optimizer=SGD, micro=2))
        for name in ("gpt_oss", "phi", "llama, one key head", "bloom")
    ]
    compare(cases, 2, folders, tmp_path_factory)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_with_recomputation(recompute, folders, tmp_path_factory):
    cases = [
        (name, dict(tp=2, sequence_parallel=cut, stage=stage, optimizer=SGD, recompute=recompute))
        for name in ("llama", "gpt2", "gemma2", "mixtral", "llama with biases")
        for cut in (False, True)
        for stage in (1, 3)
    ]
    compare(cases, 2, folders, tmp_path_factory)


def train_in_parts(runs, batches, parts):
    """``train`` with row-parallel products in parts, as a GPU computes them."""
    from ds4d.tensor_parallel import overlap

    before, overlap.PARTS["cpu"] = overlap.PARTS["cpu"], parts
    try:
        return train(runs, batches)
    finally:
        overlap.PARTS["cpu"] = before


def test_overlap_changes_no_number(folders, tmp_path_factory):
    """Neither in what is under way beside the weights' gradients, nor products in parts."""
    names = ("llama with biases", "gpt2", "mixtral")
    cases = [
        (name, dict(tp=2, sequence_parallel=cut, stage=1, optimizer=SGD, overlap=on, micro=2))
        for on in (True, False) for name in names for cut in (False, True)
    ]  # fmt: skip
    runs = [make_run(folder_of(n, folders, tmp_path_factory), **options) for n, options in cases]
    count = len(runs) // 2
    one, other = run_distributed(train, 2, timeout=600, runs=runs, batches=batches())
    for on, off in zip(one[:count], one[count:], strict=True):
        assert on[0] == off[0]  # losses and norms, to the bit
    references = {
        name: plain(folder_of(name, folders, tmp_path_factory), SGD) for name in names
    }
    for parts in (2, 5):
        ranks = run_distributed(
            train_in_parts, 2, timeout=600, runs=runs[:count], batches=batches(), parts=parts
        )
        for index, case in enumerate(cases[:count]):
            check((case, parts), ranks, index, *references[case[0]], SGD, CLIP)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bf16_is_no_further_from_fp32_than_plain_bf16(name, folders, tmp_path_factory):
    folder = folder_of(name, folders, tmp_path_factory)
    exact, before = plain(folder, ADAMW)
    half, _ = plain(folder, ADAMW, dtype=torch.bfloat16)
    options = dict(tp=2, optimizer=ADAMW, precision="bf16")
    runs = [make_run(folder, sequence_parallel=cut, stage=1, **options) for cut in (False, True)]
    ranks = run_distributed(train, 2, timeout=600, runs=runs, batches=batches())
    moved = {name: weight - before[name] for name, weight in exact.weights.items()}
    limits = [relative(half.weights[name] - before[name], m) for name, m in moved.items()]
    allowed = max(abs(h - e) for h, e in zip(half.losses, exact.losses, strict=True))
    for index, run in enumerate(runs):
        losses = [r.loss for r in ranks[0][index][0]]
        distance = max(abs(r - e) for r, e in zip(losses, exact.losses, strict=True))
        assert distance <= 1.5 * allowed, run.parallel  # noise: the weights tell
        final = assemble([rank[index][2] for rank in ranks])
        errors = [relative(final[f"weight/{n}"] - before[n], m) for n, m in moved.items()]
        assert sum(errors) <= sum(limits), run.parallel

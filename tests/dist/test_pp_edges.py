"""Training along a pipeline where something is unusual, against one plain Hugging Face process:
shapes, numbers of micro-batches, what is trained, the objective."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from ds4d.config.types import TrainingConfig
from ds4d.pipeline.stage import StandIn
from tests.dist.test_pp_parity import SCHEDULES, with_schedule
from tests.harness import run_distributed
from tests.parity import ADAMW, CLIP, SGD, agree, export, folder_of, make_engine, make_run
from tests.reference import PlainRun, assemble, relative, samples

LAYERS = 5


def train(cases):
    """[(results, weights after step 1, weights at the end)] of this rank; each case a run, the
    micro-batches of its steps, and what is changed in the model."""
    out = []
    for run, steps, change in cases:
        engine, mesh = make_engine(run, change)
        results, first = [], {}
        for micro_batches in steps:
            mine = micro_batches[mesh.coordinate.dp :: run.parallel.dp]
            results.append(engine.train_step(mine))
            first = first or export(engine.logical_state())
        out.append((results, first, export(engine.logical_state())))
    return out


def plainly(run, steps, change) -> tuple[PlainRun, dict[str, torch.Tensor]]:
    """(the run, the initial weights) of one process, a sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(run.model.path, attn_implementation="eager")
    change(model)
    named = dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in named.items()}
    found = PlainRun([], [], {}, {})
    for micro_batches in steps:
        tokens = sum(int((batch.targets >= 0).sum()) for batch in micro_batches)
        loss = sum(_loss_sum(model, batch, run.training) for batch in micro_batches) / tokens
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in named.items() if p.grad is not None}
        norm = torch.nn.utils.get_total_norm(gradients.values())
        with torch.no_grad():
            for name, gradient in gradients.items():
                clipped = gradient * min(1.0, CLIP / float(norm))
                named[name] -= SGD["params"]["lr"] * clipped
        model.zero_grad()
        found.losses.append(float(loss.detach()))
        found.grad_norms.append(float(norm))
        found.gradients = found.gradients or gradients
    found.weights = {name: p.detach().clone() for name, p in named.items()}
    return found, before


def _loss_sum(model, batch, training: TrainingConfig) -> torch.Tensor:
    logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids).logits
    z, targets = logits.flatten(0, 1), batch.targets.flatten()
    loss = F.cross_entropy(z, targets, label_smoothing=training.label_smoothing, reduction="sum")
    return loss + training.z_loss * z[targets >= 0].logsumexp(-1).square().sum()


def nothing(model) -> None:
    pass


def steps_of(*shapes: list[tuple[int, int]]) -> list:
    """Micro-batches by their shapes."""
    return [
        [samples(count, length, seed=100 * step + i) for i, (count, length) in enumerate(each)]
        for step, each in enumerate(shapes)
    ]


FOUR = steps_of([(1, 23)] * 4, [(1, 23)] * 4)


def compare(cases, world: int, *, layers: int = LAYERS) -> None:
    """Args:
    cases: (family, keywords of ``make_run``, steps, change).
    """
    runs = []
    for family, options, steps, change in cases:
        options = {"pp": world, "rows": len(steps[0]) * options.get("micro", 1)} | options
        training = options.pop("training", TrainingConfig())
        run = make_run(folder_of(family, layers), **options).replace(training=training)
        runs.append((run, steps, change))
    ranks = run_distributed(train, world, timeout=300, cases=runs)
    for index, (case, (run, steps, change)) in enumerate(zip(cases, runs, strict=True)):
        agree(case[:2], run, [rank[index] for rank in ranks], *plainly(run, steps, change))


def test_lengths_and_rows_that_change_between_steps_and_micro_batches():
    """B15"""
    steps = steps_of(
        [(2, 23), (2, 9), (2, 16), (2, 23)],
        [(3, 31), (1, 5), (2, 31), (1, 40)],
        [(1, 8), (1, 8), (1, 8), (2, 1)],
    )
    cases = [
        ("llama tied", with_schedule(name, stage=stage, micro=2), steps, nothing)
        for name in SCHEDULES
        for stage in (0, 1)
    ]
    compare(cases, 2)


def test_fewer_micro_batches_than_ranks():
    cases = [
        (family, with_schedule(name, stage=stage, micro=2), steps_of([(2, 23)] * count), nothing)
        for name in ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
        for family, count, stage in [("llama tied", 1, 1), ("gpt2", 2, 0), ("llama tied", 3, 0)]
    ]
    compare(cases, 4, layers=8)


def add_spare(model) -> None:
    """A parameter that no forward pass reads, in layer 3."""
    layer = model.model.layers[3]
    if not isinstance(layer, StandIn):
        layer.mlp.register_parameter("spare", torch.nn.Parameter(torch.ones(3)))


def freeze(model, *, parts: tuple[str, ...], dims: tuple[int, ...] = (1, 2)) -> None:
    """What has one of ``parts`` in its name, tied names included."""
    for name, param in model.named_parameters(remove_duplicate=False):
        if param.dim() in dims and any(part in name for part in parts):
            param.requires_grad_(False)


def _layers(start: int, stop: int) -> tuple[str, ...]:
    return tuple(f"layers.{index}." for index in range(start, stop))


# of two ranks with the layers [0, 3) and [3, 5)
SPLIT = (3, 2)
FIRST, LAST = ("embed_tokens", *_layers(0, 3)), (*_layers(3, 5), "model.norm", "lm_head")
CHANGES = {
    "the embedding": partial(freeze, parts=("embed_tokens", "lm_head")),
    "the first stage": partial(freeze, parts=FIRST),
    "matrices of the first stage": partial(freeze, parts=FIRST, dims=(2,)),
    "the last stage": partial(freeze, parts=LAST),
    "vectors of the last stage": partial(freeze, parts=LAST, dims=(1,)),
    "nothing but what no pass reads": add_spare,
}
PARTS = [("llama", what) for what in CHANGES] + [("llama tied", "the embedding")]


@pytest.mark.parametrize("stage", [0, 1])
def test_parts_that_are_not_trained(stage):
    cases = [
        (family, with_schedule(schedule, stage=stage, split=SPLIT), FOUR, CHANGES[what])
        for family, what in PARTS
        for schedule in ("1f1b", "zb-h1")
    ]
    compare(cases, 2)


def test_parts_that_are_not_trained_beside_other_axes():
    cases = [
        (family, dict(pp=2, stage=stage, rows=4, split=SPLIT, **axes), FOUR, CHANGES[what])
        for stage in (0, 1)
        for axes in (dict(dp=2), dict(tp=2, sequence_parallel=True))
        for family, what in PARTS
    ]
    # four stages, two on each rank: the second rank has those in the middle
    for schedule in ("dualpipev", "zbv"):
        options = with_schedule(schedule, pp=2, tp=2, split=(1, 1, 2, 1))
        cases.append(("llama", options, FOUR, partial(freeze, parts=_layers(1, 4))))
    compare(cases, 4)


@pytest.mark.parametrize(
    "precision, tp, schedules",
    [("bf16", 1, ["1f1b", "zb-h1"]), ("bf16", 2, ["1f1b"]), ("fp16", 1, ["1f1b"])],
)
def test_parts_that_are_not_trained_in_half_precision(precision, tp, schedules):
    """As without a pipeline, to the rounding of the norm."""
    options = dict(precision=precision, optimizer=ADAMW, tp=tp)
    pipelines = [dict(pp=2, schedule=name, split=SPLIT) for name in schedules]
    both = []
    for pp, layouts in [(1, [{}]), (2, pipelines)]:
        cases = [
            (make_run(folder_of(family, LAYERS), **options, **layout), FOUR, CHANGES[what])
            for layout in layouts
            for family, what in PARTS
        ]
        ranks = run_distributed(train, pp * tp, timeout=300, cases=cases)
        both.append(list(zip(*ranks, strict=True)))
    plain, piped = both
    for case, ranks, one in zip(PARTS * len(schedules), piped, plain * len(schedules), strict=True):
        assert [r.loss for r in ranks[0][0]] == [r.loss for r in one[0][0]], case
        norms = [r.grad_norm for r in one[0][0]]
        assert [r.grad_norm for r in ranks[0][0]] == pytest.approx(norms, rel=1e-6), case
        weights, expected = (assemble([rank[2] for rank in each]) for each in (ranks, one))
        assert weights.keys() == expected.keys(), case
        for name, weight in expected.items():
            assert relative(weights[name], weight) < 1e-6, (case, name)


def test_label_smoothing_and_z_loss():
    training = TrainingConfig(label_smoothing=0.1, z_loss=1e-2)
    cases = [
        ("llama tied", with_schedule(name, stage=stage, training=training), FOUR, nothing)
        for name in SCHEDULES
        for stage in (0, 1)
    ]
    compare(cases, 2)


def tied_copies(runs, steps):
    """Of each run, this rank's copy of the tied weight after every step; None: it has none."""
    out = []
    for run in runs:
        engine, mesh = make_engine(run)
        model, pp = engine.module, mesh.coordinate.pp
        copies = []
        for micro_batches in steps:
            engine.train_step(micro_batches[mesh.coordinate.dp :: run.parallel.dp])
            ends = {0: model.get_input_embeddings, run.parallel.pp - 1: model.get_output_embeddings}
            copies.append(ends[pp]().weight.detach().clone() if pp in ends else None)
        out.append(copies)
    return out


def test_the_copies_of_a_tied_weight_stay_equal_to_the_bit():
    """A07, for 20 steps."""
    steps = steps_of(*[[(1, 23)] * 2] * 20)
    layouts = [
        dict(pp=4),
        dict(pp=2, dp=2),
        dict(pp=2, tp=2),
        dict(pp=2, tp=2, sequence_parallel=True, schedule="zb-h1"),
    ]
    folder, options = folder_of("llama tied", 4), dict(optimizer=ADAMW, rows=2)
    runs = [
        make_run(folder, precision=precision, stage=stage, **options, **layout)
        for layout in layouts
        for precision, stage in [("fp32", 0), ("fp32", 1), ("bf16", 1)]
    ]
    ranks = run_distributed(tied_copies, 4, timeout=300, runs=runs, steps=steps)
    for index, run in enumerate(runs):
        places = 4 // run.parallel.pp  # of each stage
        first, last = ranks[:places], ranks[-places:]
        for one, other in zip(first, last, strict=True):
            assert all(map(torch.equal, one[index], other[index])), run.parallel
            assert not torch.equal(one[index][0], one[index][-1])


def evaluate_between(runs, steps, held_out):
    """Of each run: sums before training, the results of steps, and those of steps with evaluations
    of 0, 1, 3 and 9 micro-batches between them."""
    out = []
    for run in runs:
        alone, _ = make_engine(run)
        torch.manual_seed(0)
        results = [alone.train_step(micro_batches) for micro_batches in steps]
        engine, _ = make_engine(run)
        sums = [tuple(map(float, pair)) for pair in engine.eval_sums(held_out)]
        torch.manual_seed(0)
        between = []
        for count, micro_batches in zip((0, 1, 3, 9), steps, strict=True):
            between.append(engine.train_step(micro_batches))
            assert len(list(engine.eval_sums(held_out[:count]))) == count
        out.append((sums, results, between))
    return out


@pytest.mark.parametrize("pp", [2, 4])
def test_evaluations_of_any_size_between_steps_change_nothing(pp):
    """G07; other rows and lengths than those of training."""
    (held_out,) = steps_of([(3, 17), (1, 40), (2, 5)] * 3)
    steps = steps_of(*[[(1, 23)] * 8] * 4)
    folders = [folder_of("llama tied", 8), folder_of("gpt2", 8, resid_pdrop=0.1, attn_pdrop=0.1)]
    cases = [(folder, schedule) for schedule in SCHEDULES for folder in folders]
    runs = [
        make_run(folder, rows=8, **with_schedule(schedule, pp=pp)) for folder, schedule in cases
    ]
    ranks = run_distributed(evaluate_between, pp, runs=runs, steps=steps, held_out=held_out)
    counts = [int((batch.targets >= 0).sum()) for batch in held_out]
    losses = {}
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        with torch.no_grad():
            losses[folder] = [float(_loss_sum(model, b, TrainingConfig())) for b in held_out]
    for case, *of_ranks in zip(cases, *ranks, strict=True):
        found = torch.tensor([sums for sums, _, _ in of_ranks]).sum(0)  # of [rank, batch, 2]
        assert found[:, 0].tolist() == pytest.approx(losses[case[0]], rel=1e-5), case
        assert found[:, 1].tolist() == counts, case
        assert all(results == between for _, results, between in of_ranks), case

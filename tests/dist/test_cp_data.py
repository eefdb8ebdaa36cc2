"""Context parallelism on everything that rows can hold, against one plain Hugging Face process that
is given each document alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from ds4d import context_parallel
from ds4d.attention.documents import PADDING, Documents
from ds4d.context_parallel import Cutter
from ds4d.data.batch import IGNORE, MicroBatch
from tests.dist.test_cp_parity import ON_TWO, WAYS, by
from tests.harness import run_distributed
from tests.parity import CLIP, SGD, agree, export, folder_of, make_engine, make_run
from tests.reference import PlainRun, samples

Lengths = Sequence[int]  # of a row's documents, in order; of padding negative
Positions = Callable[[int, int], list[int]]  # (document in its row, its length)


def from_zero(_document: int, length: int) -> list[int]:
    return list(range(length))


def from_an_offset(document: int, length: int) -> list[int]:
    start = 8 * (document + 1)  # as many as there are in llama4's chunks, which it counts from zero
    return list(range(start, start + length))


def with_a_jump(_document: int, length: int) -> list[int]:
    half = length // 2
    return [*range(half), *range(half + 4, length + 4)]


def micro_batch(
    rows: Sequence[Lengths],
    *,
    positions: Positions = from_zero,
    named: bool = True,
    seed: int = 0,
) -> MicroBatch:
    """Args:
    rows: equally long ones.
    named: with document ids.
    """
    generator = torch.Generator().manual_seed(seed)
    size = sum(map(abs, rows[0]))
    ids = torch.randint(101, (len(rows), size), generator=generator)
    targets, places, documents = (torch.zeros_like(ids) for _ in range(3))
    targets[:, :-1] = ids[:, 1:]
    for row, lengths in enumerate(rows):
        for number, (length, stop) in enumerate(zip(lengths, accumulate(map(abs, lengths)))):
            tokens = slice(stop - abs(length), stop)
            padding = length < 0
            documents[row, tokens] = PADDING if padding else number
            places[row, tokens] = torch.tensor(positions(number, abs(length)))
            targets[row, tokens if padding else stop - 1] = IGNORE
    targets[torch.rand(targets.shape, generator=generator) < 0.2] = IGNORE
    return MicroBatch(
        ids, targets, places, Documents.from_ids(documents, places) if named else None
    )


# 44 tokens: chunks of 11 on two ranks, of 5.5 and so of 6 with padding on four
ODD = [(5, 17, 1, 14, 7), (22, 22)]
UNEVEN = [(40, 1, 1, 1, 1), (1, 2, 41)]
KINDS: dict[str, list[MicroBatch]] = {
    "one document a row": [micro_batch([(44,), (44,)], named=False), samples(2, 13)],
    "packed": [micro_batch(ODD), micro_batch(UNEVEN), micro_batch([(2,) * 22, (11,) * 4])],
    "padded": [
        micro_batch([(20, -24), (44,)]),
        micro_batch([(-24, 20), (-3, 41)]),
        micro_batch([(-7, 9, -8, 20), (-44,)]),
    ],
    "positions": [
        micro_batch(ODD, named=False),
        micro_batch([(44,), (44,)], positions=from_an_offset, named=False),
        micro_batch([(44,), (44,)], positions=with_a_jump, named=False),
    ],
    "documents and positions": [
        micro_batch(ODD, positions=from_an_offset),
        micro_batch(ODD, positions=with_a_jump),
    ],
}
ALL_KINDS = [batch for batches in KINDS.values() for batch in batches]


def train(cases, smallest_chunk=None):
    """[(results, weights after step 1, weights at the end)] of this rank, as ``agree`` wants it;
    each case a run and the micro-batches of its steps.

    Args:
        smallest_chunk: that documents are dealt in by their work; None: as it is.
    """
    smallest = context_parallel.SMALLEST_CHUNK if smallest_chunk is None else smallest_chunk
    with mock.patch.object(context_parallel, "SMALLEST_CHUNK", smallest):
        return [_trained(run, steps) for run, steps in cases]


def _trained(run, steps):
    engine, mesh = make_engine(run)
    results, first = [], {}
    for micro_batches in steps:
        results.append(engine.train_step([mesh.cutter(batch) for batch in micro_batches]))
        first = first or export(engine.logical_state())
    return results, first, export(engine.logical_state())


def documents_of(batch: MicroBatch, alone: bool = True) -> list[tuple[torch.Tensor, ...]]:
    """(ids, targets, positions) of each document, or of each row, alone, [1, tokens]."""
    found = []
    for row in range(batch.input_ids.shape[0]):
        tensors = [x[row : row + 1] for x in (batch.input_ids, batch.targets, batch.position_ids)]
        if batch.documents is None or not alone:
            found.append(tuple(tensors))
            continue
        ids, counts = batch.documents.ids[row].unique_consecutive(return_counts=True)
        parts = zip(*(x.split(counts.tolist(), dim=1) for x in tensors))
        found += [part for document, part in zip(ids, parts) if document != PADDING]
    return found


def loss_sum(model, ids, targets, positions) -> torch.Tensor:
    logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def plainly(folder: Path, steps, alone: bool = True) -> tuple[PlainRun, dict[str, torch.Tensor]]:
    """(the run, the initial weights) of one process, a document, or a row, at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    named = dict(model.named_parameters())
    before = {name: p.detach().clone() for name, p in named.items()}
    found = PlainRun([], [], {}, {})
    for micro_batches in steps:
        tokens = sum(int((batch.targets >= 0).sum()) for batch in micro_batches)
        losses = [
            loss_sum(model, *d) for batch in micro_batches for d in documents_of(batch, alone)
        ]
        loss = sum(losses) / tokens
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in named.values()])
        found.gradients = found.gradients or {n: p.grad.clone() for n, p in named.items()}
        with torch.no_grad():
            for parameter in named.values():
                parameter -= SGD["params"]["lr"] * parameter.grad * min(1.0, CLIP / float(norm))
        model.zero_grad()
        found.losses.append(float(loss.detach()))
        found.grad_norms.append(float(norm))
    found.weights = {name: p.detach().clone() for name, p in named.items()}
    return found, before


def compare(cases, world: int, *, alone: bool = True, **kwargs) -> None:
    """Args:
    cases: (a folder, keywords of ``make_run``, the micro-batches of each step).
    alone: the reference is given documents, not rows.
    """
    runs = []
    for folder, options, steps in cases:
        micro = steps[0][0].input_ids.shape[0]
        rows = micro * len(steps[0]) * options.get("dp", 1)
        runs.append((make_run(folder, micro=micro, rows=rows, **options), steps))
    ranks = run_distributed(train, world, timeout=600, cases=runs, **kwargs)
    references = {}
    for index, (case, (run, steps)) in enumerate(zip(cases, runs, strict=True)):
        key = (case[0], id(steps))
        references[key] = references.get(key) or plainly(case[0], steps, alone)
        agree(case[:2], run, [rank[index] for rank in ranks], *references[key])


def ways(cp: int) -> list[str]:
    return list(WAYS) if cp > 2 else list(ON_TWO)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_kind(kind, cp):
    steps = [KINDS[kind]] * 2
    compare([(folder_of("llama"), by(way, cp), steps) for way in ways(cp)], cp)


FAMILIES = [
    ("mistral", {}), ("gemma2", {}), ("gemma3_text", {}), ("gpt_oss", {}), ("qwen3", {}),
    ("smollm3", {}), ("gpt2", {}), ("opt", {}), ("deepseek_v3", {}),
    ("llama4_text", {}),
]  # fmt: skip


@pytest.mark.parametrize("name, changes", FAMILIES)
@pytest.mark.parametrize("cp", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_kinds_in_one_step(name, changes, cp):
    """Windows, caps, sinks, chunks, layers without positions, masks that do not ask for positions,
    values of another size."""
    steps = [ALL_KINDS] * 2
    compare([(folder_of(name, **changes), by(way, cp), steps) for way in ways(cp)], cp)


def test_chunks_and_scales_by_places_in_the_document():
    """Whatever the positions begin with."""
    steps = [[*KINDS["packed"], micro_batch(ODD, positions=from_an_offset)]] * 2
    cases = [(folder_of("llama4_text"), by(way, 4), steps) for way in ways(4)]
    compare(cases, 4)


@pytest.mark.parametrize("cp", [2, 4])
def test_lengths_and_rows_that_change_between_micro_batches(cp):
    """Down to fewer tokens than there are places for chunks."""
    steps = [
        [samples(rows, length) for rows, length in shapes]
        for shapes in (
            [(2, 23), (2, 9), (2, 2 * cp), (2, 64)],
            [(3, 31), (1, 2 * cp - 1), (2, 3), (1, 40)],
            [(1, 8), (1, 2), (1, 17), (2, 1)],
        )
    ]
    folders = [folder_of(name) for name in ("llama tied", "gpt2", "mistral")]
    compare([(folder, by(way, cp), steps) for folder in folders for way in ways(cp)], cp)


@pytest.mark.parametrize("cp", [2, 4])
def test_learned_positions_up_to_the_end_of_their_table(cp):
    """Padding does not look for more."""
    folder, steps = folder_of("gpt2", n_positions=37), [[samples(2, 37)], [samples(1, 36)]]
    compare([(folder, by(way, cp), steps) for way in ways(cp)], cp)


SHORT = 32  # what they began with; rows have 44 tokens, ranks 22 or 11 of them
ROPES = {
    "dynamic": ("llama", dict(factor=2.0), dict(max_position_embeddings=SHORT)),
    "yarn": ("llama", dict(factor=2.0, original_max_position_embeddings=SHORT), {}),
    "llama3": (
        "llama",
        dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
        | dict(original_max_position_embeddings=SHORT),
        {},
    ),
    "longrope": (
        "phi3",
        dict(short_factor=[1.0] * 6, long_factor=[1.5, 2.0, 2.5, 3.0, 3.5, 4.0]),
        dict(original_max_position_embeddings=SHORT),
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_rotary_scales_follow_the_whole_length(kind):
    """Short rows after long ones, too, whose scale some models remember."""
    name, fields, changes = ROPES[kind]
    rope = {"rope_type": kind, "rope_theta": 10000.0, **fields}
    folder = folder_of.__wrapped__(name, rope_parameters=rope, **changes)
    steps = [[samples(2, 44), samples(2, 20)], [samples(2, 30), samples(2, 44)]]
    for cp in (2, 4):
        compare([(folder, by(way, cp), steps) for way in ways(cp)], cp)


def test_documents_dealt_by_their_work():
    """Chunks so small that each place gets many of them."""
    rows = [(60, 1, 1, 1, 1), (30, 2, 32), (1, 1, 1, 61), (-20, 40, -4)]
    steps = [[micro_batch([row], seed=i) for i, row in enumerate(rows)]] * 2
    cases = [
        (folder_of(name, **changes), by(way, 4), steps)
        for name, changes in FAMILIES
        if name in ("qwen3", "gemma2", "llama4_text")
        for way in WAYS
    ]
    compare(cases, 4, smallest_chunk=2)


def test_the_cut_follows_the_work(monkeypatch):
    monkeypatch.setattr(context_parallel, "SMALLEST_CHUNK", 2)
    batch = micro_batch([(30, 2, 32)])
    cuts = [Cutter(rank, 4)(batch).cut for rank in range(4)]
    assert all(cut.spans == cuts[0].spans for cut in cuts)
    assert max(map(len, cuts[0].spans)) > 2
    assert sorted(t for held in cuts[0].spans for span in held for t in range(*span)) == [
        *range(64)
    ]
    monkeypatch.setattr(context_parallel, "SMALLEST_CHUNK", 64)
    assert cuts[0].imbalance < Cutter(0, 4)(batch).cut.imbalance


def with_targets(batch: MicroBatch, start: int, stop: int) -> MicroBatch:
    """In this stretch of each row only."""
    targets = torch.full_like(batch.targets, IGNORE)
    targets[:, start:stop] = batch.input_ids[:, start + 1 : stop + 1]
    return replace(batch, targets=targets)


def test_shards_and_micro_batches_without_targets():
    batch = samples(1, 44)
    steps = [
        [with_targets(batch, 0, 3), with_targets(batch, 0, 0)],
        [with_targets(batch, 40, 43), with_targets(batch, 20, 21)],
    ]
    cases = [(folder_of("llama tied"), by(way, 4, stage=s), steps) for way in WAYS for s in (0, 3)]
    compare(cases, 4)


def losses_of_tokens(runs, batches):
    """Of each run and batch: (this rank's place, the loss at each of its tokens)."""
    from ds4d.loss import model_inputs

    out = []
    for run in runs:
        engine, mesh = make_engine(run)
        for batch in map(mesh.cutter, batches):
            with torch.no_grad():
                logits = engine.module(**model_inputs(engine.module, batch)).logits
            losses = F.cross_entropy(logits.mT, batch.targets, reduction="none")
            places = torch.arange(losses.shape[1]) if batch.cut is None else batch.cut.places
            out.append((places, losses))
    return out


def by_place(ranks, index: int, length: int) -> torch.Tensor:
    """[B, S]"""
    rows = ranks[0][index][1].shape[0]
    whole = torch.full((rows, length), float("nan"))
    for rank in ranks:
        places, losses = rank[index]
        kept = places < length
        whole[:, places[kept]] = losses[:, kept]
    return whole


def layouts_of(name: str) -> list[tuple[int, list]]:
    """(ranks, runs on them) with cp 1, 2 and 4."""
    folder = folder_of(name)
    options = {1: [{}], 2: [by(way, 2) for way in ways(2)], 4: [by(way, 4) for way in ways(4)]}
    return [(cp, [make_run(folder, **each) for each in found]) for cp, found in options.items()]


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_no_document_sees_another(name):
    """B08: a token of the first changes, no number of the second does."""
    before = micro_batch([(24, 40)])
    ids = before.input_ids.clone()
    ids[0, 5] = (ids[0, 5] + 1) % 101
    pair = [before, replace(before, input_ids=ids)]
    for cp, runs in layouts_of(name):
        ranks = run_distributed(losses_of_tokens, cp, runs=runs, batches=pair)
        for index, run in enumerate(runs):
            one, other = (by_place(ranks, 2 * index + i, 64) for i in range(2))
            assert not torch.equal(one[:, :24], other[:, :24]), run.context
            assert torch.equal(one[:, 24:], other[:, 24:]), run.context


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_padding_on_either_side_changes_nothing(name):
    """B11: 20 and 64 tokens in rows of 64. Gradients of such rows are in ``test_every_kind``."""
    right, left = micro_batch([(20, -44), (64,)]), micro_batch([(-44, 20), (64,)])
    ids, targets = (x.clone() for x in (left.input_ids, left.targets))
    ids[0, 44:], targets[0, 44:] = right.input_ids[0, :20], right.targets[0, :20]
    ids[1], targets[1] = right.input_ids[1], right.targets[1]
    left = replace(left, input_ids=ids, targets=targets)
    model = AutoModelForCausalLM.from_pretrained(folder_of(name), attn_implementation="eager")
    with torch.no_grad():
        alone = [
            F.cross_entropy(model(i, position_ids=p).logits.mT, t, reduction="none")
            for i, t, p in documents_of(right)
        ]
    for cp, runs in layouts_of(name):
        ranks = run_distributed(losses_of_tokens, cp, runs=runs, batches=[right, left])
        for index, run in enumerate(runs):
            of_right, of_left = (by_place(ranks, 2 * index + i, 64) for i in range(2))
            for losses in (of_right[0, :20], of_left[0, 44:]):
                torch.testing.assert_close(losses, alone[0][0], rtol=1e-5, atol=1e-5, msg=str(run))
            for losses in (of_right[1], of_left[1]):
                torch.testing.assert_close(losses, alone[1][0], rtol=1e-5, atol=1e-5, msg=str(run))


def test_fewer_key_heads_than_ranks():
    """B01"""
    folder = folder_of("llama", num_attention_heads=8, num_key_value_heads=2, head_dim=16)
    compare([(folder, by(way, 4), [KINDS["packed"]] * 2) for way in WAYS], 4)

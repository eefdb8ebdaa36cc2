"""What context parallelism sends, computes and keeps, counted in real steps and compared with the
formulas and with a dense mask; exact."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from ds4d.attention import blockwise, visible
from ds4d.attention.documents import Documents
from ds4d.data.batch import MicroBatch
from tests.harness import run_distributed
from tests.measures import Largest, saved_in_a_layer
from tests.parity import folder_of, make_engine, make_run
from tests.reference import rows, samples

LAYERS, E, F, H, K, D, WINDOW = 3, 48, 56, 4, 2, 12, 8  # of the families here
S, MICRO_BATCHES = 48, 2
DOCUMENTS = {
    "long": [(10, 38), (29, 19)],
    "mixed": [(3, 17, 2, 26), (1, 1, 30, 16)],
    "short": [(6,) * 8, (4,) * 12],
    "one long": [(5, 5, 2, 36), (36, 6, 6)],
}


def packed(lengths: list[tuple[int, ...]]) -> MicroBatch:
    """A row for each tuple of documents' lengths, which add up to the same."""
    plain = samples(len(lengths), sum(lengths[0]))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    ids = torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    )
    documents = Documents.from_ids(ids, positions)
    return MicroBatch(plain.input_ids, plain.targets, positions, documents)


def without_documents(length: int = S, count: int = MICRO_BATCHES) -> list[MicroBatch]:
    batch = samples(count, length)
    return [rows(batch, i, i + 1) for i in range(count)]


@contextmanager
def small_chunks():
    """So that short rows, too, are dealt by their documents."""
    from ds4d import context_parallel

    with mock.patch.object(context_parallel, "SMALLEST_CHUNK", 1):
        yield


def sent_in_a_step(runs, steps):
    """[({(purpose, collective): bytes}, calls, spans of each micro-batch)] of this rank."""
    from ds4d import comm

    out = []
    for run, micro_batches in zip(runs, steps, strict=True):
        engine, mesh = make_engine(run)
        with small_chunks():
            mine = [mesh.cutter(batch) for batch in micro_batches]
        with comm.count_traffic() as traffic:
            engine.train_step(mine)
        spans = [batch.cut.spans for batch in mine]
        out.append((dict(traffic.sent), dict(traffic.calls), spans))
    return out


def mask_of(lengths: list[tuple[int, ...]], window: int | None, causal: bool) -> torch.Tensor:
    """Which keys queries see: bool [B, S, S]."""
    documents = torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths]
    )
    i = torch.arange(documents.shape[1])
    seen = documents[:, :, None] == documents[:, None, :]
    if causal:
        seen &= i <= i[:, None]
    return seen if window is None else seen & (i[:, None] - i < window)


def keys_wanted(mask: torch.Tensor, spans, to: int, source: int) -> int:
    """How many tokens of one place some query of another sees, in any row."""
    held = [torch.cat([torch.arange(*span) for span in spans[place]]) for place in (to, source)]
    return int(mask[:, held[0]][:, :, held[1]].any(1).any(0).sum())


def ring_of(rank: int, mask: torch.Tensor, spans, of_a_key: int) -> Counter:
    """What a place in the ring sends in the forward pass of a layer, and of gradients: of all keys
    that others need, and of all that it has needed."""
    others = [place for place in range(len(spans)) if place != rank]
    wanted = sum(keys_wanted(mask, spans, place, rank) for place in others)
    needed = sum(keys_wanted(mask, spans, rank, place) for place in others)
    return Counter(keys=wanted * of_a_key, gradients=needed * of_a_key)


# the forward pass, and again in the backward pass; selective recomputation keeps what attention
# gives, full recomputation repeats it
PASSES = {"none": 2, "selective": 2, "full": 3}


@pytest.mark.parametrize("cp", [2, 4])
def test_a_ring_sends_what_the_formula_says(cp):
    """formulas.md 2.4: KV (c - 1) in the forward pass, as much in the backward pass, and as much of
    gradients. So it is for the place that has most to send; what causality throws away stays
    where it is: of a place's two chunks later places want the first one only."""
    cases = [
        (recompute, precision, 2 if precision == "bf16" else 4)
        for recompute in PASSES
        for precision in ("fp32", "bf16")
    ]
    runs = [
        make_run(
            folder_of("llama", LAYERS),
            cp=cp,
            rows=MICRO_BATCHES,
            recompute=how,
            precision=precision,
        )
        for how, precision, _ in cases
    ]
    steps = [without_documents()] * len(runs)
    for r, rank in enumerate(run_distributed(sent_in_a_step, cp, runs=runs, steps=steps)):
        for (how, precision, e), (sent, calls, _) in zip(cases, rank, strict=True):
            kv = 2 * (S // cp) * K * D * e * LAYERS * MICRO_BATCHES
            assert sent == {
                ("context", "send"): PASSES[how] * kv * (r + (cp - 1 - r) / 2),
                ("context gradients", "send"): kv * (cp - 1 - r + r / 2),
            }, (how, precision, r)
            if r == cp - 1:
                assert sent["context", "send"] == PASSES[how] * kv * (cp - 1)
            steps_ = LAYERS * MICRO_BATCHES * (cp - 1)
            assert calls == {
                ("context", "send"): PASSES[how] * steps_, ("context gradients", "send"): steps_
            }  # fmt: skip


@pytest.mark.parametrize("cp", [2, 4])
def test_gathering_sends_what_the_formula_says(cp):
    cases = [(how, e) for how in PASSES for e in (4, 2)]
    runs = [
        make_run(
            folder_of("llama", LAYERS), cp=cp, rows=MICRO_BATCHES, exchange="all_gather",
            recompute=how, precision={4: "fp32", 2: "bf16"}[e],
        )
        for how, e in cases
    ]  # fmt: skip
    steps = [without_documents()] * len(runs)
    for rank in run_distributed(sent_in_a_step, cp, runs=runs, steps=steps):
        for (how, e), (sent, _, _) in zip(cases, rank, strict=True):
            kv = 2 * (S // cp) * K * D * e * LAYERS * MICRO_BATCHES
            gathered = sent.pop(("context", "all_gather"))
            assert gathered == PASSES[how] * kv * (cp - 1), how
            assert list(sent.values()) == [kv * (cp - 1)], how
            assert {purpose for purpose, _ in sent} == {"context gradients"}


def ulysses_bytes(u: int, key_heads: int, e: int = 4, *, cp: int, tp: int = 1) -> int:
    """formulas.md 2.4: b (s/c) (a/t) d e (2 + 2 k/a) (u - 1) / u, in one direction, of a layer."""
    return S // cp * (2 * H + 2 * key_heads) // tp * D * e * (u - 1) // u


@pytest.mark.parametrize("cp", [2, 4])
def test_ulysses_sends_what_the_formula_says(cp):
    """Key heads that do not divide are repeated to the fewest that do."""
    cases = [
        (name, heads, how, e)
        for name, heads in (("llama", K), ("llama, one key head", 1))
        for how in PASSES
        for e in (4, 2)
    ]
    runs = [
        make_run(
            folder_of(name, LAYERS), cp=cp, method="ulysses", rows=MICRO_BATCHES, recompute=how,
            precision={4: "fp32", 2: "bf16"}[e],
        )
        for name, _, how, e in cases
    ]  # fmt: skip
    steps = [without_documents()] * len(runs)
    for rank in run_distributed(sent_in_a_step, cp, runs=runs, steps=steps):
        for (_, heads, how, e), (sent, calls, _) in zip(cases, rank, strict=True):
            one_way = ulysses_bytes(cp, max(heads, cp), e, cp=cp)
            passes = LAYERS * MICRO_BATCHES * PASSES[how]
            assert sent == {("heads", "all_to_all"): passes * one_way}, (heads, how)
            assert calls == {("heads", "all_to_all"): 2 * passes}


def test_a_hybrid_sends_both_parts():
    """Heads within pairs of ranks; then, in the ring, half of the heads of twice as many tokens."""
    cases = [("llama", K), ("llama, one key head", 2)]
    runs = [
        make_run(folder_of(name, LAYERS), cp=4, method="hybrid", ulysses=2, rows=MICRO_BATCHES)
        for name, _ in cases
    ]
    steps = [without_documents()] * len(runs)
    for r, rank in enumerate(run_distributed(sent_in_a_step, 4, runs=runs, steps=steps)):
        for (_, heads), (sent, _, _) in zip(cases, rank, strict=True):
            times = LAYERS * MICRO_BATCHES
            kv = 2 * (S // 2) * (heads // 2) * D * 4 * times
            place = r // 2
            assert sent == {
                ("heads", "all_to_all"): 2 * times * ulysses_bytes(2, heads, cp=4),
                ("context", "send"): 2 * kv * (place + (1 - place) / 2),
                ("context gradients", "send"): kv * (1 - place + place / 2),
            }


def test_beside_tensor_parallelism_only_own_heads_travel():
    methods = [dict(method="ring"), dict(method="ring", exchange="all_gather")]
    cases = [(how, cut) for how in [*methods, dict(method="ulysses")] for cut in (False, True)]
    runs = [
        make_run(
            folder_of("llama", LAYERS), tp=2, cp=2, rows=MICRO_BATCHES, sequence_parallel=cut, **how
        )
        for how, cut in cases
    ]
    steps = [without_documents()] * len(runs)
    kv = 2 * (S // 2) * (K // 2) * D * 4 * LAYERS * MICRO_BATCHES
    for r, rank in enumerate(run_distributed(sent_in_a_step, 4, runs=runs, steps=steps)):
        for (how, cut), (sent, _, _) in zip(cases, rank, strict=True):
            mine = Counter()
            for (purpose, _), nbytes in sent.items():
                mine[purpose] += nbytes
            found = [mine[purpose] for purpose in ("context", "context gradients", "heads")]
            if how == dict(method="ulysses"):
                both_ways = 2 * LAYERS * MICRO_BATCHES * ulysses_bytes(2, 2 * 2, cp=2, tp=2)
                assert found == [0, 0, both_ways]
            elif "exchange" in how:
                assert found == [2 * kv, kv, 0]
            else:
                assert found == ([kv, kv, 0] if r < 2 else [2 * kv, kv // 2, 0])


PACKED = [
    (name, window, rows_of)
    for name in DOCUMENTS
    for window in (None, WINDOW)
    for rows_of in (1, 2)  # of a micro-batch
]


@pytest.mark.parametrize("cp", [2, 4])
def test_only_keys_that_are_seen_travel(cp):
    """Packed documents and a window, against a dense mask; the rows of a micro-batch together."""
    runs, steps, masks = [], [], []
    for name, window, count in PACKED:
        folder = folder_of("mistral" if window else "llama", LAYERS)
        runs.append(make_run(folder, cp=cp, rows=2, micro=count))
        lengths = DOCUMENTS[name]
        batches = [lengths] if count == 2 else [[row] for row in lengths]
        steps.append([packed(batch) for batch in batches])
        masks.append([mask_of(batch, window, causal=True) for batch in batches])
    less = 0
    for r, rank in enumerate(run_distributed(sent_in_a_step, cp, runs=runs, steps=steps)):
        for case, of_micro, (sent, _, spans) in zip(PACKED, masks, rank, strict=True):
            expected = Counter()
            for mask, cut in zip(of_micro, spans, strict=True):
                expected += ring_of(r, mask, cut, 2 * K * D * 4 * case[2] * LAYERS)
            found = Counter(
                keys=sent.get(("context", "send"), 0) // 2,
                gradients=sent.get(("context gradients", "send"), 0),
            )
            assert +found == expected, (case, r)
            less += expected["keys"] < 2 * K * D * 4 * 2 * LAYERS * (S // cp) * (cp - 1) / 4
    assert less >= cp  # else these cases would show little


def attended(cases, length, batch=1):
    """Attention itself, of random numbers on this rank. [(bytes of the forward pass, of the
    backward pass, numbers in the largest tensor that was made)]"""
    from ds4d import comm
    from ds4d.attention.context import Context
    from ds4d.attention.kernels import Call
    from ds4d.attention.ring import Gathered, Ring
    from ds4d.attention.visible import Visible
    from ds4d.mesh import Mesh

    out = []
    for run, causal, softcap in cases:
        mesh = Mesh.create(run.parallel, run.context)
        context = Context(
            mesh.cutter(samples(batch, length)).cut, mesh.context_parallel(run.context)
        )
        s = length // run.parallel.cp
        q, k, v, grad = (torch.randn(batch, heads, s, D) for heads in (H, K, K, H))
        call = Call(q, k, v, Visible(causal=causal), scale=0.3, softcap=softcap)
        make = Gathered if run.context.exchange == "all_gather" else Ring
        way = context.way(make, call, group=mesh.group("ring"))
        with comm.count_traffic() as forward, Largest() as largest:
            o, lse = way.compute(q, k, v)
        with comm.count_traffic() as backward, largest:
            way.backward(grad.transpose(1, 2), q, k, v, None, o, lse)
        sums = (forward.of("context"), backward.of("context"), backward.of("context gradients"))
        out.append((sums, largest.numbers))
    return out


@pytest.mark.parametrize("cp", [2, 4])
def test_without_causality_all_send_alike(cp):
    folder = folder_of("llama", LAYERS)
    runs = [make_run(folder, cp=cp, exchange=how) for how in ("p2p", "all_gather")]
    cases = [(run, False, None) for run in runs]
    kv = 2 * 2 * (S // cp) * K * D * 4
    for rank in run_distributed(attended, cp, cases=cases, length=S, batch=2):
        for sent, _ in rank:
            assert sent == ((cp - 1) * kv,) * 3


@pytest.mark.parametrize("cp", [2, 4])
def test_no_tensor_of_sequence_times_sequence_is_made(cp):
    """The largest is linear in the sequence, or, where a kernel holds scores, has as many as it may
    have whatever the length."""
    folder = folder_of("llama", LAYERS)
    cases = [
        (make_run(folder, cp=cp, exchange=how), True, softcap)
        for how in ("p2p", "all_gather")
        for softcap in (None, 5.0)
    ]
    by_length = []
    for length in (2048, 4096):
        ranks = run_distributed(attended, cp, cases=cases, length=length)
        by_length.append(
            [max(numbers) for numbers in zip(*([n for _, n in rank] for rank in ranks))]
        )
    for (run, _, softcap), short, long in zip(cases, *by_length, strict=True):
        whole = run.context.exchange == "all_gather"
        tokens = 4096 if whole else 4096 // cp
        if softcap is None:
            assert long == 2 * short, run.context
            assert long <= max(tokens * 2 * K * D, 4096 // cp * H * D)
        else:
            assert long <= visible.SCORES


def computed(runs, steps):
    """[(pairs of a query and a key that this rank computes in a forward pass, in a backward pass,
    how many calls of the kernel in both)], a run each; pairs of all heads together as one."""
    out = []
    for run, micro_batches in zip(runs, steps, strict=True):
        engine, mesh = make_engine(run)
        mine = [mesh.cutter(batch) for batch in micro_batches]
        found = Counter()

        def counted(kernel, name, at):
            def count(*args, **kwargs):
                query, key = args[at], args[at + 1]
                is_causal = args[{"forward": 4, "backward": 7}[name]]
                (batch, heads, q, _), k = query.shape, key.shape[2]
                found[name] += batch * heads * (q * (q + 1) // 2 if is_causal else q * k)
                found["calls"] += 1
                return kernel(*args, **kwargs)

            return count

        with (
            mock.patch.object(blockwise, "_flash", counted(blockwise._flash, "forward", 0)),
            mock.patch.object(
                blockwise, "_flash_backward", counted(blockwise._flash_backward, "backward", 1)
            ),
        ):
            engine.train_step(mine)
        scale = H * LAYERS
        out.append((found["forward"] / scale, found["backward"] / scale, found["calls"]))
    return out


@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("exchange", ["p2p", "all_gather"])
def test_ranks_share_half_of_the_square_evenly(cp, exchange):
    """To the pair: S (S + 1) / 2 of them, a cp-th part on each rank."""
    run = make_run(folder_of("llama", LAYERS), cp=cp, rows=MICRO_BATCHES, exchange=exchange)
    ranks = run_distributed(computed, cp, runs=[run], steps=[without_documents()])
    mine = MICRO_BATCHES * S * (S + 1) / 2 / cp
    assert [rank[0][:2] for rank in ranks] == [(mine, mine)] * cp


@pytest.mark.parametrize("cp", [2, 4])
def test_nothing_is_computed_between_documents_or_outside_of_a_window(cp):
    """Stretches of documents over visible.GROUP_TOKENS: what is computed is what is seen, to the
    pair. In a window it is no more than blocks of so many queries have at their borders; without
    it, it would be seven times as much."""
    window, length = WINDOW, 1024
    lengths = [(300, 350, 374)]
    folders = [folder_of("llama", LAYERS), folder_of("mistral", LAYERS)]
    runs = [
        make_run(folder, cp=cp, rows=1, exchange=exchange)
        for folder in folders
        for exchange in ("p2p", "all_gather")
    ]
    steps = [[packed(lengths)]] * 2 + [without_documents(length, 1)] * 2
    ranks = run_distributed(computed, cp, runs=runs, steps=steps)
    seen = int(mask_of(lengths, None, causal=True).sum())
    blocks_of_window = length * (visible.GROUP_TOKENS + window)
    for index in range(len(runs)):
        forward, backward = (sum(rank[index][i] for rank in ranks) for i in (0, 1))
        assert forward == backward
        if index < 2:
            assert forward == seen
        else:
            assert forward <= blocks_of_window < length**2 / 2 / 7


def test_activations_kept_for_a_layer_are_those_of_own_tokens():
    """formulas.md 2.2, "CP divides s by c"; the terms are those of test_tp_numbers.py. Ulysses has
    the output twice, for attention's own backward pass and for the product that follows, which
    needs it exchanged; and what key heads it has repeated. There is nothing beside."""
    per_token = 2 + 2 * K / H + H / E + 4 * F / E + 2 * (3 + 1 / E)
    layouts = [
        dict(cp=cp, **how)
        for cp in (1, 2, 4)
        for how in (
            dict(), dict(exchange="all_gather"), dict(method="ulysses"),
            dict(method="hybrid", ulysses=2),
        )
        if cp > 1 or not how
        if cp == 4 or "ulysses" not in how
    ]  # fmt: skip
    for cp in (1, 2, 4):
        these = [layout for layout in layouts if layout["cp"] == cp]
        runs = [make_run(folder_of("llama", LAYERS), **layout) for layout in these]
        for rank in run_distributed(saved_in_a_layer, cp, runs=runs, batch=samples(1, S)):
            for layout, kept in zip(these, rank, strict=True):
                repeated = cp if layout.get("method") == "ulysses" else K
                extra = 2 * (repeated - K) / H + ("method" in layout)
                expected = S // cp * E * 4 * (per_token + extra)
                assert kept == pytest.approx(expected, rel=1e-12), layout

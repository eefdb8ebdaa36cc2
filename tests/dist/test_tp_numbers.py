"""What tensor parallelism sends and keeps, counted and compared with the formulas; exact."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from tests.harness import run_distributed
from tests.measures import saved_in_a_layer
from tests.parity import SGD, make_engine, make_run
from tests.reference import rows, samples
from tests.tp_families import COMMON

# f and the kv heads so that every term of the formulas is another number
LAYERS, E, F, H, K, D = 3, 48, 56, 4, 2, 12
S, MICRO_BATCHES = 24, 4
N = S * E * 4  # bytes of one whole activation of a micro-batch of one row, in fp32


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    config = AutoConfig.for_model("llama", **{**COMMON, "num_hidden_layers": LAYERS})
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def traffic_of_a_step(runs, batch):
    """[{(purpose, collective): (bytes, calls)}] of this rank's first step, a run each."""
    from ds4d import comm

    out = []
    for run in runs:
        engine, _ = make_engine(run)
        micro_batches = [rows(batch, i, i + 1) for i in range(MICRO_BATCHES)]
        with comm.count_traffic() as traffic:
            engine.train_step(micro_batches)
        out.append({key: (traffic.sent[key], traffic.calls[key]) for key in traffic.sent})
    return out


# (sequence parallel, recompute) -> all-reduces, gathers and reduce-scatters of N in a layer, for a
# micro-batch. formulas.md 2.4: 8N(t-1)/t is four all-reduces; with the sequence cut 10N(t-1)/t is
# six gathers and four reduce-scatters. Full recomputation repeats what precedes the last product of
# a layer, so not its exit; and it gathers again what would else be gathered again for the weights'
# gradients. Selective recomputation keeps the exits.
IN_A_LAYER = {
    (False, "none"): (4, 0, 0),
    (True, "none"): (0, 6, 4),
    (False, "full"): (5, 0, 0),
    (True, "full"): (0, 6, 5),
    (False, "selective"): (4, 0, 0),
    (True, "selective"): (0, 6, 4),
}


@pytest.mark.parametrize("tp", [2, 4])
def test_bytes_on_the_wire_are_those_of_the_formulas(tp, folder):
    runs = [
        make_run(
            folder, tp=tp, sequence_parallel=cut, stage=1, optimizer=SGD, recompute=recompute
        )
        for cut, recompute in IN_A_LAYER
    ]
    batch = samples(MICRO_BATCHES, S)
    ranks = run_distributed(traffic_of_a_step, tp, runs=runs, batch=batch)
    ring = {"all_reduce": 2 * (tp - 1) / tp, "all_gather": (tp - 1) / tp}
    ring["reduce_scatter"] = ring["all_gather"]
    for rank in ranks:
        for (case, counts), sent in zip(IN_A_LAYER.items(), rank):
            cut, _ = case
            expected = {}
            for collective, count in zip(ring, counts):
                if count:
                    calls = count * LAYERS * MICRO_BATCHES
                    expected["block", collective] = (calls * N * ring[collective], calls)
            of_ends = ("reduce_scatter", "all_gather") if cut else ("all_reduce",)
            for end in ("embedding", "head"):
                for collective in of_ends:
                    calls = MICRO_BATCHES
                    expected[end, collective] = (calls * N * ring[collective], calls)
            # three numbers of four bytes for each token, in a maximum and a sum
            loss = MICRO_BATCHES * 3 * 4 * S * ring["all_reduce"]
            expected["loss", "all_reduce"] = (loss, 2 * MICRO_BATCHES)
            if cut:  # all norms, once a step
                norms = (2 * LAYERS + 1) * E * 4 * ring["all_reduce"]
                expected["replicated gradients", "all_reduce"] = (norms, 1)
            if tp > K:  # each rank's share of the rows of k and v, put together and chosen from
                width = MICRO_BATCHES * LAYERS * 2 * S * K * D * 4
                again = 2 if case[1] == "full" else 1
                calls = MICRO_BATCHES * LAYERS * 2
                expected["key/value heads", "all_gather"] = (
                    again * width * ring["all_gather"], again * calls
                )  # fmt: skip
                expected["key/value heads", "reduce_scatter"] = (
                    width * ring["reduce_scatter"], calls
                )  # fmt: skip
            assert sent == expected, case


def test_activations_kept_for_a_layer(folder):
    """formulas.md 2.2 for fp32 and a fused kernel, in units of N. Cut by heads and features: query
    and output (2), key and value (2 K / H), the kernel's log-sum-exp (H / E), and of the MLP gate,
    its activation, up and their product (4 F / E). Cut along the sequence, or else whole: for each
    of two blocks the residual, the normalised input, what enters the block, and one factor a token
    (3 + 1 / E)."""
    layouts = [(1, False), (2, False), (2, True)]
    by_heads = 2 + 2 * K / H + H / E + 4 * F / E
    outside = 2 * (3 + 1 / E)
    for tp, cut in layouts:
        run = make_run(folder, tp=tp, sequence_parallel=cut, stage=1, optimizer=SGD)
        expected = N * (by_heads / tp + outside / (tp if cut else 1))
        for (kept,) in run_distributed(saved_in_a_layer, tp, runs=[run], batch=samples(1, S)):
            assert kept == pytest.approx(expected, rel=1e-12), (tp, cut)

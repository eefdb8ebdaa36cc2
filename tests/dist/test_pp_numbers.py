"""What a pipeline holds and sends, counted in real steps and compared with what its schedule and
the formulas promise; exact."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ds4d.pipeline.engine import SPLIT_BACKWARD
from ds4d.pipeline.schedules import make_schedule
from ds4d.pipeline.simulate import simulate
from tests.dist.test_pp_edges import steps_of
from tests.dist.test_pp_parity import SCHEDULES, with_schedule
from tests.harness import run_distributed
from tests.parity import folder_of, make_engine, make_run

LAYERS, E, F, V = 8, 48, 56, 101
MICRO_BATCHES, S = 8, 24
N = S * E * 4  # bytes of a hidden state of a micro-batch of one row, in fp32
VEES = ("dualpipev", "zbv")


class Watch:
    """In place of a recorder: after each pass, what a rank holds.

    Attributes:
        held: micro-batches in chunks, between forward and backward; with those whose weight half is
            still to come.
        saved: bytes of what autograd has saved and that are still in memory.
        sent: tensors that were sent and are still in memory.
    """

    def __init__(self, model, send) -> None:
        self._send = send  # the real one
        self.held, self.saved, self.sent = [], [], []
        self._parameters = {p.untyped_storage()._cdata for p in model.parameters()}
        self._saved: dict[int, tuple[StorageWeakRef, int]] = {}
        self._sent: list[StorageWeakRef] = []

    def keep(self, tensor):
        storage = tensor.untyped_storage()
        is_made = tensor.is_floating_point() and tensor.dim()  # not ids, not the loss's factor
        if is_made and storage._cdata not in self._parameters:
            self._saved[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return tensor.detach()

    def send(self, to, x, mesh, **kwargs):
        self._sent.append(StorageWeakRef(x.untyped_storage()))
        return self._send(to, x, mesh, **kwargs)

    def begin(self, schedule) -> None:
        pass

    def arrived(self) -> None:
        pass

    @contextmanager
    def running(self, _action):
        yield
        run = self.run
        self.held.append((len(run._held), len(run._held.keys() | run._deferred.keys())))
        self._saved = {k: pair for k, pair in self._saved.items() if not pair[0].expired()}
        self.saved.append(sum(nbytes for _, nbytes in self._saved.values()))
        self.sent.append(sum(not each.expired() for each in self._sent))


def watched(runs, micro_batches):
    """Of each run, what was watched in its second step."""
    from ds4d.pipeline import engine as engines
    from ds4d.pipeline import p2p

    out = []
    for run in runs:
        engine, _ = make_engine(run)
        engine.train_step(micro_batches)
        watch = Watch(engine.module, p2p.begin_send_to)

        class Run(engines._Run):
            def __init__(self, *args) -> None:
                super().__init__(*args)
                watch.run = self

        with (
            mock.patch.object(engines, "_Run", Run),
            mock.patch.object(p2p, "begin_send_to", watch.send),
            torch.autograd.graph.saved_tensors_hooks(watch.keep, lambda tensor: tensor),
        ):
            engine.train_step(micro_batches, recorder=watch)
        out.append((watch.held, watch.saved, watch.sent))
    return out


def promised(schedule: str, p: int, r: int, v: int, m: int) -> int:
    """formulas.md 2.2, "in flight": chunks whose activations rank r holds at most."""
    return {
        "gpipe": m,
        "1f1b": min(m, p - r),
        "interleaved": min(m * v, 2 * (p - r - 1) + (v - 1) * p + 1),
        "dualpipev": 2 * p + 1,
        "zb-h1": min(m, p - r),  # whole; until the weight half: p
        "zbv": 2 * p,
    }[schedule]


@pytest.mark.parametrize("p", [2, 4])
def test_activations_in_flight(p):
    """What is saved after each pass is that of the micro-batches in flight, to the byte; of these
    there are as many as the formulas say; and what was sent is gone."""
    runs = [
        make_run(folder_of("llama", LAYERS), rows=MICRO_BATCHES, **with_schedule(name, pp=p))
        for name in SCHEDULES
    ]
    (micro_batches,) = steps_of([(1, S)] * MICRO_BATCHES)
    ranks = run_distributed(watched, p, runs=runs, micro_batches=micro_batches)
    for index, (name, options) in enumerate(SCHEDULES.items()):
        v = options.get("chunks", 1)
        schedule = make_schedule(name, ranks=p, chunks=v, micro_batches=MICRO_BATCHES)
        simulation = simulate(schedule)
        for r, watches in enumerate(ranks):
            held, saved, sent = watches[index]
            case = name, r
            whole, begun = (max(counts) for counts in zip(*held, strict=True))
            assert whole == simulation.held_until_input[r], case
            assert begun == simulation.held_until_weight[r], case
            assert whole == promised(name, p, r, v, MICRO_BATCHES), case
            assert begun == (p if name == "zb-h1" else whole), case
            assert not any(sent), case
            # of a chunk after this kind of pass
            size = {(chunk, kind): 0 for chunk in range(v) for kind in ("B", "W")}
            of: dict[tuple[int, int], int] = {}
            for (kind, chunk, i), now in zip(schedule.actions[r], saved, strict=True):
                others = sum(of.values()) - of.pop((chunk, i), 0)
                of[chunk, i] = size.setdefault((chunk, kind), now - others)
                assert now == others + of[chunk, i], (case, kind, chunk, i)
            assert all(0 < size[chunk, "F"] for chunk in range(v)), case
            if name in SPLIT_BACKWARD:  # of a layer, into q, k and v, o, gate and up, down
                inputs = LAYERS // (p * v) * S * (3 * E + F) * 4
                assert all(size[chunk, "I"] == inputs for chunk in range(v)), case


def traffic_of_a_step(runs, micro_batches):
    """[{(purpose, collective): (bytes, calls)}] of this rank's first step, a run each."""
    from ds4d import comm

    out = []
    for run in runs:
        engine, _ = make_engine(run)
        with comm.count_traffic() as traffic:
            engine.train_step(micro_batches)
        out.append({key: (traffic.sent[key], traffic.calls[key]) for key in traffic.sent})
    return out


@pytest.mark.parametrize("p", [2, 4])
def test_bytes_between_stages(p):
    """formulas.md 2.4: N each way at each boundary, for each micro-batch; interleaved has v times
    as many stages, a vee twice, of which two are on one rank. And the tied weight, once."""
    (micro_batches,) = steps_of([(2, S)] * MICRO_BATCHES)
    n, tied = 2 * N, V * E * 4
    options = dict(rows=2 * MICRO_BATCHES, micro=2, pp=p)
    cases = [(name, how) for name in SCHEDULES for how in ("none", "full", "selective")]
    runs = [
        make_run(folder_of("llama tied", LAYERS), recompute=how, **options, **with_schedule(s))
        for s, how in cases
    ]
    ranks = run_distributed(traffic_of_a_step, p, runs=runs, micro_batches=micro_batches)
    for r, rank in enumerate(ranks):
        inner = 0 < r < p - 1
        for case, sent in zip(cases, rank, strict=True):
            boundaries = {  # times directions in which this rank sends
                "interleaved": 4 if inner else 3,
                **dict.fromkeys(VEES, 4 if inner else 2),
            }.get(case[0], 2 if inner else 1)
            calls = boundaries * MICRO_BATCHES
            expected = {("pipeline", "send"): (calls * n, calls)}
            if case[0] not in VEES and not inner:
                expected["tied weights", "all_reduce"] = (tied, 1)  # a ring of two: 2 (t - 1) / t
            assert sent == expected, (case, r)


def test_bytes_beside_tensor_parallelism():
    """A shard each way where the sequence is cut. What tp ranks exchange, stages together, is what
    they do without a pipeline, with recomputation too."""
    (micro_batches,) = steps_of([(1, S)] * MICRO_BATCHES)
    cases = [(cut, how) for cut in (False, True) for how in ("none", "full", "selective")]
    found = []
    for options in (dict(), with_schedule("1f1b", pp=2), with_schedule("dualpipev", pp=2)):
        runs = [
            make_run(
                folder_of("llama tied", LAYERS), tp=2, sequence_parallel=cut, recompute=how,
                rows=MICRO_BATCHES, **options,
            )
            for cut, how in cases
        ]  # fmt: skip
        ranks = run_distributed(
            traffic_of_a_step, 2 * runs[0].parallel.pp, runs=runs, micro_batches=micro_batches
        )
        found.append(list(zip(*ranks[::2], strict=True)))  # the first tp rank of each stage
    for (cut, how), alone, two, vee in zip(cases, *found, strict=True):
        (alone,) = alone
        for stages, boundaries in ((two, 1), (vee, 2)):
            sent = Counter()
            for stage in stages:
                hidden, calls = stage.pop(("pipeline", "send"))
                assert calls == boundaries * MICRO_BATCHES, (cut, how)
                assert hidden == calls * (N // 2 if cut else N), (cut, how)
                tied = stage.pop(("tied weights", "all_reduce"), None)
                assert tied == ((V + 1) // 2 * E * 4, 1) if stages is two else tied is None
                sent.update({key: nbytes for key, (nbytes, _) in stage.items()})
            assert sent == {key: nbytes for key, (nbytes, _) in alone.items()}, (cut, how)

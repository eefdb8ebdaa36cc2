"""A step as measured on real ranks: what a recorder says of every schedule."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch

from ds4d.pipeline.actions import Action, Kind
from ds4d.pipeline.schedules import make_schedule
from tests.harness import run_distributed
from tests.parity import batches, folder_of, make_engine, make_run, share_of

SCHEDULES = {"1f1b": 1, "interleaved": 2, "zb-h1": 1, "dualpipev": 2, "zbv": 2}
SLOW_SECONDS = 0.03  # a layer of the first rank


def record(runs, batches):
    """Every run in turn; what this rank has of the step that it measures, its second."""
    from ds4d.pipeline.recorder import Recorder
    from ds4d.pipeline.stage import StandIn

    found = []
    for run in runs:
        engine, mesh = make_engine(run)
        first, second, *_ = (share_of(batch, run, mesh) for batch in batches[run.batch.train])
        if mesh.coordinate.pp == 0:
            for layer in engine.module.model.layers:
                if not isinstance(layer, StandIn):
                    layer.register_forward_pre_hook(lambda *_: time.sleep(SLOW_SECONDS))
        engine.train_step(first)
        recorder = Recorder.on(torch.device("cpu"), mesh.group("pp"))
        engine.train_step(second, recorder=recorder)
        found.append(recorder.measured())
    return found


def check(run, measured) -> None:
    parallel, pipeline = run.parallel, run.pipeline
    schedule = make_schedule(
        pipeline.schedule, ranks=parallel.pp, chunks=pipeline.chunks,
        micro_batches=run.batch.accumulation,
    )  # fmt: skip
    timeline, simulated = measured
    for rank, lane in enumerate(timeline.lanes):
        assert tuple(span.action for span in lane) == schedule.actions[rank]
        assert all(span.start < span.end for span in lane)
        assert all(before.end <= after.start for before, after in pairwise(lane))
    assert simulated.busy == pytest.approx(timeline.busy)
    _check_waits_are_idle(schedule, timeline)


def _check_waits_are_idle(schedule, timeline) -> None:
    """The ranks after the slow one start when it is through, and so are not busy meanwhile."""
    places, followed = schedule.placement.places, 0
    started = [{span.action: span.start for span in lane} for lane in timeline.lanes]
    for (rank, chunk), (other, next_chunk) in pairwise(places):
        if rank != 0 or other == 0:
            continue
        for i in range(schedule.micro_batches):
            given = started[rank][Action(Kind.FORWARD, chunk, i)]
            taken = started[other][Action(Kind.FORWARD, next_chunk, i)]
            assert taken >= given + SLOW_SECONDS
            followed += 1
    assert followed >= schedule.micro_batches


@pytest.mark.parametrize("pp, dp", [(2, 1), (4, 1), (2, 2)])
def test_every_pass_once_in_order_and_waits_are_idle(pp, dp):
    folder = folder_of("llama", 8)
    runs = [
        make_run(folder, pp=pp, dp=dp, rows=8 * dp, schedule=schedule, chunks=chunks)
        for schedule, chunks in SCHEDULES.items()
    ]
    ranks = run_distributed(record, pp * dp, timeout=300, runs=runs, batches=batches(8 * dp))
    for index, run in enumerate(runs):
        of_run = [rank[index] for rank in ranks]
        assert all(measured is None for measured in of_run[dp:])  # none but the first pp rank
        for measured in of_run[:dp]:
            check(run, measured)

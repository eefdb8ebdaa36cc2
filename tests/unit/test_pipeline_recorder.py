"""When passes ran, by clocks that the tests set."""

from __future__ import annotations

import pytest

from ds4d.pipeline import recorder
from ds4d.pipeline.actions import Action, Kind, Span
from ds4d.pipeline.recorder import OFF, Lane, Recorder, mean_costs, measured
from ds4d.pipeline.schedules import make_schedule
from ds4d.pipeline.simulate import Costs, simulate

F, B = Kind.FORWARD, Kind.BACKWARD


class FakeClock:
    """A mark is what the clock showed, and seconds are known of it only later."""

    def __init__(self) -> None:
        self.now = 0.0

    def start(self) -> float:
        return self.now

    def mark(self) -> list[float]:
        return [self.now]

    def seconds(self, mark: list[float]) -> float:
        return mark[0]


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(recorder.dist, "barrier", lambda group: None)
    return FakeClock()


def test_a_pass_begins_when_what_it_waited_for_is_there(clock):
    mine = Recorder(None, clock)
    clock.now = 10.0
    mine.begin(make_schedule("1f1b", ranks=2, chunks=1, micro_batches=1))
    with mine.running(Action(F, 0, 0)):
        clock.now = 12.0
        mine.arrived()
        clock.now = 13.0
    clock.now = 13.5
    with mine.running(Action(B, 0, 0)):
        clock.now = 15.0
    lane = mine.lane()
    assert lane.start == 10.0
    assert lane.spans == [Span(Action(F, 0, 0), 12.0, 13.0), Span(Action(B, 0, 0), 13.5, 15.0)]


def test_nothing_is_recorded_when_off():
    OFF.begin(make_schedule("1f1b", ranks=2, chunks=1, micro_batches=1))
    with OFF.running(Action(F, 0, 0)):
        OFF.arrived()
    assert OFF.measured() is None


def moved(spans, by: float) -> list[Span]:
    return [Span(action, start + by, end + by) for action, start, end in spans]


COSTS = {
    "1f1b": Costs((1.0, 2.0), (3.0, 5.0), (0.0, 0.0)),  # what a full backward costs is in one
    "zb-h1": Costs((1.0, 2.0), (1.5, 2.5), (0.5, 1.0)),
    "interleaved": Costs((1.0, 2.0, 1.0, 2.0), (3.0, 5.0, 2.0, 2.0), (0.0,) * 4),
    "dualpipev": Costs((1.0, 2.0, 1.0, 2.0), (3.0, 5.0, 2.0, 2.0), (0.0,) * 4),
    "zbv": Costs((1.0, 2.0, 1.0, 2.0), (1.5, 2.5, 1.0, 2.0), (0.5, 1.0, 1.5, 0.5)),
}


@pytest.mark.parametrize("name", COSTS)
def test_measured_is_simulated_where_a_machine_does_as_the_simulator(name):
    """The second rank on another host, whose clock was started at another time; then on the same
    host, and late in leaving the barrier."""
    costs = COSTS[name]
    chunks = len(costs.forward) // 2
    schedule = make_schedule(name, ranks=2, chunks=chunks, micro_batches=4)
    ideal = simulate(schedule, costs).timeline
    lanes = [Lane("a", 100.0, moved(ideal.lanes[0], 100.0))]
    for clock, offset, late in [("b", 7.0, 0.0), ("a", 100.0, 0.25)]:
        both = [*lanes, Lane(clock, offset + late, moved(ideal.lanes[1], offset))]
        timeline, again = measured(schedule, both)
        assert timeline.lanes == ideal.lanes and again.lanes == ideal.lanes
        assert timeline.unit == "seconds" and timeline.title == ideal.title


def test_costs_are_means():
    schedule = make_schedule("1f1b", ranks=1, chunks=1, micro_batches=2)
    order = [Action(F, 0, 0), Action(B, 0, 0), Action(F, 0, 1), Action(B, 0, 1)]
    lane = [Span(a, 10.0 * i, 10.0 * i + i + 1) for i, a in enumerate(order)]
    assert mean_costs(schedule, [lane]) == Costs((2.0,), (3.0,), (0,))


def test_marks_in_a_stream_are_seconds_of_the_host(monkeypatch):
    """A device's events are told apart in milliseconds, on a clock of their own."""

    class Event:
        at = 5000.0

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.recorded = Event.at

        def synchronize(self) -> None:
            pass

        def elapsed_time(self, later: Event) -> float:
            return later.recorded - self.recorded

    monkeypatch.setattr(recorder.torch.cuda, "Event", Event)
    monkeypatch.setattr(recorder.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(recorder.time, "perf_counter", lambda: 70.0)
    clock = recorder.StreamClock()
    assert clock.start() == 70.0
    Event.at += 250.0
    assert clock.seconds(clock.mark()) == 70.25

"""When the passes of one step really ran, beside what the simulator makes of their mean costs.

A pass lasts from when it has what it needs to its end, gradients accumulated. So the time in which
a rank waits for a message is between its passes, and idle; what tensor parallel ranks exchange
within a pass is the pass's own, and its sends wait for nobody. What happens:

1. before the first pass the ranks of the pipeline meet at a barrier and read their hosts' clocks;
2. around each pass they set marks. Nothing is communicated and nothing waits for a device: on a
   GPU a mark is an event in the stream;
3. after the step the marks become seconds and are gathered on the pipeline's first rank.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ds4d.pipeline.actions import Action, Kind, Schedule, Span
from ds4d.pipeline.simulate import Costs, simulate
from ds4d.pipeline.timeline import Timeline

# A Linux clock counts from the boot: ranks that read the same id read the same clock.
BOOT = Path("/proc/sys/kernel/random/boot_id")


class Measured(NamedTuple):
    """A step of a pipeline as it ran and, from the same mean costs of the passes, as its schedule
    runs where all that is sent is hidden. In seconds."""

    timeline: Timeline
    simulated: Timeline


# -- clocks -----------------------------------------------------------------------------------


class Clock(Protocol):
    def start(self) -> float:
        """Seconds by the host's clock; marks come later."""

    def mark(self) -> Any:
        """Now, where the passes run."""

    def seconds(self, mark: Any) -> float:
        """The host's clock at a mark. Waits until the mark has been passed."""


class HostClock:
    """Of passes that run as the program does."""

    start = mark = staticmethod(time.perf_counter)

    def seconds(self, mark: float) -> float:
        return mark


class StreamClock:
    """Of passes in the current CUDA stream."""

    def start(self) -> float:
        torch.cuda.synchronize()  # so that the stream passes the mark as it is set
        self._start, self._started = self.mark(), time.perf_counter()
        return self._started

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, mark: torch.cuda.Event) -> float:
        mark.synchronize()
        return self._started + self._start.elapsed_time(mark) / 1e3


# -- a rank's recorder ------------------------------------------------------------------------


class Lane(NamedTuple):
    """What a rank has recorded.

    Attributes:
        clock: whose: ranks with the same one share its zero.
        start: when the rank had left the barrier.
        spans: in seconds of that clock.
    """

    clock: str
    start: float
    spans: list[Span]


class Recorder:
    """Of one step on one rank.

    Args:
        group: the pipeline's ranks.
    """

    def __init__(self, group: dist.ProcessGroup, clock: Clock) -> None:
        self._group, self._clock = group, clock
        self._marks: list[tuple[Action, Any, Any]] = []

    @classmethod
    def on(cls, device: torch.device, group: dist.ProcessGroup) -> Recorder:
        return cls(group, StreamClock() if device.type == "cuda" else HostClock())

    def begin(self, schedule: Schedule) -> None:
        """Before the first pass. Collective: the pipeline's ranks."""
        self._schedule = schedule
        dist.barrier(self._group)
        self._start = self._clock.start()

    @contextmanager
    def running(self, action: Action) -> Iterator[None]:
        """Around a pass."""
        self._since = self._clock.mark()
        yield
        self._marks.append((action, self._since, self._clock.mark()))

    def arrived(self) -> None:
        """What the pass has waited for is there: it begins now."""
        self._since = self._clock.mark()

    def lane(self) -> Lane:
        seconds = self._clock.seconds
        spans = [Span(action, seconds(start), seconds(end)) for action, start, end in self._marks]
        return Lane(BOOT.read_text(), self._start, spans)

    def measured(self) -> Measured | None:
        """After the step, on the pipeline's first rank; None on the others. Collective: the
        pipeline's ranks."""
        lanes = [None] * self._group.size() if self._group.rank() == 0 else None
        dist.gather_object(self.lane(), lanes, group=self._group, group_dst=0)
        return None if lanes is None else measured(self._schedule, lanes)


class _Off(Recorder):
    """Of a step that nobody looks at."""

    def __init__(self) -> None:
        self._nothing = nullcontext()

    def begin(self, schedule: Schedule) -> None:
        pass

    def running(self, action: Action) -> AbstractContextManager[None]:
        return self._nothing

    def arrived(self) -> None:
        pass

    def measured(self) -> None:
        return None


OFF = _Off()


# -- all ranks' together ----------------------------------------------------------------------


def measured(schedule: Schedule, lanes: Sequence[Lane]) -> Measured:
    """Args:
    lanes: of each rank of the pipeline.
    """
    spans = on_one_clock(lanes)
    simulated = simulate(schedule, mean_costs(schedule, spans)).timeline
    return Measured(replace(simulated, lanes=spans), simulated)


def on_one_clock(lanes: Sequence[Lane]) -> tuple[tuple[Span, ...], ...]:
    """In seconds since the ranks left the barrier together, which differs among the ranks of one
    clock by what the barrier took, and so is taken of the first of them."""
    zeros: dict[str, float] = {}
    moved = []
    for lane in lanes:
        zero = zeros.setdefault(lane.clock, lane.start)
        moved.append(tuple(Span(a, start - zero, end - zero) for a, start, end in lane.spans))
    return tuple(moved)


def mean_costs(schedule: Schedule, lanes: Sequence[Sequence[Span]]) -> Costs:
    """Of the passes of each virtual stage, in seconds. What cannot be told apart in a full backward
    is counted as its input half."""
    durations: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for rank, lane in enumerate(lanes):
        for action, start, end in lane:
            stage = schedule.placement.stage_of(rank, action.chunk)
            durations[action.kind, stage].append(end - start)

    def of(*kinds: Kind) -> tuple[float, ...]:
        stages = range(schedule.placement.stages)
        return tuple(
            sum(fmean(durations[kind, stage]) for kind in kinds if (kind, stage) in durations)
            for stage in stages
        )

    return Costs(of(Kind.FORWARD), of(Kind.BACKWARD, Kind.INPUT), of(Kind.WEIGHT))

"""When each pass of a step ran on each pipeline rank, simulated or measured alike."""

from __future__ import annotations

from dataclasses import dataclass

from ds4d.pipeline.actions import Span


@dataclass(frozen=True)
class Timeline:
    """Attributes:
    title: what ran.
    lanes: of each rank, its passes in the order of time; they do not overlap.
    """

    title: str
    lanes: tuple[tuple[Span, ...], ...]

    @property
    def start(self) -> float:
        return min((lane[0].start for lane in self.lanes if lane), default=0.0)

    @property
    def end(self) -> float:
        return max((lane[-1].end for lane in self.lanes if lane), default=0.0)

    @property
    def seconds(self) -> float:
        """From the first pass on any rank to the end of the last."""
        return self.end - self.start

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Of each rank."""
        return tuple(sum(span.end - span.start for span in lane) for lane in self.lanes)

    @property
    def idle_seconds(self) -> tuple[float, ...]:
        """Of each rank, between the start and the end of the whole."""
        return tuple(self.seconds - busy for busy in self.busy_seconds)

    @property
    def bubble(self) -> float:
        """The fraction of all ranks' time that is idle."""
        whole = self.seconds * len(self.lanes)
        return sum(self.idle_seconds) / whole if whole else 0.0

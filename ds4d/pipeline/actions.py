"""What a pipeline rank does, one step at a time, and where the virtual stages are: the words that
schedules, simulator, engine and timeline share.

Letters: p ranks of the pipeline, v chunks on each, m micro-batches. The p * v *virtual stages* are
the consecutive pieces of the model; a rank's pieces are its chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple


class Kind(StrEnum):
    FORWARD = "F"
    BACKWARD = "B"  # of inputs and weights together
    INPUT = "I"  # backward of inputs alone ...
    WEIGHT = "W"  # ... and of weights alone, later


class Action(NamedTuple):
    """A pass of one micro-batch through one chunk of a rank. ``str`` gives "F0.3": chunk 0,
    micro-batch 3."""

    kind: Kind
    chunk: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.chunk}.{self.micro_batch}"


class Span(NamedTuple):
    """An action and when it ran, in seconds from any zero that all ranks share."""

    action: Action
    start: float
    end: float


class Place(NamedTuple):
    rank: int
    chunk: int


@dataclass(frozen=True)
class Placement:
    """Attributes:
    places: of each virtual stage, in the order of the model.
    ranks: p.
    """

    places: tuple[Place, ...]
    ranks: int

    @classmethod
    def loop(cls, ranks: int, chunks: int) -> "Placement":
        """Chunk j of rank r is virtual stage j * p + r."""
        return cls(tuple(Place(s % ranks, s // ranks) for s in range(ranks * chunks)), ranks)

    @classmethod
    def vee(cls, ranks: int) -> "Placement":
        """Down and up again: rank r has virtual stages r and 2p - 1 - r."""
        down = [Place(rank, 0) for rank in range(ranks)]
        return cls((*down, *(Place(rank, 1) for rank in reversed(range(ranks)))), ranks)

    @property
    def stages(self) -> int:
        """Virtual stages: p * v."""
        return len(self.places)

    @property
    def chunks(self) -> int:
        return self.stages // self.ranks

    def stage_of(self, rank: int, chunk: int) -> int:
        """The virtual stage at a place."""
        return self._stages[rank, chunk]

    def of_rank(self, rank: int) -> Iterator[int]:
        """A rank's virtual stages, by chunk."""
        return (self.stage_of(rank, chunk) for chunk in range(self.chunks))

    @cached_property
    def _stages(self) -> dict[tuple[int, int], int]:
        return {place: stage for stage, place in enumerate(self.places)}


@dataclass(frozen=True)
class Schedule:
    """Attributes:
    name: as in the file.
    placement: where the virtual stages are.
    micro_batches: m.
    actions: of each rank, in its order.
    """

    name: str
    placement: Placement
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]

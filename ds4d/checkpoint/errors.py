"""One error for all ranks: a step that fails on one rank fails everywhere, alike and at once."""

from __future__ import annotations

import traceback
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Callable, Iterator, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, found, read or exported; the message is for people."""


class WrongPath(CheckpointError):
    """The path that was given is not what the command needs."""


@dataclass(frozen=True)
class Failure:
    """What went wrong on one rank, as plain values, so that it travels to the others."""

    rank: int
    text: str
    errno: int | None

    @classmethod
    def of(cls, rank: int, error: BaseException) -> "Failure":
        if isinstance(error, OSError):
            place = f": {error.filename}" if error.filename else ""
            return cls(rank, f"{error.strerror or error}{place}", error.errno)
        if isinstance(error, (CheckpointError, ValueError)):
            return cls(rank, str(error), None)
        # a fault of ours: whoever reads this needs the lines
        return cls(rank, "".join(traceback.format_exception(error)), None)


class RanksFailed(Exception):
    """Raised on every rank with the same failures, ordered by rank."""

    def __init__(self, failures: list[Failure]) -> None:
        super().__init__(failures)
        self.failures = failures

    def __str__(self) -> str:
        first, others = self.failures[0], len(self.failures) - 1
        more = f" and {others} more" if others else ""
        return f"{first.text.rstrip()} (rank {first.rank}{more})"


def gather(do: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> list[T]:
    """Call ``do`` on every rank and return every rank's result, by rank.

    Without ``torch.distributed`` there is one rank.

    Raises:
        RanksFailed: on all ranks, when ``do`` raised on any.
    Collective: ``group``.
    """
    distributed = dist.is_initialized()
    try:
        outcome: T | Failure = do()
    except Exception as error:
        outcome = Failure.of(dist.get_rank(group) if distributed else 0, error)
    outcomes = [outcome]
    if distributed:
        outcomes = [None] * dist.get_world_size(group)
        dist.all_gather_object(outcomes, outcome, group=group)
    failures = [each for each in outcomes if isinstance(each, Failure)]
    if failures:
        raise RanksFailed(failures)
    return outcomes


def together(do: Callable[[], T], *, group: dist.ProcessGroup | None = None) -> T:
    """Like ``gather``, but each rank gets its own result, and only failures travel."""
    results: list[T] = []
    gather(lambda: results.append(do()), group=group)
    return results[0]


@contextmanager
def dcp_failures() -> Iterator[None]:
    """Turn what torch.distributed.checkpoint raises, on all ranks, into ``RanksFailed``."""
    try:
        yield
    except CheckpointException as error:
        ranks = sorted(error.failures.items())
        raise RanksFailed([Failure.of(rank, pair[0]) for rank, pair in ranks]) from None

"""Runs a schedule on paper: when each pass starts and ends, and how many activations are held.

A rank makes its passes in its order, one at a time. A forward starts when the forward of the stage
before has arrived, a backward (or its input half) when that of the stage after has; a transfer
takes time, but no rank's. That is a pipeline whose communication is hidden; ranks that wait in
their sends are slower.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds4d.pipeline.actions import Action, Kind, Schedule, Span
from ds4d.pipeline.timeline import Timeline

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT
# passes made of a micro-batch in a chunk -> those that may come next
DUE = {"": (F,), "F": (B, I), "FI": (W,)}
# kind -> where, in virtual stages from its own, the pass is made that it waits for
SOURCE = {F: -1, B: 1, I: 1, W: 0}
SHOWN = 8  # waiting ranks in a message


class ScheduleError(RuntimeError):
    """No pipeline can run this schedule; the message says which passes stand in the way."""


@dataclass(frozen=True)
class Costs:
    """Time of the passes of one micro-batch, by virtual stage. A full backward takes ``input +
    weight``."""

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    unit: str = "seconds"

    @classmethod
    def equal(
        cls, stages: int, *, forward: float = 1.0, input: float = 1.0, weight: float = 1.0
    ) -> Costs:
        """By default a forward is the unit, and each half of a backward costs as much."""
        times = (forward, input, weight)
        return cls(*((time,) * stages for time in times), unit="forward passes of a stage")

    def by_kind(self) -> dict[Kind, tuple[float, ...]]:
        whole = tuple(map(sum, zip(self.input, self.weight, strict=True)))
        return {F: self.forward, B: whole, I: self.input, W: self.weight}


@dataclass(frozen=True)
class Simulation:
    """Attributes:
    timeline: from 0, in the unit of the costs.
    held_until_input: of each rank, the most activations that it holds at once, if each is freed
        after the full backward or its input half. One is what a forward of one micro-batch through
        one chunk leaves for its backward. Meant for training: evaluation frees none.
    held_until_weight: the same, if each is freed after the weight half. What is needed for weights
        alone (the inputs of matrices) is held so long, so split backwards are between the two.
    """

    timeline: Timeline
    held_until_input: tuple[int, ...]
    held_until_weight: tuple[int, ...]


def simulate(
    schedule: Schedule, costs: Costs | None = None, *, transfer: float = 0.0
) -> Simulation:
    """Args:
        costs: default: ``Costs.equal``.
        transfer: time from the end of a pass to the start of one that needs it on another rank.

    Raises:
        ScheduleError: a pass is missing, there twice, in the wrong order, or never has what it
            needs.
    """
    _check_passes(schedule)
    costs = costs or Costs.equal(schedule.placement.stages)
    lanes = tuple(map(tuple, _run(schedule, costs, transfer)))
    shape = f"{schedule.placement.ranks} ranks, {schedule.micro_batches} micro-batches"
    return Simulation(
        Timeline(f"{schedule.name}, {shape}", lanes, costs.unit),
        tuple(_most_held(order, freed_by=(B, I)) for order in schedule.actions),
        tuple(_most_held(order, freed_by=(B, W)) for order in schedule.actions),
    )


def _run(schedule: Schedule, costs: Costs, transfer: float) -> list[list[Span]]:
    """Takes a rank as far as it gets, then one that waited for a pass it made: no search, so the
    time is in proportion to the passes."""
    placement, orders, cost = schedule.placement, schedule.actions, costs.by_kind()
    lanes: list[list[Span]] = [[] for _ in orders]
    # (source, stage, micro-batch), with source as in SOURCE: forwards and gradients apart
    ended: dict[tuple[int, int, int], float] = {}
    waiting: dict[tuple[int, int, int], int] = {}  # ... -> the rank that waits for it
    can_go_on = list(range(placement.ranks))
    while can_go_on:
        rank = can_go_on.pop()
        order, lane = orders[rank], lanes[rank]
        now = lane[-1].end if lane else 0.0
        while len(lane) < len(order):
            action = order[len(lane)]
            stage = placement.stage_of(rank, action.chunk)
            source = SOURCE[action.kind]
            if source and 0 <= stage + source < placement.stages:
                needed = (source, stage + source, action.micro_batch)
                if needed not in ended:
                    waiting[needed] = rank
                    break
                elsewhere = placement.places[stage + source].rank != rank
                now = max(now, ended[needed] + transfer * elsewhere)
            lane.append(Span(action, now, now := now + cost[action.kind][stage]))
            if source:
                made = (source, stage, action.micro_batch)
                ended[made] = now
                if made in waiting:
                    can_go_on.append(waiting.pop(made))
    if waiting:
        raise ScheduleError(_deadlock(waiting, schedule, lanes))
    return lanes


def _check_passes(schedule: Schedule) -> None:
    """Each micro-batch goes once through each chunk, in each kind of pass and in the right order;
    backwards may be whole or in halves, and in an evaluation there are none."""
    evaluation = all(action.kind is F for order in schedule.actions for action in order)
    complete = ("F",) if evaluation else ("FB", "FIW")
    for rank, order in enumerate(schedule.actions):
        made = {
            (chunk, i): ""
            for chunk in range(schedule.placement.chunks)
            for i in range(schedule.micro_batches)
        }
        for action in order:
            kind, *key = action
            so_far = made.get(tuple(key))
            if so_far is None:
                raise ScheduleError(f"rank {rank}: {action} is of no chunk or micro-batch here")
            due = DUE.get(so_far, ())
            if kind not in due:
                again = "again, " if kind in so_far else ""
                names = " or ".join(str(action._replace(kind=each)) for each in due) or "nothing"
                raise ScheduleError(f"rank {rank}: {action} comes {again}when {names} is due")
            made[tuple(key)] = so_far + kind
        for (chunk, i), kinds in made.items():
            if kinds not in complete:
                missing = Action(DUE[kinds][0], chunk, i)
                raise ScheduleError(f"rank {rank}: {missing} is missing")


def _deadlock(
    waiting: dict[tuple[int, int, int], int], schedule: Schedule, lanes: list[list[Span]]
) -> str:
    lines = []
    for (source, stage, i), rank in sorted(waiting.items(), key=lambda item: item[1])[:SHOWN]:
        action = schedule.actions[rank][len(lanes[rank])]
        place = schedule.placement.places[stage]
        needed = action._replace(chunk=place.chunk)
        lines.append(f"rank {rank} at {action} waits for {needed} of rank {place.rank}")
    more = len(waiting) - len(lines)
    return "deadlock: " + "; ".join(lines) + (f"; and {more} ranks more" if more else "")


def _most_held(order: tuple[Action, ...], *, freed_by: tuple[Kind, Kind]) -> int:
    most = held = 0
    for action in order:
        if action.kind is F:
            held += 1
            most = max(most, held)
        elif action.kind in freed_by:
            held -= 1
    return most

"""What ``ds4d plan`` says of a pipeline before anything runs: its split, its idle time, the
activations that it holds. Pure: the model is built on meta, the schedule is run on paper.

Times are relative. They are those of computing alone, as counted in ``ds4d/pipeline/costs.py``:
what is sent is taken to be hidden behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ds4d.config.model_facts import look_up
from ds4d.config.types import RunConfig
from ds4d.pipeline.actions import Schedule
from ds4d.pipeline.schedules import make_schedule
from ds4d.pipeline.simulate import Costs, Simulation, simulate
from ds4d.pipeline.timeline import summary, write

NO_PIPELINE = "There is no pipeline to plan: ds4d.parallel.pp is 1, every rank has all layers."


@dataclass(frozen=True)
class PipelinePlan:
    """Attributes:
    schedule: of a step.
    bounds: [start, stop) of the layers of each virtual stage; None: not known yet.
    costs: of the passes, in mean forward passes of a virtual stage.
    simulation: of the step with these costs.
    guess: why all stages are taken to cost the same; None: the model's costs are known.
    """

    schedule: Schedule
    bounds: tuple[tuple[int, int], ...] | None
    costs: Costs
    simulation: Simulation
    guess: str | None


def plan_pipeline(run: RunConfig) -> PipelinePlan | None:
    """The pipeline of a run; None: it has none.

    Raises:
        ValueError: the split that the file asks for does not fit the model.
    """
    if run.parallel.pp == 1:
        return None
    schedule = make_schedule(
        run.pipeline.schedule,
        ranks=run.parallel.pp,
        chunks=run.pipeline.chunks,
        micro_batches=run.batch.accumulation,
    )
    bounds, costs, guess = _costs(run, schedule.placement.stages)
    return PipelinePlan(schedule, bounds, costs, simulate(schedule, costs), guess)


def _costs(
    run: RunConfig, stages: int
) -> tuple[tuple[tuple[int, int], ...] | None, Costs, str | None]:
    """Bounds, costs, guess.

    A split's cost is a third of a stage's whole work: forward, and backward of inputs and of
    weights, which are alike but for the forward that recomputation adds to the inputs' half.
    """
    from ds4d.pipeline.partition import split_of  # transformers takes seconds to import

    model = look_up(
        {"path": run.model.path, "config": run.model.config},
        tokenizer_size=run.data.tokenizer.vocab_size,
    )
    if model.config is None:
        return None, Costs.equal(stages), f"the model {run.model.path} is not on this machine yet"
    if model.vocabulary_is_guessed:
        return None, Costs.equal(stages), "the size of the vocabulary is not known yet"
    split = split_of(run, model.config)
    as_split = replace(run.pipeline, split=split.counts)
    plain = split_of(run.replace(recompute="none", pipeline=as_split), model.config).costs
    unit = sum(plain) / stages
    forward = tuple(cost / unit for cost in plain)
    inputs = tuple(3 * whole / unit - 2 * f for whole, f in zip(split.costs, forward, strict=True))
    return (
        split.bounds,
        Costs(forward, inputs, forward, unit="mean forward passes of a stage"),
        None,
    )


def write_timelines(plan: PipelinePlan | None, files: Iterable[Path]) -> None:
    """Write the step's timeline, as each file's suffix says.

    Raises:
        ValueError: there is no pipeline.
    """
    for file in files:
        if plan is None:
            raise ValueError(f"--timeline {file}: {NO_PIPELINE}")
        write(plan.simulation.timeline, file)


def as_dict(plan: PipelinePlan | None) -> dict[str, Any]:
    """For programs: ``{"pipeline": ...}``, None where there is none."""
    if plan is None:
        return {"pipeline": None}
    schedule, done = plan.schedule, plan.simulation
    told = summary(done.timeline)
    held = zip(done.held_until_input, done.held_until_weight, strict=True)
    for rank, (until_input, until_weight) in zip(told["ranks"], held, strict=True):
        rank["stages"] = list(schedule.placement.of_rank(rank["rank"]))
        rank["held_until_input"], rank["held_until_weight"] = until_input, until_weight
    return {
        "pipeline": {
            "schedule": schedule.name,
            "chunks": schedule.placement.chunks,
            "micro_batches": schedule.micro_batches,
            "split": plan.bounds and [stop - start for start, stop in plan.bounds],
            "forward_costs": list(plan.costs.forward),
            "guess": plan.guess,
            **{key: told[key] for key in ("unit", "length", "bubble", "ranks")},
        }
    }


def render(plan: PipelinePlan | None) -> Group:
    """For people, to be printed on a rich console."""
    if plan is None:
        return Group(Text(NO_PIPELINE))
    placement = plan.schedule.placement
    chunks = f"{placement.chunks} chunks on each, " if placement.chunks > 1 else ""
    lines = [
        f"schedule   {plan.schedule.name} on {placement.ranks} pipeline ranks, {chunks}"
        f"{plan.schedule.micro_batches} micro-batches a step",
        f"bubble     {plan.simulation.timeline.bubble:.1%} of the ranks' time is idle, if what is "
        "sent is hidden",
    ]
    if plan.guess:
        lines.append(f"costs      every stage alike, a guess: {plan.guess}")
    else:
        counts = ", ".join(str(stop - start) for start, stop in plan.bounds)
        lines.append(f"split      {counts} layers")
    return Group(*map(Text, lines), _ranks(plan))


def _ranks(plan: PipelinePlan) -> Table:
    """One line a pipeline rank; its stages are chunks in the order of the model."""
    done, placement = plan.simulation, plan.schedule.placement
    work = done.timeline.busy
    mean = sum(work) / len(work)
    table = Table(box=None, pad_edge=False)
    for title in (
        "pipeline\nrank", "layers", "work\n(mean 1)", "idle",
        "activations held\n(micro-batches in a chunk)",
    ):  # fmt: skip
        table.add_column(title, justify="right")
    for rank in range(placement.ranks):
        held = {done.held_until_input[rank], done.held_until_weight[rank]}
        layers = "?"
        if plan.bounds:
            layers = ", ".join(_layers(*plan.bounds[stage]) for stage in placement.of_rank(rank))
        table.add_row(
            str(rank),
            layers,
            f"{work[rank] / mean:.2f}",
            f"{done.timeline.idle_fraction[rank]:.1%}",
            " to ".join(map(str, sorted(held))),
        )
    return table


def _layers(start: int, stop: int) -> str:
    return f"{start}" if stop == start + 1 else f"{start}-{stop - 1}"

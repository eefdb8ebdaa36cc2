"""What ``ds4d check`` shows of a pipeline: who holds which layers, and what they cost."""

from __future__ import annotations

import dataclasses
from itertools import accumulate, pairwise
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ds4d.config.model_facts import look_up
from ds4d.config.types import RunConfig
from ds4d.pipeline.partition import Split, split_of
from ds4d.pipeline.schedules import placement_of


def pipeline_dict(run: RunConfig) -> dict[str, Any] | None:
    """For programs; None: there is no pipeline. ``stages`` is in the order of the model and None
    where the layers are counted later, when the model or its vocabulary is here; ``share`` is a
    stage's part of all cost, ``imbalance`` how much more than the mean the busiest rank has to
    do."""
    if run.parallel.pp == 1:
        return None
    split = _predicted(run)
    return {
        "schedule": run.pipeline.schedule,
        "chunks": run.pipeline.chunks,
        "stages": _stages(run, split),
        "imbalance": None if split is None else split.imbalance,
    }


def _predicted(run: RunConfig) -> Split | None:
    sizes = run.data.tokenizer.vocab_size
    facts = look_up(dataclasses.asdict(run.model), tokenizer_size=sizes)
    known = facts.config is not None and not facts.vocabulary_is_guessed
    return split_of(run, facts.config) if known else None


def _stages(run: RunConfig, split: Split | None) -> list[dict[str, Any]] | None:
    counts = run.pipeline.split
    if counts is None or not all(isinstance(count, int) for count in counts):
        return None
    places = placement_of(run.pipeline.schedule, run.parallel.pp, run.pipeline.chunks).places
    bounds = pairwise(accumulate(counts, initial=0))
    shares = [None] * len(counts)
    if split is not None:
        shares = [cost / sum(split.costs) for cost in split.costs]
    return [
        {"rank": place.rank, "chunk": place.chunk, "layers": list(layers), "share": share}
        for place, layers, share in zip(places, bounds, shares, strict=True)
    ]


def render_pipeline(run: RunConfig) -> list[RenderableType]:
    """For people; empty where there is no pipeline."""
    told = pipeline_dict(run)
    if told is None:
        return []
    chunks = f" x {told['chunks']} chunks" if told["chunks"] > 1 else ""
    line = f"pipeline   {told['schedule']}, {run.parallel.pp} ranks{chunks}; "
    if told["imbalance"] is None:
        line += "costs are known when the model and its vocabulary are here"
    else:
        line += f"the busiest rank has {told['imbalance']:.1%} more to do than the mean"
    table = [] if told["stages"] is None else [_table(told["stages"]), Text()]
    return [Text(line), *table]


def _table(stages: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("stage", "pp rank", "chunk", "layers", "number", "cost"):
        table.add_column(name, justify="right")
    table.add_column("and")
    extras = {0: "embedding", len(stages) - 1: "head"}
    for index, stage in enumerate(stages):
        start, stop = stage["layers"]
        share = "" if stage["share"] is None else f"{stage['share']:.1%}"
        layers = f"{start}" if stop == start + 1 else f"{start}-{stop - 1}"
        row = (index, stage["rank"], stage["chunk"], layers, stop - start, share)
        table.add_row(*map(str, row), extras.get(index, ""))
    return table

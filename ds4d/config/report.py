"""What ``ds4d check`` shows of a file without problems: who holds what, and the file filled in."""

from __future__ import annotations

import io
import json
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ds4d.config.layout import (
    AXES,
    GROUP_AXES,
    context_ranks,
    coordinate_of,
    cut_multiple,
    group_ranks,
    ulysses_size,
)
from ds4d.config.report_pipeline import pipeline_dict, render_pipeline
from ds4d.config.resolve import resolved
from ds4d.config.types import RunConfig

SHOWN_RANKS = 16  # of a larger world the first and the last half of so many
WIDTH = 100
# axis -> what the ranks along it share out
SHARES = {"pp": "layers", "dp": "samples", "cp": "tokens of a sample", "tp": "matrices of a layer"}


def as_dict(run: RunConfig) -> dict[str, Any]:
    """For programs; ``config`` loads again to the same run."""
    return {
        "world_size": run.parallel.world_size,
        "layout": {axis: getattr(run.parallel, axis) for axis in AXES},
        "groups": _groups(run),
        "batch": {
            "train": run.batch.train,
            "micro": run.batch.micro,
            "accumulation": run.batch.accumulation,
            "tokens": run.batch.train * run.data.seq_len,
        },
        "precision": {
            "parameters": run.precision.param_dtype,
            "accumulated_gradients": run.precision.grad_accum_dtype,
        },
        "zero_stage": run.zero_stage,
        "pipeline": pipeline_dict(run),
        "notes": list(run.notes),
        "config": resolved(run),
    }


def render(run: RunConfig) -> Group:
    """For people, to be printed on a rich console."""
    parts = [Text(line) for line in _summary(run)]
    parts += [*render_pipeline(run), _ranks(run), *(Text(f"note: {note}") for note in run.notes)]
    text = json.dumps(resolved(run), indent=2, ensure_ascii=False)
    return Group(*parts, Text("\nThe file with everything filled in:"), Text(text))


def as_text(run: RunConfig) -> str:
    """``render`` as plain text."""
    return plain(render(run))


def plain(shown: RenderableType) -> str:
    """What a rich console would print, without colours."""
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    console.print(shown, soft_wrap=True)
    return console.file.getvalue().rstrip()


def _groups(run: RunConfig) -> dict[str, list[list[int]]]:
    groups = {name: group_ranks(name, run.parallel) for name in GROUP_AXES}
    return groups | context_ranks(run.parallel, run.context)


def _summary(run: RunConfig) -> list[str]:
    p, b = run.parallel, run.batch
    lines = [
        f"layout     {p.world_size} ranks = pp {p.pp} x dp {p.dp} x cp {p.cp} x tp {p.tp}, "
        f"ZeRO stage {run.zero_stage}",
        f"batch      {b.train} sequences a step = micro {b.micro} x accumulation {b.accumulation} "
        f"x dp {p.dp}; {b.train * run.data.seq_len:,} tokens",
        f"precision  {run.precision.param_dtype} parameters, gradients accumulated in "
        f"{run.precision.grad_accum_dtype}",
    ]
    return lines + ([_context(run)] if p.cp > 1 else [])


def _context(run: RunConfig) -> str:
    """How a sequence is shared, and what each rank has of it."""
    cp, seq_len = run.parallel.cp, run.data.seq_len
    size = ulysses_size(cp, run.context)
    who = {1: f"ring of {cp} ranks", cp: f"{cp} ranks exchange heads"}.get(
        size, f"ring of {cp // size} groups of {size} ranks that exchange heads"
    )
    parts = run.parallel.tp if run.parallel.sequence_parallel else 1
    length = seq_len + -seq_len % cut_multiple(cp, size, parts)
    padded = "" if length == seq_len else f", padded to {length:,}"
    return f"context    {who}, {length // cp:,} of {seq_len:,} tokens each{padded}"


def _ranks(run: RunConfig) -> Table:
    """One line a rank; of a large world the first and the last ones."""
    table = Table(box=None, pad_edge=False)
    table.add_column("rank", justify="right")
    for axis in AXES:
        size = getattr(run.parallel, axis)
        table.add_column(f"{axis} of {size}\n({SHARES[axis]})", justify="right")
    world = run.parallel.world_size
    shown = list(range(world))
    if world > SHOWN_RANKS:
        half = SHOWN_RANKS // 2
        shown = [*range(half), None, *range(world - half, world)]
    for rank in shown:
        if rank is None:
            table.add_row(*["..."] * (len(AXES) + 1))
        else:
            table.add_row(str(rank), *map(str, coordinate_of(rank, run.parallel)))
    return table

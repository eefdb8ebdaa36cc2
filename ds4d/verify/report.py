"""What ``ds4d verify`` shows: a table for people, an object for programs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ds4d.config.layout import AXES
from ds4d.config.types import RunConfig
from ds4d.verify.bisect import Finding
from ds4d.verify.compare import Off, Row
from ds4d.verify.small import computes_in


@dataclass(frozen=True)
class Report:
    """Attributes:
    run: what was trained.
    model: its family and size, in a line.
    samples: what it was trained on, in a line.
    notes: what was not as in the file.
    rows: what was compared.
    sent: bytes that all ranks together sent in the last step, by purpose; DeepSpeed's own
        reductions over dp x cp are not counted.
    finding: where it goes wrong, if it does.
    """

    run: RunConfig
    model: str
    samples: str
    notes: tuple[str, ...]
    rows: tuple[Row, ...]
    sent: dict[str, int]
    finding: Finding | None = None

    @property
    def passed(self) -> bool:
        return all(row.passed for row in self.rows)


def as_dict(report: Report) -> dict[str, Any]:
    run = report.run
    return {
        "passed": report.passed,
        "layout": {axis: getattr(run.parallel, axis) for axis in AXES},
        "zero_stage": run.zero_stage,
        "precision": run.precision.param_dtype,
        "model": report.model,
        "samples": report.samples,
        "notes": list(report.notes),
        "rows": [_row(row) for row in report.rows],
        "bytes_sent": report.sent,
        "finding": report.finding and _finding(report.finding),
    }


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "axes": list(finding.axes),
        "right_without": finding.right_without,
        "off": [{"what": off.what, "tensor": off.name} for off in finding.off],
    }


def _row(row: Row) -> dict[str, Any]:
    """JSON has no NaN and no infinity."""
    values = {
        "what": row.what,
        "tensor": row.where or None,
        "expected": row.expected,
        "found": row.found,
        "error": row.error,
        "tolerance": row.tolerance,
    }
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            values[name] = str(value)
    return values | {"passed": row.passed}


def render(report: Report) -> Group:
    """For a rich console."""
    lines = [*_head(report), *(f"note: {note}" for note in report.notes), ""]
    return Group(*map(Text, lines), _table(report), *map(Text, _tail(report)))


def _head(report: Report) -> list[str]:
    run = report.run
    degrees = " x ".join(f"{axis} {getattr(run.parallel, axis)}" for axis in AXES)
    parts = [f"{run.parallel.world_size} ranks = {degrees}", f"ZeRO stage {run.zero_stage}"]
    if run.parallel.pp > 1:
        parts.append(run.pipeline.schedule)
    if run.parallel.cp > 1:
        parts.append(run.context.method)
    if run.parallel.sequence_parallel:
        parts.append("sequence parallel")
    parts.append(run.precision.param_dtype)
    if computes_in(run) != run.precision.param_dtype:
        parts.append(f"autocast to {computes_in(run)}")
    return [
        f"layout   {', '.join(parts)}",
        f"model    {report.model}",
        f"data     {report.samples}, {run.batch.train} a step",
        "against  one process with the Hugging Face model in fp32, each document alone",
        *_half_precision(computes_in(run)),
    ]


def _half_precision(dtype: str) -> list[str]:
    if dtype == "fp32":
        return []
    return [f"         tolerances are what such a process in {dtype} is off by, with a margin"]


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("compared", "plain", "layout", "error", "tolerance"):
        table.add_column(name, justify="left" if name == "compared" else "right")
    table.add_column("")
    for row in report.rows:
        what = f"{row.what}: {row.where}" if row.where else row.what
        numbers = ("" if n is None else f"{n:.8g}" for n in (row.expected, row.found))
        verdict = Text("PASS", style="green") if row.passed else Text("FAIL", style="bold red")
        table.add_row(what, *numbers, f"{row.error:.1e}", f"{row.tolerance:.1e}", verdict)
    return table


def _tail(report: Report) -> list[str]:
    sent = ", ".join(f"{what} {count:,}" for what, count in sorted(report.sent.items()))
    lines = ["", f"bytes sent in a step: {sent}"] if sent else [""]
    failed = sum(not row.passed for row in report.rows)
    verdict = "PASS" if report.passed else f"FAIL: {failed} of {len(report.rows)} are not within"
    return [*lines, verdict, *(_explained(report.finding) if report.finding else [])]


def _explained(finding: Finding) -> list[str]:
    together = " and ".join(finding.axes)
    wrong = f"it goes wrong with {together}" + (" alone" if finding.axes[1:] == () else " together")
    if not finding.axes:
        wrong = "it goes wrong on one rank, too: no axis of the layout is to blame"
    if finding.right_without is not None:
        also = "right" if finding.right_without else "still not right: there is more"
        wrong += f"; without, the layout is {also}"
    lines = [wrong]
    for what in dict.fromkeys(off.what for off in finding.off):
        lines.append(_range([off for off in finding.off if off.what == what]))
    return lines


def _range(off: list[Off]) -> str:
    """The first and the last in the order of the model: before a fault in a backward pass all
    gradients are off, behind it none."""
    first, last, worst = off[0], off[-1], max(off, key=lambda each: each.error)
    text = f"first {first.what} that is off: {first.name} ({first.error:.1e})"
    if first is last:
        return f"{text}, the only one"
    return f"{text}; last: {last.name}; worst of {len(off)}: {worst.name} ({worst.error:.1e})"

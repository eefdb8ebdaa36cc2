"""The outcomes of the zoo as a page of the docs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from tests.zoo.trials import COLUMNS, EXACT, REFUSED, Outcome

COMMAND = "python -m tests.zoo"
LIBRARIES = ("torch", "transformers", "deepspeed")
HEAD = """\
# Which models, in which layouts

Every causal language model of transformers, each as a small random one of its family, trained in
each layout and compared with one plain Hugging Face process: loss, grad norm, every gradient and
every weight, in fp32, as `ds4d verify` does it. *Exact*: all within its tolerance. Everything else
is refused by `ds4d check` before anything starts, with the sentence that stands here. Written by
`{command}` with {versions}; do not edit.

"""

# What differs from type to type in sentences that say the same.
_OF_TYPE = {
    r"\bmodel_type [\w-]+": "model_type T",
    r"\b\w+(For[A-Z]\w*|LMHeadModel)\b": "model_type T",
    r"off by \S+\)": "off by far)",
}
Table = Mapping[tuple[str, str], Outcome]


def write(path: Path, outcomes: Sequence[Outcome]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(page(outcomes))


def page(outcomes: Sequence[Outcome]) -> str:
    table = {(o.type, o.column): o for o in outcomes}
    columns = [column for column in COLUMNS if any(o.column == column for o in outcomes)]
    types = sorted({o.type for o in outcomes})
    reasons = _numbered(outcomes)
    lines = [_row("", *columns), _row("---", *["---"] * len(columns))]
    lines.append(_row(f"**exact** of {len(types)}", *_counts(table, types, columns)))
    for name in types:
        cells = (table.get((name, column)) for column in columns)
        lines.append(_row(name, *(_cell(cell, reasons) for cell in cells)))
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    whole = sum(all(_is_exact(table, name, column) for column in columns) for name in types)
    summary = f"{whole} of {len(types)} types are exact in all {len(columns)} layouts.\n\n"
    foot = ["", "## Why not", ""]
    foot += [f"{number}. {reason}" for reason, number in reasons.items()]
    head = HEAD.format(command=COMMAND, versions=versions)
    return head + summary + "\n".join([*lines, *foot]) + "\n"


def read(page: str) -> dict[tuple[str, str], str]:
    """The outcome of each type in each column of a page."""
    rows = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    header, _, _, *types = rows
    return {
        (name, column): cell.partition(" ")[0]
        for name, *cells in types
        for column, cell in zip(header, cells, strict=True)
    }


def _numbered(outcomes: Sequence[Outcome]) -> dict[str, int]:
    """Reasons by how many cells they hold, the most frequent first."""
    refused = (o for o in outcomes if o.outcome == REFUSED)
    count = Counter(reason for outcome in refused for reason in _reasons_of(outcome))
    return {reason: number for number, (reason, _) in enumerate(count.most_common(), start=1)}


def _reasons_of(outcome: Outcome) -> Iterator[str]:
    """The same for all types that they hold for."""
    for line in outcome.why.splitlines():
        why = re.sub(rf"(?<![\w.]){re.escape(outcome.type)}(?![\w.])", "T", line.removeprefix("2: "))
        for pattern, general in _OF_TYPE.items():
            why = re.sub(pattern, general, why)
        yield why


def _cell(outcome: Outcome | None, reasons: Mapping[str, int]) -> str:
    if outcome is None:
        return ""
    if outcome.outcome == REFUSED:
        numbers = sorted(reasons[reason] for reason in _reasons_of(outcome))
        return f"refused ({', '.join(map(str, numbers))})"
    return outcome.outcome if outcome.outcome == EXACT else f"**{outcome.outcome}**: {outcome.why}"


def _counts(table: Table, types: Sequence[str], columns: Sequence[str]) -> list[str]:
    return [str(sum(_is_exact(table, name, column) for name in types)) for column in columns]


def _is_exact(table: Table, name: str, column: str) -> bool:
    return (name, column) in table and table[name, column].outcome == EXACT


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"

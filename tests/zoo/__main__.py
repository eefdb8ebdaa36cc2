"""``python -m tests.zoo``: every causal language model of transformers in every layout.

Outcomes are kept as they come in (``--results``), and what is there is not tried again, so that the
zoo goes on where it was left. Without ``--types`` and ``--columns``, docs/zoo.md is written anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from transformers.utils import logging

from ds4d.data.progress import Bar
from tests import harness
from tests.zoo.table import write
from tests.zoo.trials import (
    COLUMNS,
    EXACT,
    LONGEST_SECONDS,
    REFUSED,
    TYPES,
    Outcome,
    try_type,
)

RESULTS = Path("runs/zoo.jsonl")
PAGE = harness.ROOT / "docs" / "zoo.md"


def main() -> int:
    args = _arguments()
    types, columns = args.types or TYPES, args.columns or tuple(COLUMNS)
    found = {} if args.again else _known(args.results)
    args.results.parent.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    logging.disable_progress_bar()  # transformers', of files of some kilobytes
    logging.set_verbosity_error()
    total = len(types) * len(columns)
    with Bar("zoo", total, show=not args.json) as bar, args.results.open("a") as file:
        for name in types:
            bar.update(sum(key[0] in types for key in found), name)
            missing = [column for column in columns if (name, column) not in found]
            for outcome in try_type(name, missing, seconds=args.seconds) if missing else ():
                found[name, outcome.column] = outcome
                print(json.dumps(asdict(outcome)), file=file, flush=True)
    harness.close()
    outcomes = [found[name, column] for name in types for column in columns]
    if len(types) == len(TYPES) and len(columns) == len(COLUMNS):
        write(PAGE, outcomes)
    defects = [o for o in outcomes if o.outcome not in (EXACT, REFUSED)]
    for line in _report(outcomes, defects, as_json=args.json):
        print(line)
    return 1 if defects else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("--types", nargs="+", choices=TYPES, metavar="TYPE")
    parser.add_argument("--columns", nargs="+", choices=COLUMNS, metavar="LAYOUT")
    parser.add_argument("--seconds", type=float, default=LONGEST_SECONDS, help="for each layout")
    parser.add_argument("--results", type=Path, default=RESULTS, help="outcomes so far, JSON lines")
    parser.add_argument("--again", action="store_true", help="do not use outcomes so far")
    parser.add_argument("--json", action="store_true", help="print outcomes as JSON lines")
    return parser.parse_args()


def _known(file: Path) -> dict[tuple[str, str], Outcome]:
    if not file.exists():
        return {}
    outcomes = (Outcome(**json.loads(line)) for line in file.read_text().splitlines())
    return {(o.type, o.column): o for o in outcomes}


def _report(outcomes: list[Outcome], defects: list[Outcome], *, as_json: bool) -> Iterator[str]:
    if as_json:
        yield from (json.dumps(asdict(outcome)) for outcome in outcomes)
        return
    for column in dict.fromkeys(o.column for o in outcomes):
        of_column = [o for o in outcomes if o.column == column]
        exact = sum(o.outcome == EXACT for o in of_column)
        refused = sum(o.outcome == REFUSED for o in of_column)
        yield f"{column:12} {exact:4} exact {refused:4} refused of {len(of_column)}"
    yield from (f"{o.type}, {o.column}: {o.outcome}: {o.why}" for o in defects)


if __name__ == "__main__":
    sys.exit(main())

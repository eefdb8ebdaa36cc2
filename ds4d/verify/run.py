"""``ds4d verify``: make it small, train it plainly and in its layout, compare, find the fault."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from ds4d.config.types import RunConfig
from ds4d.launch.call import call_on_ranks
from ds4d.launch.failure import FAILURE
from ds4d.model.build import DTYPES
from ds4d.model.config import hf_config
from ds4d.verify.bisect import Trial, axes_of, bisect, overrides
from ds4d.verify.compare import (
    FAR,
    Row,
    allowing_rounding,
    compare,
    off_tensors,
    tensor_rows,
)
from ds4d.verify.plain import Result, train_plainly
from ds4d.verify.ranks import CallOnRanks, RanksFailed, train_here, train_in_layout
from ds4d.verify.report import Report
from ds4d.verify.small import Small, computes_in, make_small


def on_local_ranks(run: RunConfig, results: Path) -> None:
    """``train_here`` in as many CPU processes as the run has ranks."""
    try:
        call_on_ranks(
            train_here, run, results, parallel=run.parallel, context=run.context, device="cpu"
        )
    except SystemExit as ended:  # the ranks have said on stderr what was wrong
        if ended.code != FAILURE:
            raise
        raise RanksFailed("the ranks have failed") from ended


def verify(
    run: RunConfig,
    *,
    steps: int = 3,
    max_ranks: int = 8,
    full: bool = False,
    call: CallOnRanks = on_local_ranks,
    say: Callable[[str], None] = lambda _text: None,
) -> Report:
    """Compare a file's layout with one plain process; where it is not right, find out why.

    Args:
        run: of the file.
        steps: optimizer steps.
        max_ranks: of a larger layout degrees above 2 are reduced to 2.
        full: the model and the length of sequences stay as they are.
        call: runs ``train_here`` on the ranks of a run.
        say: is told what is done.

    Raises:
        ConfigError, DataError, ValueError: see ``make_small``.
    """
    with tempfile.TemporaryDirectory(prefix="ds4d-verify-") as folder:
        small = make_small(run, Path(folder), steps=steps, max_ranks=max_ranks, full=full)
        trained = small.run()
        say(f"one plain process, then {trained.parallel.world_size} ranks")
        bench = Bench(small, call)
        judged = bench.judge(trained)
        finding = None
        if not judged.trial.passed:

            def attempt(without: tuple[str, ...]) -> Trial:
                say(f"not right; now without {', '.join(without)}")
                return bench.judge(small.run(*overrides(without))).trial

            finding = bisect(axes_of(trained), judged.trial, attempt)
        config = hf_config(trained.model).get_text_config(decoder=True)
        model = (
            f"{config.model_type} with {config.num_hidden_layers} layers of {config.hidden_size}, "
            f"vocabulary {config.vocab_size}, random weights"
        )
        return Report(
            trained, model, small.samples, small.notes, judged.rows, dict(judged.sent), finding
        )


class Judged(NamedTuple):
    """Of one layout; ``sent``: bytes, by purpose."""

    rows: tuple[Row, ...]
    trial: Trial
    sent: Counter


class Bench:
    """Trains layouts of a small run and compares them with plain processes on the same data.

    Args:
        call: runs ``train_here`` on the ranks of a run.
    """

    def __init__(self, small: Small, call: CallOnRanks) -> None:
        self._folder, self._call = small.folder, call
        run = small.run()
        self._exact = train_plainly(run)
        self._half: Result | None = None
        self._in_double: Result | None = None
        if (name := computes_in(run)) != "fp32":
            autocast = run.precision.param_dtype == "fp32"
            self._half = train_plainly(run, dtype=DTYPES[name], autocast=autocast)

    def judge(self, run: RunConfig) -> Judged:
        """Train it in its layout and compare. Ranks that fail are one row."""
        results = Path(tempfile.mkdtemp(prefix="ranks-", dir=self._folder))
        try:
            found = train_in_layout(run, results, self._call)
        except RanksFailed:
            return Judged((Row("ranks train to the end", 1.0, 0.0),), Trial(False, ()), Counter())
        references, kind = self._references(run), _kind(run)
        rows = compare(found, *references, **kind)
        off = off_tensors(tensor_rows(found, *references, **kind))
        failed = [row for row in rows if not row.passed]
        if failed and kind["precision"] == "fp32" and all(row.error < FAR for row in failed):
            rows = allowing_rounding(rows, self._exact, self._double(run))
        return Judged(tuple(rows), Trial(all(row.passed for row in rows), off), found.sent)

    def _double(self, run: RunConfig) -> Result:
        if self._in_double is None:
            self._in_double = train_plainly(run, dtype=torch.float64)
        return self._in_double

    def _references(self, run: RunConfig) -> tuple[Result, Result | None]:
        return self._exact, None if computes_in(run) == "fp32" else self._half


def _kind(run: RunConfig) -> dict[str, str]:
    return {
        "precision": computes_in(run),
        "optimizer": run.deepspeed["optimizer"]["type"],
    }

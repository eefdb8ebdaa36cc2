"""``ds4d verify``: make it small, train it plainly and in its layout, compare."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ds4d.config.types import RunConfig
from ds4d.launch.call import call_on_ranks
from ds4d.model.build import DTYPES
from ds4d.model.config import hf_config
from ds4d.verify.compare import Row, compare
from ds4d.verify.plain import Result, train_plainly
from ds4d.verify.ranks import CallOnRanks, LayoutResult, train_here, train_in_layout
from ds4d.verify.report import Report
from ds4d.verify.small import make_small


def on_local_ranks(run: RunConfig, results: Path) -> None:
    """``train_here`` in as many CPU processes as the run has ranks."""
    call_on_ranks(
        train_here, run, results, parallel=run.parallel, context=run.context, device="cpu"
    )


def verify(
    run: RunConfig,
    *,
    steps: int = 3,
    max_ranks: int = 8,
    full: bool = False,
    call: CallOnRanks = on_local_ranks,
) -> Report:
    """Compare a file's layout with one plain process.

    Args:
        run: of the file.
        steps: optimizer steps.
        max_ranks: of a larger layout degrees above 2 are reduced to 2.
        full: the model and the length of sequences stay as they are.
        call: runs ``train_here`` on the ranks of a run.

    Raises:
        ConfigError, DataError, ValueError: see ``make_small``.
    """
    with tempfile.TemporaryDirectory(prefix="ds4d-verify-") as folder:
        small = make_small(run, Path(folder), steps=steps, max_ranks=max_ranks, full=full)
        trained = small.run()
        references = References(trained)
        results = Path(folder) / "results"
        results.mkdir()
        found = train_in_layout(trained, results, call)
        rows = references.compare(found, trained)
        config = hf_config(trained.model).get_text_config(decoder=True)
        model = (
            f"{config.model_type} with {config.num_hidden_layers} layers of {config.hidden_size}, "
            f"vocabulary {config.vocab_size}, random weights"
        )
        notes = small.notes
        return Report(trained, model, small.samples, notes, tuple(rows), dict(found.sent))


class References:
    """Plain processes on the data of a small run, whatever its layout."""

    def __init__(self, run: RunConfig) -> None:
        self.exact = train_plainly(run)
        self.half: Result | None = None
        if run.precision.param_dtype != "fp32":
            self.half = train_plainly(run, dtype=DTYPES[run.precision.param_dtype])

    def compare(self, found: LayoutResult, run: RunConfig) -> list[Row]:
        return compare(
            found,
            self.exact,
            self.half,
            precision=run.precision.param_dtype,
            optimizer=run.deepspeed["optimizer"]["type"],
        )

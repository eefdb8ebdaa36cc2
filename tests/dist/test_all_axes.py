"""All four axes at once, on 16 ranks: once, for a process a rank is dear here."""

from __future__ import annotations

import pytest

from ds4d.verify.run import verify
from tests import harness
from tests.parity import compare
from tests.verify_runs import on_workers, run_of

ALL = dict(tp=2, pp=2, cp=2, dp=2)


@pytest.fixture(scope="module", autouse=True)
def many_workers():
    yield
    harness.close()  # the other tests need four


def test_sixteen_ranks_are_one_process():
    options = dict(
        ALL, rows=8, sequence_parallel=True, schedule="interleaved", chunks=2, stage=1,
        recompute="selective",
    )  # fmt: skip
    compare([("llama tied", options)], 16, layers=5)


def test_sixteen_ranks_by_verify():
    """Packed documents, through the data, the loader and the trainer."""
    report = verify(run_of(**ALL, stage=1, pipeline={"schedule": "zbv"}), call=on_workers, max_ranks=16)
    assert report.passed, [row for row in report.rows if not row.passed]

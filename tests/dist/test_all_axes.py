"""All four axes at once, on 16 ranks: once, for a process a rank is dear here."""

from __future__ import annotations

import pytest

from ds4d.verify.run import verify
from tests import harness
from tests.verify_runs import MODEL, on_workers, run_of

INTERLEAVED = {"schedule": "interleaved", "chunks": 2}


@pytest.fixture
def many_workers():
    yield
    harness.close()  # the other tests need four


def test_sixteen_ranks_are_one_process(many_workers):
    """Sequence parallel, packed documents, a tied vocabulary that does not divide."""
    run = run_of(
        MODEL | {"tie_word_embeddings": True},
        tp=2, pp=2, cp=2, dp=2, stage=1, pipeline=INTERLEAVED, recompute="selective",
    )  # fmt: skip
    assert run.parallel.sequence_parallel
    report = verify(run, call=on_workers, max_ranks=16)
    assert report.passed, [row for row in report.rows if not row.passed]

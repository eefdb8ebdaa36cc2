"""``ds4d verify`` on layouts that are right: every number within tolerance."""

from __future__ import annotations

import pytest

from ds4d.verify.run import verify
from tests.verify_runs import on_workers, run_of

INTERLEAVED = {"schedule": "interleaved", "chunks": 2}
LAYOUTS = {
    "dp z0": dict(dp=2, stage=0),
    "dp z1": dict(dp=2, stage=1),
    "dp z2": dict(dp=2, stage=2),
    "dp z3": dict(dp=2, stage=3),
    "tp": dict(tp=2, stage=0),
    "tp z3": dict(tp=2, dp=2, stage=3, sequence_parallel=False),
    "pp": dict(pp=2, stage=0),
    "pp interleaved, dp": dict(pp=2, dp=2, pipeline=INTERLEAVED),
    "cp": dict(cp=2, stage=2),
    "cp ulysses, tp": dict(cp=2, tp=2, context={"method": "ulysses"}),
    "tp, pp": dict(tp=2, pp=2, stage=1, recompute="selective"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_are_within(name):
    report = verify(run_of(**LAYOUTS[name]), call=on_workers)
    assert report.passed, [row for row in report.rows if not row.passed]

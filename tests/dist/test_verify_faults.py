"""Planted faults: each is found, and what is to blame is named."""

from __future__ import annotations

import pytest

from ds4d.verify.run import verify
from tests.verify_faults import FAULTS
from tests.verify_runs import run_of, with_fault

# two of three in the ordinary run
SOME = [
    pytest.param(name, marks=pytest.mark.slow if place % 3 == 2 else ())
    for place, name in enumerate(FAULTS)
]


@pytest.mark.parametrize("name", SOME)
def test_each_fault_is_found_and_named(name):
    fault = FAULTS[name]
    report = verify(run_of(**fault.layout), steps=2, call=with_fault(name))
    assert not report.passed
    assert report.finding.axes == fault.axes
    assert report.finding.right_without is not False
    if fault.tensor is not None:
        assert report.finding.off[0].name == fault.tensor

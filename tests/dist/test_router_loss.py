"""The loss of routers against one plain Hugging Face process on the whole global batch, see
``tests/parity.py``: it is no sum over micro-batches, so each way to cut a batch could make another
one of it."""

from __future__ import annotations

from itertools import product

import pytest

from tests.parity import ADAMW, check_half_precision, compare, folder_of, make_run
from tests.reference import packed_samples, padded_samples
from tests.tp_families import ROUTED

LAYOUTS = [
    dict(dp=2, stage=0),
    dict(dp=2, stage=2, micro=2),
    dict(dp=2, stage=3, recompute="full"),
    dict(tp=2, micro=2),
    dict(tp=2, micro=2, sequence_parallel=True, recompute="full"),
    dict(tp=2, sequence_parallel=True, recompute="selective", stage=3),
    dict(pp=2),
    dict(pp=2, schedule="zbv", chunks=2, recompute="full", stage=0),
    dict(cp=2, recompute="selective"),
    dict(cp=2, method="ulysses", micro=2),
]


@pytest.mark.parametrize("data", [padded_samples, packed_samples])
@pytest.mark.parametrize("name", ROUTED)
def test_two_ranks(name, data):
    compare([(name, options) for options in LAYOUTS], 2, layers=4, data=data)

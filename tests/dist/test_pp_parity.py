"""Pipeline parallelism against one plain Hugging Face process, see ``tests/parity.py``."""

from __future__ import annotations

import pytest

from tests.parity import ADAMW, SGD, compare
from tests.tp_families import FAMILIES

TWO = [
    dict(pp=2, schedule="gpipe"),
    dict(pp=2, schedule="1f1b"),
    dict(pp=2, schedule="interleaved", chunks=2),
    dict(pp=2, schedule="dualpipev", chunks=2),
    dict(pp=2, schedule="zb-h1"),
]


@pytest.mark.parametrize("how", TWO, ids=lambda how: how["schedule"])
def test_schedules_on_two_ranks(how):
    cases = [
        (name, {**how, "stage": stage, "optimizer": optimizer})
        for name in ("llama", "llama tied")
        for stage in (0, 1)
        for optimizer in (SGD, ADAMW)
    ]
    compare(cases, 2, layers=5)

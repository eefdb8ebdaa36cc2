"""A sequence that one plain process can't train in the memory that it is allowed trains when four
ranks share it, each of which is allowed as much."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.context_memory import growth_mib

TOKENS, LIMIT_MIB = 8192, 110  # a plain process needs 175, a rank of four 52


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_what_one_process_cannot_train_four_can(monkeypatch):
    monkeypatch.setenv("MALLOC_ARENA_MAX", "1")
    assert growth_mib("one plain process", TOKENS, LIMIT_MIB) is None
    assert growth_mib("ds4d, cp 4, ring", TOKENS, LIMIT_MIB) < LIMIT_MIB

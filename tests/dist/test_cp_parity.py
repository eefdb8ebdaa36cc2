"""Context parallelism against one plain Hugging Face process, see ``tests/parity.py``: every
family, and everything that goes with it. What rows can hold is in ``test_cp_data.py``."""

from __future__ import annotations

import pytest

from tests.parity import ADAMW, check_half_precision, compare, folder_of, make_run
from tests.tp_families import FAMILIES, OWN_ATTENTION, dealt

WAYS = {
    "ring": dict(method="ring", exchange="p2p"),
    "gathered": dict(method="ring", exchange="all_gather"),
    "ulysses": dict(method="ulysses"),
    "hybrid": dict(method="hybrid", ulysses=2),
}
ON_TWO = ("ring", "gathered", "ulysses")


def by(way: str, cp: int = 2, **options) -> dict:
    return {"cp": cp, **WAYS[way], **options}


ODD_HEADS = "llama, 9 heads, 3 key heads"  # no two ranks can share them
BY_ATTENTION = [name for name in FAMILIES if name not in OWN_ATTENTION]


@pytest.mark.parametrize("name", dealt(BY_ATTENTION, 2))
def test_every_family_on_two_ranks(name):
    ways = ("ring", "gathered") if name == ODD_HEADS else ON_TWO
    compare([(name, by(way, micro=2)) for way in ways], 2)


ON_FOUR = [
    "llama", "llama, one key head", "mistral", "gemma2", "gpt2", "gpt_bigcode", "deepseek_v3",
    "llama4_text", "gpt_oss", "smollm3",
]  # fmt: skip


@pytest.mark.parametrize("name", dealt(ON_FOUR, 2))
def test_four_ranks_more_than_there_are_key_heads(name):
    compare([(name, by(way, 4)) for way in WAYS], 4)


def test_three_ranks():
    cases = [(ODD_HEADS, by(way, 3)) for way in ON_TWO]
    compare(cases, 3)


def test_losses_under_adamw():
    cases = [
        (name, by(way, optimizer=ADAMW, stage=stage))
        for name in ("llama tied", "gpt2")
        for way in ON_TWO
        for stage in (0, 1)
    ]
    compare(cases, 2)


def test_with_zero_and_data_parallelism():
    cases = [
        ("llama tied", by(way, dp=2, stage=stage))
        for way in ("ring", "ulysses")
        for stage in (0, 1, 2, 3)
    ]
    cases += [(name, by("ring", dp=2, stage=3)) for name in ("gpt2", "gpt_oss")]
    compare(cases, 4)


def test_with_tensor_parallelism():
    """Ulysses shares what heads a tp rank has."""
    cases = [
        (name, by(way, tp=2, sequence_parallel=cut, stage=stage))
        for name, stage in [("llama tied", 0), ("gpt2", 1), ("gemma2", 1), ("mixtral", 3)]
        for way in ("ring", "ulysses")
        for cut in (False, True)
    ]
    compare(cases, 4)


SCHEDULES = [
    dict(schedule="1f1b"),
    dict(schedule="interleaved", chunks=2),
    dict(schedule="zb-h1"),
]


def test_with_pipelines():
    cases = [
        (name, by(way, pp=2, stage=stage, **schedule))
        for name, stage in [("llama tied", 1), ("gpt2", 0)]
        for way in ("ring", "ulysses")
        for schedule in SCHEDULES
    ]
    compare(cases, 4, layers=4)


def test_all_axes_together():
    cases = [
        ("llama tied", by("ring", tp=2, pp=2, sequence_parallel=True, micro=2, **schedule))
        for schedule in SCHEDULES
    ]
    cases.append(("gpt2", by("ulysses", tp=2, pp=2, recompute="selective")))
    compare(cases, 8, layers=4)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_with_recomputation(recompute):
    cases = [
        (name, by(way, recompute=recompute, stage=stage))
        for name in ("llama", "gpt2", "gemma2", "gpt_oss", "llama4_text")
        for way in ON_TWO
        for stage in ((1, 3) if name == "llama" else (1,))
    ]
    compare(cases, 2)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_bf16_is_no_further_from_fp32_than_plain_bf16(name):
    options = dict(optimizer=ADAMW, precision="bf16")
    runs = [make_run(folder_of(name), **by(way, **options)) for way in ON_TWO]
    check_half_precision(runs, 2)

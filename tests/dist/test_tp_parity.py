"""Tensor parallelism against one plain Hugging Face process, see ``tests/parity.py``: every family,
and everything that goes with it."""

from __future__ import annotations

import pytest

from tests.harness import run_distributed
from tests.parity import (
    ADAMW,
    SGD,
    batches,
    check_half_precision,
    compare,
    folder_of,
    make_run,
    train,
)
from tests.tp_families import FAMILIES, OWN_ATTENTION, dealt


def cut_along_the_sequence(name: str) -> list[bool]:
    return [False] if name in OWN_ATTENTION else [False, True]


ON_TWO = [name for name in FAMILIES if name != "llama, 9 heads, 3 key heads"]


@pytest.mark.parametrize("name", dealt(ON_TWO, 0))
def test_every_family_on_two_ranks(name):
    cases = [
        (name, dict(tp=2, sequence_parallel=cut, stage=1, optimizer=optimizer, micro=2))
        for cut in cut_along_the_sequence(name)
        for optimizer in (SGD, ADAMW)
    ]
    compare(cases, 2)


def test_three_ranks():
    cases = [
        ("llama, 9 heads, 3 key heads", dict(tp=3, sequence_parallel=cut, stage=1, optimizer=SGD))
        for cut in (False, True)
    ]
    compare(cases, 3)


ON_FOUR = [
    "llama, 20 heads, 10 key heads",
    "llama", "llama, one key head", "llama, odd inner size", "llama tied", "mistral", "phi3",
    "gpt2", "gpt_neox", "bloom", "falcon, one key head", "mixtral", "gpt_oss", "opt", "gemma2",
]  # fmt: skip


@pytest.mark.parametrize("name", dealt(ON_FOUR, 0))
def test_four_ranks_one_more_than_there_are_key_heads(name):
    cases = [
        (name, dict(tp=4, sequence_parallel=cut, stage=1, optimizer=SGD))
        for cut in cut_along_the_sequence(name)
    ]
    compare(cases, 4)


@pytest.mark.parametrize(
    "name", dealt(["llama", "gpt2", "qwen2", "llama tied", "olmo2", "mixtral"], 1)
)
def test_with_zero_and_data_parallelism(name):
    cases = [
        (name, dict(tp=2, dp=2, sequence_parallel=cut, stage=stage, optimizer=SGD))
        for cut in (False, True)
        for stage in (0, 1, 2, 3)
    ]
    compare(cases, 4)


def test_zero_3_where_parameters_are_used_in_unusual_ways():
    """Shared by ranks, with a head bias, chosen from, by head."""
    cases = [
        (name, dict(tp=2, sequence_parallel=name != "bloom", stage=3, optimizer=SGD, micro=2))
        for name in ("gpt_oss", "phi", "llama, one key head", "bloom")
    ]
    compare(cases, 2)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_with_recomputation(recompute):
    cases = [
        (name, dict(tp=2, sequence_parallel=cut, stage=stage, optimizer=SGD, recompute=recompute))
        for name in ("llama", "gpt2", "gemma2", "mixtral", "gpt_oss", "llama with biases")
        for cut in (False, True)
        for stage in (1, 3)
    ]
    compare(cases, 2)


def train_in_parts(runs, batches, parts):
    """``train`` with row-parallel products in parts, as a GPU computes them."""
    from ds4d.tensor_parallel import overlap

    before, overlap.PARTS["cpu"] = overlap.PARTS["cpu"], parts
    try:
        return train(runs, batches)
    finally:
        overlap.PARTS["cpu"] = before


def test_overlap_changes_no_number():
    """Neither in what is under way beside the weights' gradients, nor products in parts."""
    names = ("llama with biases", "gpt2", "mixtral")
    cases = [
        (name, dict(tp=2, sequence_parallel=cut, stage=1, optimizer=SGD, overlap=on, micro=2))
        for on in (True, False) for name in names for cut in (False, True)
    ]  # fmt: skip
    runs = [make_run(folder_of(n), **options) for n, options in cases]
    count = len(runs) // 2
    one, other = run_distributed(train, 2, timeout=600, runs=runs, batches=batches(4))
    for on, off in zip(one[:count], one[count:], strict=True):
        assert on[0] == off[0]  # losses and norms, to the bit
    for parts in (2, 5):
        compare(cases[:count], 2, body=train_in_parts, parts=parts)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_bf16_is_no_further_from_fp32_than_plain_bf16(name):
    folder = folder_of(name)
    options = dict(tp=2, optimizer=ADAMW, precision="bf16")
    runs = [make_run(folder, sequence_parallel=cut, stage=1, **options) for cut in (False, True)]
    check_half_precision(runs, 2)

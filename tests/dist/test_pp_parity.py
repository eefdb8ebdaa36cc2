"""Pipeline parallelism against one plain Hugging Face process, see ``tests/parity.py``;
micro-batches have very different numbers of valid targets."""

from __future__ import annotations

from unittest import mock

import pytest

from ds4d import shared_memory
from tests.parity import (
    ADAMW,
    SGD,
    check_half_precision,
    compare,
    folder_of,
    make_run,
    train,
)
from tests.tp_families import FAMILIES, dealt

SCHEDULES = {
    "gpipe": {},
    "1f1b": {},
    "interleaved": dict(chunks=2),
    "dualpipev": dict(chunks=2),
    "zb-h1": {},
    "zbv": dict(chunks=2),
}


def with_schedule(name: str, **options) -> dict:
    return {"schedule": name, **SCHEDULES[name], **options}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_on_two_ranks(schedule):
    cases = [
        (name, with_schedule(schedule, pp=2, stage=stage, optimizer=optimizer))
        for name in ("llama", "llama tied")
        for stage in (0, 1)
        for optimizer in (SGD, ADAMW)
    ]
    compare(cases, 2, layers=5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_on_four_ranks(schedule):
    cases = [
        (name, with_schedule(schedule, pp=4, stage=stage, rows=8))
        for name in ("llama tied", "gemma2")
        for stage in (0, 1)
    ]
    compare(cases, 4, layers=9)


@pytest.mark.parametrize("name", dealt(FAMILIES, 1))
def test_every_family_on_two_ranks(name):
    cases = [(name, with_schedule(s, pp=2)) for s in ("1f1b", "interleaved", "zb-h1")]
    compare(cases, 2, layers=5)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_with_recomputation(recompute):
    cases = [
        (name, with_schedule(schedule, pp=2, recompute=recompute, stage=stage))
        for name in ("llama", "gpt2", "gemma2", "mixtral")
        for schedule in ("1f1b", "interleaved", "zb-h1", "zbv")
        for stage in (0, 1)
    ]
    compare(cases, 2, layers=4)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_with_recomputation_and_tensor_parallelism(recompute):
    cases = [
        (name, with_schedule(s, pp=2, tp=2, recompute=recompute, sequence_parallel=cut, stage=0))
        for name in ("llama tied", "gpt2", "mixtral")
        for s in ("1f1b", "zb-h1", "zbv")
        for cut in (False, True)
    ]
    compare(cases, 4, layers=4)


@pytest.mark.parametrize("schedule", dealt(SCHEDULES, 1, turns=2))
def test_with_tensor_parallelism(schedule):
    cases = [
        (name, with_schedule(schedule, pp=2, tp=2, sequence_parallel=cut))
        for name in ("llama tied", "gpt2", "gemma2", "mixtral")
        for cut in (False, True)
    ]
    compare(cases, 4, layers=4)


def test_with_data_parallelism():
    cases = [
        (name, with_schedule(schedule, pp=2, dp=2, stage=stage, rows=8))
        for name in ("llama tied", "gpt2")
        for schedule in SCHEDULES
        for stage in (0, 1)
    ]
    compare(cases, 4, layers=4)


def train_by_gloo(runs, batches):
    """As between hosts, where ranks share no memory."""
    with mock.patch.object(shared_memory, "channel_of", lambda group: None):
        return train(runs, batches)


def test_without_shared_memory():
    cases = [
        (name, with_schedule(schedule, pp=2, tp=2, sequence_parallel=True))
        for name in ("llama tied", "gpt2")
        for schedule in ("1f1b", "interleaved", "dualpipev")
    ]
    compare(cases, 4, layers=4, body=train_by_gloo)


def test_all_axes_together():
    """With what each of them has."""
    cases = [
        (name, with_schedule(s, pp=2, tp=2, dp=2, sequence_parallel=True, recompute="selective",
                             rows=8, micro=2))
        for name in ("llama tied", "llama, one key head", "gpt2")
        for s in ("interleaved", "zb-h1", "zbv")
    ]  # fmt: skip
    compare(cases, 8, layers=5)


@pytest.mark.parametrize("name", ["llama", "llama tied"])
def test_bf16_is_no_further_from_fp32_than_plain_bf16(name):
    folder = folder_of(name, 4)
    runs = [
        make_run(folder, optimizer=ADAMW, precision="bf16", pp=2, **with_schedule(schedule))
        for schedule in SCHEDULES
    ]
    check_half_precision(runs, 2)

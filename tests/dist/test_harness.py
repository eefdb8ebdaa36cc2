"""The harness itself: results by rank, tracebacks, lost and hung workers, a clean next case."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.harness import RankFailure, run_distributed


def _sum(value: int) -> float:
    tensor = torch.tensor(float(value + dist.get_rank()))
    dist.all_reduce(tensor)
    return tensor.item()


def _fail_on(rank: int, how: str) -> None:
    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError("the planted error")
        if how == "exit":
            os._exit(7)
        time.sleep(60)
    dist.barrier()


def test_results_by_rank_and_world_sizes():
    assert run_distributed(_sum, 2, value=1) == [3.0, 3.0]
    assert run_distributed(_sum, 4, value=0) == [6.0] * 4
    assert run_distributed(_sum, 1, value=5) == [5.0]


@pytest.mark.parametrize(
    "how, message",
    [("raise", "the planted error"), ("exit", "code 7"), ("hang", "rank 1 stands at")],
)
def test_a_failing_rank_is_reported_and_replaced(how, message):
    started = time.monotonic()
    with pytest.raises(RankFailure, match=message):
        run_distributed(_fail_on, 2, rank=1, how=how, timeout=4)
    assert time.monotonic() - started < 30
    assert run_distributed(_sum, 2, value=1) == [3.0, 3.0]

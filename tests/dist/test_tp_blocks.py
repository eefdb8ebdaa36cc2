"""A block by itself: what a model may do with its input."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.harness import run_distributed

B, S, E, F = 2, 8, 6, 8


def changed_in_place():
    """Gradients of input and weight, where the block changes its input before its first layer."""
    from ds4d.tensor_parallel.blocks import enter
    from ds4d.tensor_parallel.layers import ColumnLinear
    from ds4d.tensor_parallel.state import TensorParallel

    rank, tp = dist.get_rank(), TensorParallel(dist.group.WORLD, scattered=True)
    torch.manual_seed(0)
    whole, x = nn.Linear(E, F, bias=False), torch.randn(B, S, E)
    part = nn.Linear(E, F // 2, bias=False)
    part.weight.data = whole.weight.detach().chunk(2)[rank].clone()
    layer = ColumnLinear(part, tp)
    mine = x.chunk(2, 1)[rank].clone().requires_grad_()
    hidden = enter(mine * 1, tp, early=True)
    hidden *= 3
    layer(hidden).square().sum().backward()
    expected = x.clone().requires_grad_()
    whole(expected * 3).square().sum().backward()
    torch.testing.assert_close(mine.grad, expected.grad.chunk(2, 1)[rank])
    torch.testing.assert_close(layer.weight.grad, whole.weight.grad.chunk(2)[rank])


def test_an_input_that_is_changed_in_place():
    run_distributed(changed_in_place, 2)


@pytest.mark.parametrize(
    "changes, same",
    [({}, True), ({"tp": 1, "dp": 2}, False), ({"sequence_parallel": True}, False),
     ({"tp_overlap": False}, True)],
)  # fmt: skip
def test_random_state_goes_on_in_the_same_place_only(changes, same):
    """Ranks of a tp group must drop the same; dp ranks must not."""
    from ds4d.resume import has_same_places

    parallel = dict(tp=2, pp=1, cp=1, dp=1, sequence_parallel=False, tp_overlap=True)
    saved, now = ({"config": {"ds4d": {"parallel": p}}} for p in (parallel, parallel | changes))
    assert has_same_places(saved, now) == same

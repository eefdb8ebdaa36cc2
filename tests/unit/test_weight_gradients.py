"""Weight gradients that come later are those of an ordinary backward pass, wherever they go."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from ds4d.weight_gradients import deferring, make_deferrable


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = Conv1D(5, 8)
        self.twice = nn.Linear(5, 5, bias=False)
        self.frozen = nn.Linear(5, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x).tanh())
        return self.frozen(self.twice(self.twice(x)))


def plain_and_deferrable() -> tuple[Layers, Layers]:
    torch.manual_seed(0)
    plain = Layers()
    late = copy.deepcopy(plain)
    make_deferrable(late)
    return plain, late


def gradients(module: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: param.grad for name, param in module.named_parameters()}


@pytest.mark.parametrize("recompute", [False, True])
def test_late_gradients_of_several_micro_batches(recompute):
    plain, late = plain_and_deferrable()
    for _ in range(3):
        x = torch.randn(2, 3, 6)
        plain(x).square().sum().backward()
        mine = x.clone().requires_grad_()
        out = checkpoint(late, mine, use_reentrant=False) if recompute else late(mine)
        before = None if late.first.weight.grad is None else late.first.weight.grad.clone()
        with deferring() as deferred:
            out.square().sum().backward()
        torch.testing.assert_close(late.first.weight.grad, before)
        deferred.compute()
        torch.testing.assert_close(gradients(late), gradients(plain))
        assert not deferred.products
    assert late.frozen.weight.grad is None


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_who_watches_a_parameter_is_told(register):
    plain, late = plain_and_deferrable()
    told = []
    getattr(late.first.weight, register)(lambda _: told.append("told"))
    for _ in range(2):
        plain(torch.ones(1, 3, 6)).sum().backward()
        with deferring() as deferred:
            late(torch.ones(1, 3, 6)).sum().backward()
        told.clear()
        deferred.compute()
        assert told == ["told"]
    torch.testing.assert_close(gradients(late), gradients(plain))

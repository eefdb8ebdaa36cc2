"""Gradients of weights that are computed later than those of inputs.

The backward pass of a product y = x W^T is two products: one for the gradient of x, which the
layers before wait for, and one for that of W, for which nobody waits. A schedule like zb-h1 or zbv puts
the second one where a rank would be idle (Qi et al. 2024, arXiv 2401.10241). Within ``deferring``
the products that know of it (``linear``, and those of tensor parallelism) leave the second one
behind; ``Deferred.compute`` makes up for it. All other gradients come at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from transformers.pytorch_utils import Conv1D


@dataclass
class Deferred:
    """Of one backward pass: where the gradients of weights go, and of the products the gradients of
    the outputs and the inputs, as in ``weight_gradient``."""

    products: list[tuple[GradientEdge, Tensor, Tensor]] = field(default_factory=list)

    def compute(self) -> None:
        """Accumulate the gradients, once; what was kept is let go as it is used."""
        self.products.reverse()
        while self.products:
            _accumulate(*self.products.pop())


@torch.no_grad()
def _accumulate(edge: GradientEdge, grad: Tensor, x: Tensor) -> None:
    """Add grad^T x to the gradient of a weight, in the product itself where the edge is that of a
    parameter which nobody watches; else as autograd does, by a sum of its own."""
    weight = getattr(edge.node, "variable", None)
    watched = weight is None or weight._backward_hooks or weight._post_accumulate_grad_hooks
    if watched:
        torch.autograd.backward(edge, grad.T @ x)
    elif weight.grad is None:
        weight.grad = grad.T @ x
    else:
        weight.grad.addmm_(grad.T, x)


_deferred: Deferred | None = None  # of the backward pass that runs; on GPUs that is another thread


@contextmanager
def deferring() -> Iterator[Deferred]:
    """Backward passes within leave weight gradients behind."""
    global _deferred
    _deferred = Deferred()
    try:
        yield _deferred
    finally:
        _deferred = None


def weight_gradient(weight: Tensor, grad: Tensor, x: Tensor) -> Tensor | None:
    """For a backward pass to return: the gradient, or nothing when it is computed later.

    Args:
        grad: of the output, [N, O].
        x: the input, [N, I].
    """
    if _deferred is None:
        return grad.T @ x
    # Where a layer was recomputed, ``weight`` is another tensor than the parameter: it leads there
    # as long as this pass's graph lives, and the edge does for ever. The input goes without its
    # past, which is the whole way back to the input of the chunk.
    _deferred.products.append((get_gradient_edge(weight), grad, x.detach()))
    return None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])  # [N, O]
        grad_x = grad @ weight if needs_x else None
        grad_weight = None
        if needs_weight:
            grad_weight = weight_gradient(weight, rows, x.reshape(-1, x.shape[-1]))
        return grad_x, grad_weight, rows.sum(0) if needs_bias else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x W^T + b, [..., I] -> [..., O], whose weight gradient can be deferred."""
    return _Linear.apply(x, weight, bias)


def make_deferrable(module: nn.Module) -> None:
    """Let the linear layers below ``module`` use ``linear``, where they are transformers' plain
    ones."""
    for layer in module.modules():
        if type(layer).forward in (nn.Linear.forward, Conv1D.forward):
            transposed = isinstance(layer, Conv1D)
            layer.forward = partial(_forward, layer, transposed)


def _forward(layer: nn.Module, transposed: bool, x: Tensor) -> Tensor:
    return linear(x, layer.weight.T if transposed else layer.weight, layer.bias)

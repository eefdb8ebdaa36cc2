"""Attention with log-sum-exp: one autograd function around a way to compute it.

Letters: B sequences, H heads, K key/value heads, q queries, k keys, D head dim, T = B * q tokens.

A way computes ``out`` and, for each query and head, ``lse``, the logarithm of the sum of
exp(score). These two are all that the backward pass needs besides the inputs, so nothing of size
q x k is kept. A sink is one more term in that sum: it is added here, after any of the ways, since
weights exp(score - lse) and the backward formulas hold for whatever lse they are given.

A query that sees no key has out = 0 and lse = 0; its weights are exp(-inf - 0) = 0.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.autograd.function import once_differentiable

from ds4d.attention.flash_ops import Options, Runs, flash_ops


def rows_together(x: torch.Tensor) -> torch.Tensor:
    """With the numbers of the last dim beside each other in memory."""
    return x if x.stride(-1) == 1 else x.contiguous()


class Way(Protocol):
    def forward(self, query, key, value, bias) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns: out [B, q, H, D], lse fp32 [B, q, H]."""

    def backward(self, grad_out, query, key, value, bias, out, lse) -> tuple:
        """Returns: gradients of query, key, value, bias, in their shapes."""


class Attend(torch.autograd.Function):
    """query [B, H, q, D], key, value [B, K, k, D], sinks [H] | [B, q, H] | None, bias | None
    -> [B, q, H, D]"""

    @staticmethod
    def forward(ctx, query, key, value, sinks, bias, way: Way):
        with torch.autocast(query.device.type, enabled=False):  # its dtypes are its own matter
            out, lse = way.forward(query, key, value, bias)
        if sinks is not None:
            total = torch.logaddexp(lse, sinks.to(lse.dtype))
            out = (out * (lse - total).exp().unsqueeze(-1)).to(out.dtype)
            lse = total
        ctx.save_for_backward(query, key, value, sinks, bias, out, lse)
        ctx.way = way
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_out):
        query, key, value, sinks, bias, out, lse = ctx.saved_tensors
        grad_out = rows_together(grad_out)
        dq, dk, dv, dbias = ctx.way.backward(grad_out, query, key, value, bias, out, lse)
        dsinks = None
        if sinks is not None:
            spent = (sinks.to(lse.dtype) - lse).exp()  # the weight that went to the sink
            dsinks = -(spent * (grad_out * out).sum(-1)).sum_to_size(sinks.shape).to(sinks.dtype)
        return dq, dk, dv, dsinks, dbias, None


class CudaFlash:
    """Flash attention for CUDA, over runs of tokens. The runs are the documents; without any, the
    rows."""

    def __init__(self, call) -> None:
        batch, _, num_tokens, _ = call.query.shape
        documents, device = call.visible.documents, call.query.device
        if documents is None:
            total = batch * num_tokens
            bounds = torch.arange(0, total + 1, num_tokens, dtype=torch.int32, device=device)
            longest = num_tokens
        else:
            bounds, longest = documents.bounds, documents.max_length
        window = call.visible.window
        before = -1 if window is None else window - 1  # the query itself does not count
        self.ops = flash_ops()
        self.runs = Runs(bounds, bounds, longest, longest, (before, 0))
        self.options = Options(call.scale, call.dropout, call.softcap)

    def forward(self, query, key, value, bias):
        batch, heads, num_tokens, depth = query.shape
        q, k, v = map(_flat, (query, key, value))
        out, lse, self.drawn = self.ops.forward(q, k, v, self.runs, self.options)
        return out.view(batch, num_tokens, heads, depth), lse.T.view(batch, num_tokens, heads)

    def backward(self, grad_out, query, key, value, bias, out, lse):
        batch, _, num_tokens, _ = query.shape
        q, k, v = map(_flat, (query, key, value))
        grads = self.ops.backward(
            *(grad_out.flatten(0, 1), q, k, v, out.flatten(0, 1)),
            *(lse.flatten(0, 1).T.contiguous(), self.drawn, self.runs, self.options),
        )
        rows = (grad.unflatten(0, (batch, num_tokens)).transpose(1, 2) for grad in grads)
        return *rows, None


def _flat(x: torch.Tensor) -> torch.Tensor:  # [B, H, q, D] -> [T, H, D]
    return x.transpose(1, 2).flatten(0, 1)

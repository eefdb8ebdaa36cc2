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
    """torch's flash attention for CUDA, in its form for runs of tokens. The runs are the documents;
    without any, the rows."""

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
        self.runs = (bounds, bounds, longest, longest, call.dropout, window is None)
        self.options = {
            "scale": call.scale,
            # "left" does not count the query itself
            "window_size_left": -1 if window is None else window - 1,
            "window_size_right": 0,
        }

    def forward(self, query, key, value, bias):
        batch, heads, num_tokens, depth = query.shape
        q, k, v = map(_flat, (query, key, value))
        out, lse, *self.random, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, *self.runs, False, **self.options
        )
        return out.view(batch, num_tokens, heads, depth), lse.T.view(batch, num_tokens, heads)

    def backward(self, grad_out, query, key, value, bias, out, lse):
        batch, _, num_tokens, _ = query.shape
        q, k, v = map(_flat, (query, key, value))
        grads = torch.ops.aten._flash_attention_backward(
            grad_out.flatten(0, 1).contiguous(),
            *(q, k, v, out.flatten(0, 1), lse.flatten(0, 1).T.contiguous()),
            *self.runs,
            *self.random,
            **self.options,
        )
        rows = (grad.unflatten(0, (batch, num_tokens)).transpose(1, 2) for grad in grads)
        return *rows, None


def _flat(x: torch.Tensor) -> torch.Tensor:  # [B, H, q, D] -> [T, H, D]
    return x.transpose(1, 2).flatten(0, 1)

"""A plain model of torch's CUDA-only ops for flash attention over runs of tokens."""

from __future__ import annotations

import pytest
import torch


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", _forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", _backward)


def _forward(
    query, key, value, cum_q, cum_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale, window_size_left, window_size_right,
):  # fmt: skip
    _check(query, key, value, cum_q, cum_k, max_q, max_k)
    assert not return_debug_mask and dropout_p == 0.0
    out, lse = query.new_empty(query.shape), query.new_empty(query.shape[1::-1])
    for a, z in zip(cum_q[:-1], cum_q[1:]):
        window = window_size_left, window_size_right
        scores = _scores(query[a:z], key[a:z], is_causal, scale, *window)
        lse[:, a:z] = scores.logsumexp(-1)
        out[a:z] = _weigh(scores.softmax(-1), value[a:z])
    return out, lse, torch.tensor(0), torch.tensor(0), torch.tensor(0)


def _backward(
    grad_out, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, is_causal,
    random, unused, *, scale, window_size_left, window_size_right,
):  # fmt: skip
    _check(query, key, value, cum_q, cum_k, max_q, max_k)
    assert grad_out.shape == out.shape == query.shape and lse.shape == query.shape[1::-1]
    assert lse.is_contiguous() and dropout_p == 0.0
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    for a, z in zip(cum_q[:-1], cum_q[1:]):
        with torch.enable_grad():
            run = [x[a:z].detach().requires_grad_() for x in (query, key, value)]
            scores = _scores(*run[:2], is_causal, scale, window_size_left, window_size_right)
            weights = (scores - lse[:, a:z, None]).exp()
            part = _weigh(weights, run[2])
        delta = (grad_out[a:z] * out[a:z]).sum(-1)  # of the whole softmax, sinks and all
        seeds = grad_out[a:z], -delta.T[..., None] * weights.detach()
        found = torch.autograd.grad((part, scores), run, seeds)
        for grad, x in zip(grads, found):
            grad[a:z] = x
    return tuple(grads)


def _check(query, key, value, cum_q, cum_k, max_q, max_k) -> None:
    total = query.shape[0]
    assert query.ndim == key.ndim == value.ndim == 3 and key.shape == value.shape
    assert cum_q.dtype == torch.int32 and cum_q is cum_k and max_q == max_k
    assert cum_q[0] == 0 and cum_q[-1] == total and max_q == cum_q.diff().max()


def _scores(query, key, is_causal, scale, left, right) -> torch.Tensor:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    ahead = torch.arange(len(key)) - torch.arange(len(query))[:, None]
    hidden = ahead > 0 if is_causal else ahead > right
    return scores.masked_fill(hidden | ((left >= 0) & (-ahead > left)), -torch.inf)


def _weigh(weights, value) -> torch.Tensor:
    value = value.repeat_interleave(weights.shape[0] // value.shape[1], dim=1)
    return torch.einsum("hqk,khd->qhd", weights, value)

"""Plain models of what runs on CUDA only: flash attention over runs of tokens, torch's ops and the
package ``flash_attn``. They check what they are given, and take windows as the kernels do
(flash_attn 2.8, csrc/flash_attn: flash_api.cpp, mask.h)."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

from ds4d.attention import flash_ops

calls: list[str] = []  # forward and backward, as they come


def install(monkeypatch: pytest.MonkeyPatch, ops: str = "torch") -> None:
    calls.clear()
    flash_ops._has_package.cache_clear()
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", torch_forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", torch_backward)
    if ops == "flash_attn":
        package, interface = ModuleType("flash_attn"), ModuleType("flash_attn_interface")
        package.__spec__ = object()  # it is found
        package.__path__ = []
        interface._wrapped_flash_attn_varlen_forward = package_forward
        interface._wrapped_flash_attn_varlen_backward = package_backward
        monkeypatch.setitem(sys.modules, "flash_attn", package)
        monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)


def torch_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
    scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert not return_debug_mask
    out, lse = _forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, scale, is_causal,
        window_size_left, window_size_right, 0.0,
    )  # fmt: skip
    return out, lse, torch.empty(2, dtype=torch.uint64), torch.empty(0), torch.empty(0)


def torch_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
    is_causal, rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    assert rng_state.dtype == torch.uint64 and unused is not None
    return _backward(
        grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p,
        scale, is_causal, window_size_left, window_size_right, 0.0,
    )  # fmt: skip


# As in the package's flash_attn_interface.py, 2.7.0 to 2.8.3.


def package_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
    causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
    return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None,
):  # fmt: skip
    assert not return_softmax
    assert alibi_slopes is block_table is leftpad_k is seqused_k is None
    out, lse = _forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size_left, window_size_right, softcap,
    )  # fmt: skip
    return out, lse, torch.empty(0), torch.empty(2, dtype=torch.int64)


def package_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
    max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
    alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    assert alibi_slopes is None and deterministic is False
    found = _backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
    )  # fmt: skip
    for grad, x in zip((dq, dk, dv), found):
        assert grad.is_contiguous() and grad.dtype == x.dtype
        grad.copy_(x)
    return torch.empty(0)


def _forward(query, key, value, cum_q, cum_k, max_q, max_k, dropout_p, scale, *mask):
    calls.append("forward")
    assert dropout_p == 0.0
    out = query.new_empty(query.shape)
    lse = query.new_empty(query.shape[1::-1], dtype=_sums(query))
    for q, k in _runs(query, key, value, cum_q, cum_k, max_q, max_k):
        scores = _scores(query[q], key[k], scale, max_k, *mask)
        found = scores.logsumexp(-1)
        weights = (scores - found.masked_fill(found == -torch.inf, 0.0).unsqueeze(-1)).exp()
        lse[:, q] = found.masked_fill(found == -torch.inf, torch.inf)  # it sees nothing
        out[q] = _weigh(weights, value[k]).to(out.dtype)
    return out, lse


def _backward(
    grad_out, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, dropout_p, scale, *mask
):
    calls.append("backward")
    assert dropout_p == 0.0 and grad_out.shape == out.shape == query.shape
    assert grad_out.dtype == out.dtype == query.dtype and lse.dtype == _sums(query)
    assert grad_out.stride(-1) == out.stride(-1) == 1
    assert lse.is_contiguous() and lse.shape == query.shape[1::-1]
    grads = [torch.zeros_like(x) for x in (query, key, value)]
    for q, k in _runs(query, key, value, cum_q, cum_k, max_q, max_k):
        with torch.enable_grad():
            run = [
                x[of].detach().to(_sums(query)).requires_grad_()
                for x, of in zip((query, key, value), (q, k, k))
            ]  # fmt: skip
            scores = _scores(*run[:2], scale, max_k, *mask)
            weights = (scores - lse[:, q, None]).exp()
            part = _weigh(weights, run[2])
        delta = (grad_out[q].to(_sums(query)) * out[q]).sum(-1)  # of all keys, sinks and all
        seeds = grad_out[q].to(part.dtype), -delta.T[..., None] * weights.detach()
        for grad, x in zip(grads, torch.autograd.grad((part, scores), run, seeds)):
            grad[k if grad is not grads[0] else q] = x.to(grad.dtype)
    return tuple(grads)


def _runs(query, key, value, cum_q, cum_k, max_q, max_k):
    assert query.ndim == key.ndim == value.ndim == 3 and key.shape == value.shape
    assert query.shape[2] == key.shape[2] <= 256 and query.shape[2] % 8 == 0
    assert query.shape[1] % key.shape[1] == 0 and query.dtype == key.dtype == value.dtype
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    assert cum_q.shape == cum_k.shape
    for tokens, bounds, longest in ((query, cum_q, max_q), (key, cum_k, max_k)):
        assert bounds.dtype == torch.int32 and bounds.is_contiguous() and bounds.diff().min() > 0
        assert bounds[0] == 0 and bounds[-1] == len(tokens) and longest >= bounds.diff().max()
        assert isinstance(longest, int)
    q, k = cum_q.tolist(), cum_k.tolist()
    yield from zip(map(slice, q, q[1:]), map(slice, k, k[1:]))


def _scores(query, key, scale, max_k, is_causal, left, right, softcap) -> torch.Tensor:
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    sums = _sums(query)
    scores = torch.einsum("qhd,khd->hqk", query.to(sums), key.to(sums)) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if is_causal:
        right = 0
    left, right = (-1 if side >= max_k else side for side in (left, right))
    if left < 0 and right < 0:
        return scores
    left, right = (max_k if side < 0 else side for side in (left, right))
    place = torch.arange(len(query))[:, None] + len(key) - len(query)
    distance = torch.arange(len(key)) - place
    return scores.masked_fill((distance > right) | (distance < -left), -torch.inf)


def _weigh(weights, value) -> torch.Tensor:
    value = value.repeat_interleave(weights.shape[0] // value.shape[1], dim=1)
    return torch.einsum("hqk,khd->qhd", weights, value.to(weights.dtype))


def _sums(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)

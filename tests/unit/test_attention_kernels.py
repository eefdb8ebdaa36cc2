"""Each kernel against the definition of attention, on small tensors; and what is held in memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from ds4d.attention import kernels, visible
from ds4d.attention.documents import Documents
from ds4d.attention.interface import attention
from ds4d.attention.kernels import KERNELS, Call, attend, choose
from ds4d.attention.visible import Visible, blocks, cut_mask
from tests.measures import Largest
from tests.unit import fake_flash
from tests.unit.attention_calls import (
    EXTRAS,
    VISIBLE,
    B,
    D,
    H,
    S,
    definition,
    general_mask,
    inputs,
    make_call,
)

KERNEL = {kernel.name: kernel for kernel in KERNELS}


def _assert_same(call: Call, kernel: kernels.Kernel, tolerance: float = 1e-10) -> None:
    expected = definition(call)
    seed = torch.randn(expected.shape, dtype=expected.dtype)
    # A row of scores that are all -inf has no gradient: the definition gives NaN there.
    theirs = torch.autograd.grad(expected, inputs(call), seed, materialize_grads=True)
    ours = kernel.run(call)
    torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)
    for got, want in zip(torch.autograd.grad(ours, inputs(call), seed), theirs):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@pytest.fixture
def small_blocks(monkeypatch):
    """So that even short sequences are cut into many blocks."""
    blocks.cache_clear()
    monkeypatch.setattr(visible, "SCORES", 2**12)
    yield
    blocks.cache_clear()


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("seen", VISIBLE)
def test_every_kernel_that_fits_computes_the_definition(seen, extra, small_blocks):
    call = make_call(VISIBLE[seen](), EXTRAS[extra])
    fitting = [kernel for kernel in KERNELS if kernel.fits(call)]
    assert fitting[-1].name == "plain"
    for kernel in fitting:
        if call.sinks is None and call.visible.general is not None:
            call = _without_blind_queries(call)
        _assert_same(call, kernel)


def _without_blind_queries(call: Call) -> Call:
    mask = general_mask() | torch.eye(S, dtype=torch.bool)
    if call.visible.causal:
        mask &= torch.ones(S, S).tril().bool()
    seen = Visible(
        causal=call.visible.causal,
        documents=call.visible.documents,
        general=partial(cut_mask, mask),
    )
    return replace(call, visible=seen)


@pytest.mark.parametrize("name", ["sdpa with a small mask", "cpu flash", "plain"])
def test_a_query_that_sees_nothing_gives_zero_and_no_gradient(name):
    call = make_call(Visible(general=partial(cut_mask, general_mask())), {})
    out = KERNEL[name].run(call)
    assert not out[0, 5].any()
    dq, dk, dv = torch.autograd.grad(out[0, 5].sum(), inputs(call))
    assert not (dq.any() or dk.any() or dv.any())


@pytest.mark.parametrize("value_dim", [4, 16])
@pytest.mark.parametrize("seen", ["causal", "window", "documents", "general, documents"])
def test_values_may_be_wider_or_narrower_than_queries(seen, value_dim):
    call = make_call(VISIBLE[seen](), {}, value_dim=value_dim)
    out = attend(call)
    assert out.shape == (B, S, H, value_dim)
    torch.testing.assert_close(out, definition(call), rtol=1e-10, atol=1e-10)


PICKS = [
    ("causal", {}, "cpu causal"),
    ("all", {}, "sdpa"),
    ("general", {}, "sdpa with a small mask"),
    ("documents", {}, "cpu flash"),
    ("window", {}, "cpu flash"),
    ("causal", {"sinks": (H,)}, "cpu flash"),
    ("causal", {"softcap": 1.0}, "plain"),
    ("causal", {"dropout": 0.1}, "plain"),
]


@pytest.mark.parametrize("seen, extras, name", PICKS)
def test_the_kernel_that_is_picked(seen, extras, name):
    assert choose(make_call(VISIBLE[seen](), extras)).name == name


@pytest.mark.parametrize("ops", ["torch", "flash_attn"])
@pytest.mark.parametrize("seen", ["causal", "window", "documents", "documents, window"])
def test_cuda_flash_lays_out_its_arguments_as_they_are_wanted(seen, ops, monkeypatch):
    """The ops exist on CUDA only; a plain model of them stands in, checking what it is given."""
    fake_flash.install(monkeypatch, ops)
    for extra in ("", "sinks") if ops == "torch" else ("", "sinks", "softcap"):
        _assert_same(make_call(VISIBLE[seen](), EXTRAS[extra]), KERNEL["cuda flash"])


@pytest.mark.parametrize("seen", ["causal", "documents", "window"])
def test_dropout(seen, small_blocks):
    """The same weights are dropped in the backward pass, and the mean is attention without it."""
    extras = {"dropout": 0.3, "softcap": 2.0}
    call = make_call(VISIBLE[seen](), extras)
    direction = torch.randn_like(call.value)

    def out(value: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(5)
        return attend(Call(call.query, call.key, value, call.visible, 0.3, 0.3, 2.0))

    # Attention is linear in the values, so the slope is the difference, whatever was dropped.
    seed = torch.randn(B, S, H, D, dtype=torch.float64)
    (dv,) = torch.autograd.grad(out(call.value), call.value, seed)
    difference = ((out(call.value + direction) - out(call.value)) * seed).sum()
    torch.testing.assert_close((dv * direction).sum(), difference, rtol=1e-9, atol=1e-9)

    with torch.no_grad():
        exact = definition(call)
        mean = sum(attend(call) for _ in range(60)) / 60
    assert not torch.equal(attend(call), attend(call))
    assert (mean - exact).norm() < 0.2 * exact.norm()


def test_dropout_gradient_of_queries_and_keys_is_the_slope(monkeypatch):
    monkeypatch.setattr(torch, "randint", lambda *_: 7)  # the seed of what is dropped
    call = make_call(VISIBLE["causal"](), {"dropout": 0.4})
    q, k, v = call.query[:1, :2, :6], call.key[:1, :1, :6], call.value[:1, :1, :6]
    q, k, v = q.detach(), k.detach(), v.detach()
    q.requires_grad_(), k.requires_grad_()
    attention = lambda q, k: attend(Call(q, k, v, call.visible, 0.3, 0.4))  # noqa: E731
    assert torch.autograd.gradcheck(attention, (q, k))


LONG = 4096
LONG_VISIBLE = {
    "causal": lambda: Visible(causal=True),
    "window": lambda: Visible(causal=True, window=256),
    "documents": lambda: Visible(
        causal=True,
        documents=Documents.from_ids(torch.arange(2).repeat_interleave(LONG // 2)[None]),
    ),
    "general": lambda: Visible(general=_prefix),
}


def _prefix(rows, queries, keys) -> torch.Tensor:
    q, k = torch.arange(*queries)[:, None], torch.arange(*keys)
    return ((k <= q) | (k < 100))[None, None]


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("seen", LONG_VISIBLE)
def test_no_tensor_of_sequence_times_sequence_is_made(seen, softcap):
    q, k, v = (torch.randn(1, 1, LONG, 8, requires_grad=True) for _ in range(3))
    saved = []
    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(
        lambda x: saved.append(x.numel()) or x, lambda x: x
    ):
        attend(Call(q, k, v, LONG_VISIBLE[seen](), 0.3, softcap=softcap)).sum().backward()
    assert largest.numbers <= visible.SCORES < LONG * LONG / 2
    assert sum(saved) <= 5 * q.numel()  # query, key, value, out, log-sum-exp


@pytest.mark.parametrize("split", [False, True])
def test_blocks_compute_little_that_is_not_seen(split):
    """Work next to what is visible: tiny documents, and a window much shorter than the row."""
    common = {"causal": True, "offset": 0, "general": False, "split": split}
    tiny = blocks((1, 8, 4096, 4096), window=None, lengths=(8,) * 512, **common)
    assert len(tiny) == 64 and all(block.runs == (8,) * 8 for block in tiny)
    window = blocks((1, 8, 4096, 4096), window=256, lengths=(), **common)
    assert sum(_scores(block) for block in window) <= 2 * 256 * 4096


def _scores(block: visible.Block) -> int:
    (q0, q1), (k0, k1) = block.queries, block.keys
    return (q1 - q0) * (k1 - k0)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_autocast_decides_the_dtype_and_nothing_else(softcap):
    """Inside, sums stay in fp32: as if the inputs had come in bf16."""
    q, k, v = torch.randn(3, 1, 2, 24, 8).unbind()
    documents = Documents.from_ids(torch.arange(2).repeat_interleave(12)[None])
    arguments = dict(softcap=softcap, documents=documents)
    with torch.autocast("cpu", torch.bfloat16):
        out, _ = attention(None, q, k, v, None, **arguments)
    expected, _ = attention(None, *(x.bfloat16() for x in (q, k, v)), None, **arguments)
    assert torch.equal(out, expected) and out.dtype == torch.bfloat16

"""All places of a ring in one process, with each kernel for blocks: together they are attention.

What runs on CUDA only is modelled by ``fake_flash``. On tensors without numbers torch's own
operators check what they are given, and any look at a number is an error."""

from __future__ import annotations

import inspect
import logging
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses import FakeTensorMode

from ds4d.attention import flash_blocks, flash_ops, visible
from ds4d.attention.blockwise import CpuFlash, PlainBlocks
from ds4d.attention.documents import Documents
from ds4d.attention.flash_blocks import CudaBlocks
from ds4d.attention.flash_ops import FLASH_OPS
from ds4d.attention.flash_ops import flash_ops as picked_ops
from ds4d.attention.kernels import BLOCK_KERNELS, Call, choose, run_way
from ds4d.attention.pairs import Seen, pair
from ds4d.attention.ring import _Way
from ds4d.attention.visible import Visible
from ds4d.context_parallel import zigzag
from tests.unit import fake_flash
from tests.unit.attention_calls import EXTRAS, VISIBLE, S, definition, inputs, make_call

KERNELS = {  # ops that stand for flash attention, and the kernel
    "torch": ("torch", CudaBlocks),
    "flash_attn": ("flash_attn", CudaBlocks),
    "cpu": ("torch", CpuFlash),
    "plain": ("torch", PlainBlocks),
}
CUTS = {
    "zigzag": zigzag(S, 3),
    "dealt": (((0, 25), (50, 75)), ((25, 50), (100, 125)), ((75, 100), (125, 150))),
    "not in order": (((140, 150), (0, 30)), ((40, 90), (30, 40)), ((90, 100),), ((100, 140),)),
    "one place": (((0, S),),),
}
SEEN = [name for name in VISIBLE if VISIBLE[name]().causal and not VISIBLE[name]().general]


class _AllPlaces(_Way):
    """A ring whose keys travel inside one process."""

    def __init__(self, kernel, spans, call: Call) -> None:
        visible, (batch, heads, length, _) = call.visible, call.query.shape
        self.kernel, self.spans = kernel, spans
        self.seen = Seen(
            batch, heads, length, visible.causal, visible.window,
            () if visible.documents is None else visible.documents.lengths, False,
            kernel.holds_scores, not kernel.knows_windows,
        )  # fmt: skip

    def _steps(self):
        """Tokens of a place, tokens of the keys that it needs, what for; its own come first."""
        size = len(self.spans)
        for here in range(size):
            for step in range(size):
                spans = self.spans[(here - step) % size]
                found = pair(self.spans[here], spans, self.seen)
                held = _held(spans)
                needed = [held[slice(*span)] for span in found.keys]
                if needed:
                    yield step == 0, _held(self.spans[here]), torch.cat(needed), found.blocks

    def forward(self, query, key, value, bias):
        out, lse = self.empty_output(query, key, value)
        for _, here, there, blocks in self._steps():
            mine = out[:, here], lse[:, here]
            self.add_forward(blocks, query[:, :, here], *_taken(there, key, value), *mine)
            out[:, here], lse[:, here] = mine
        return self.finished(out, lse, query, value)

    def backward(self, grad_out, query, key, value, bias, out, lse):
        output = (*self.widened(grad_out, out, like=(key, value)), lse)
        grads = self.new_grads(query, key, value)
        for _, here, there, blocks in self._steps():
            mine = query[:, :, here], *_taken(there, key, value)
            found = self.new_grads(*mine)
            self.add_backward(blocks, mine, [x[:, here] for x in output], found)
            grads[0][:, :, here] += found[0]
            for grad, part, x in zip(grads[1:], found[1:], (key, value)):
                grad[:, :, there] += part.to(x.dtype)  # as it travels
        inputs = query, key, value
        return *(grad[..., : x.shape[-1]].to(x.dtype) for grad, x in zip(grads, inputs)), None


def _held(spans) -> torch.Tensor:
    return torch.cat([torch.arange(*span) for span in spans])


def _taken(tokens, *tensors) -> list[torch.Tensor]:
    """As they arrive: heads before tokens in memory."""
    return [x[:, :, tokens].contiguous() for x in tensors]


def _attend(call: Call, kernel: type, spans) -> torch.Tensor:
    return run_way(call, lambda call: _AllPlaces(kernel(call), spans, call))


@pytest.fixture
def installed(request, monkeypatch):
    yield lambda ops: fake_flash.install(monkeypatch, ops)
    flash_ops._has_package.cache_clear()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("seen", SEEN)
@pytest.mark.parametrize("kernel", KERNELS)
def test_all_places_together_are_attention(kernel, seen, cut, installed):
    """Out and every gradient; grouped heads, sinks and softcap."""
    ops, make = KERNELS[kernel]
    installed(ops)
    extras = EXTRAS["sinks" if cut == "zigzag" else "a sink each"]
    if kernel in ("flash_attn", "plain"):
        extras = extras | EXTRAS["softcap"]
    for each in ({}, extras):
        call = make_call(VISIBLE[seen](), each)
        _assert_same(_attend(call, make, CUTS[cut]), call)


@pytest.mark.parametrize("value_dim", [4, 16])
@pytest.mark.parametrize("kernel", KERNELS)
def test_values_may_be_wider_or_narrower_than_queries(kernel, value_dim, installed):
    ops, make = KERNELS[kernel]
    installed(ops)
    call = make_call(VISIBLE["documents, window"](), {}, value_dim=value_dim)
    _assert_same(_attend(call, make, CUTS["zigzag"]), call)


@pytest.mark.parametrize("window", [1, 2, 7, 13, 24, 26, 39])
def test_windows_that_end_anywhere(window, installed):
    """Bands of more queries than keys, and of fewer."""
    installed("torch")
    lengths = torch.tensor([27, 51, 4, 68, 52, 60, 38])
    documents = Documents.from_ids(torch.arange(7).repeat_interleave(lengths).view(2, S))
    for known in (None, documents):
        call = make_call(Visible(causal=True, window=window, documents=known), {})
        for cut in ("zigzag", "not in order"):
            _assert_same(_attend(call, CudaBlocks, CUTS[cut]), call)


def _assert_same(ours: torch.Tensor, call: Call) -> None:
    expected = definition(call)
    torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)
    seed = torch.randn(expected.shape, dtype=expected.dtype)
    theirs = torch.autograd.grad(expected, inputs(call), seed)
    for got, want in zip(torch.autograd.grad(ours, inputs(call), seed), theirs):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", KERNELS)
def test_merging_in_bf16_is_as_near_as_one_call(kernel, installed):
    """What eight places find is put together in fp32."""
    ops, make = KERNELS[kernel]
    installed(ops)
    generator = torch.Generator().manual_seed(0)
    q, k, v, seed = (
        torch.randn(1, 512, heads, 32, generator=generator).bfloat16().transpose(1, 2)
        for heads in (4, 2, 2, 4)
    )  # fmt: skip

    def errors(dtype, spans) -> list[torch.Tensor]:
        tensors = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        call = Call(*tensors, Visible(causal=True), 0.2)
        out = definition(call) if spans is None else _attend(call, make, spans)
        return [out, *torch.autograd.grad(out, tensors, seed.to(dtype).transpose(1, 2))]

    exact = errors(torch.float64, None)
    one = errors(torch.bfloat16, (((0, 512),),))
    eight = errors(torch.bfloat16, zigzag(512, 8))
    for x, single, merged in zip(exact, one, eight):
        assert merged.dtype == torch.bfloat16
        assert (merged - x).norm() <= 1.5 * (single - x).norm()


@pytest.mark.parametrize("seen", ["causal", "documents, window"])
def test_dropout_in_a_ring(seen, monkeypatch):
    """The same weights are dropped in the backward pass: out is linear in the values, so that the
    slope is the difference. No two blocks of a place draw the same numbers."""
    monkeypatch.setattr(visible, "SCORES", 2**12)  # many blocks
    for cached in (pair, visible.blocks):
        cached.cache_clear()
    call = make_call(VISIBLE[seen](), {"dropout": 0.3})
    direction = torch.randn_like(call.value)
    kernel, spans = PlainBlocks(call), (((0, 64),), ((64, S),))

    def out(value: torch.Tensor) -> torch.Tensor:
        ring = _AllPlaces(kernel, spans, call)
        return run_way(replace(call, value=value), lambda _: ring)

    seed = torch.randn(2, S, 4, 8, dtype=torch.float64)
    ours = out(call.value)
    assert (ours - definition(call)).norm() > 0.1 * ours.norm()
    (dv,) = torch.autograd.grad(ours, call.value, seed)
    difference = ((out(call.value + direction) - ours) * seed).sum()
    torch.testing.assert_close((dv * direction).sum(), difference)

    ring = _AllPlaces(kernel, spans, call)
    for place in spans:
        drawn = [
            (block.rows[0], block.queries[0] + block.origin[0], block.keys[0] + block.origin[1])
            for other in spans
            for block in pair(place, other, ring.seen).blocks
        ]
        assert len(drawn) == len(set(drawn))
    for cached in (pair, visible.blocks):
        cached.cache_clear()


def test_many_short_documents_are_one_launch(installed):
    installed("torch")
    ids = torch.arange(2 * S // 3).repeat_interleave(3).view(2, S)
    call = make_call(Visible(causal=True, documents=Documents.from_ids(ids)), {})
    _attend(call, CudaBlocks, CUTS["one place"]).sum().backward()
    assert fake_flash.calls == ["forward", "backward"]


def test_rectangles_and_bands_are_few_launches(installed):
    """Squares within the window and longer ones; rectangles; a kind of band at each border."""
    installed("torch")
    lengths = torch.tensor([20, 50, 5, 30, 45] * 2)
    ids = torch.arange(10).repeat_interleave(lengths).view(2, S)
    for window, most in ((None, 1), (8, 3)):
        call = make_call(Visible(True, window, documents=Documents.from_ids(ids)), {})
        ring = _AllPlaces(CudaBlocks(call), CUTS["zigzag"], call)
        for own, *_, blocks in ring._steps():
            found = flash_blocks._launches(blocks, 50, 50, torch.device("cpu"))
            assert len(found) <= (most if own else 2) and found[0].first == own


def test_tokens_that_lie_together_are_not_copied(installed):
    call = make_call(Visible(causal=True), {})
    ring = _AllPlaces(CudaBlocks(call), CUTS["zigzag"], call)
    for *_, blocks in ring._steps():
        for launch in flash_blocks._launches(blocks, 50, 50, torch.device("cpu")):
            assert launch.queries.index is launch.keys.index is None
            assert launch.queries.take(torch.empty(1, 50, 4))._base is not None


# without numbers


def _empty_call(visible: Visible, device: str, depth: int = 64, dtype=torch.bfloat16, **extras):
    q, k, v = (
        torch.empty(2, S, heads, depth, dtype=dtype, device=device).transpose(1, 2)
        for heads in (4, 2, 2)
    )
    return Call(q, k, v, visible, 0.3, **extras)


@pytest.mark.parametrize("seen", SEEN)
def test_torch_takes_the_arguments_and_nothing_waits_for_the_device(seen):
    call = _empty_call(VISIBLE[seen](), "meta")
    tensors = inputs(call)
    for cut in ("zigzag", "not in order"):
        ring = _AllPlaces(CudaBlocks(call), CUTS[cut], call)
        out, lse = ring.forward(*tensors, None)
        assert out.shape == (2, S, 4, 64) and out.dtype == torch.bfloat16
        *grads, _ = ring.backward(torch.empty_like(out), *tensors, None, out, lse)
        assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in tensors]


@pytest.fixture
def cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    with FakeTensorMode():
        yield


def _picked(call: Call) -> type:
    return next(make for fits, make in BLOCK_KERNELS if fits(call))


PICKS = [
    ({}, "torch", CudaBlocks),
    ({"softcap": 2.0}, "torch", PlainBlocks),
    ({"softcap": 2.0}, "flash_attn", CudaBlocks),
    ({"softcap": 2.0, "dropout": 0.1}, "flash_attn", PlainBlocks),
    ({"dropout": 0.1}, "flash_attn", PlainBlocks),  # each place would draw for itself
    ({"dtype": torch.float32}, "torch", PlainBlocks),
    ({"depth": 256}, "torch", CudaBlocks),
    ({"depth": 264}, "torch", PlainBlocks),
    ({"depth": 60}, "torch", PlainBlocks),
]


@pytest.mark.parametrize("extras, ops, expected", PICKS)
def test_the_kernel_that_is_picked_on_cuda(extras, ops, expected, installed, cuda):
    installed(ops)
    call = _empty_call(Visible(causal=True), "cuda", **extras)
    assert _picked(call) is expected
    if "softcap" in extras:
        name = "cuda flash" if expected is CudaBlocks else "plain"
        assert choose(call).name == name


def test_wide_heads_need_a_gpu_with_much_shared_memory(cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))
    for depth, expected in ((192, CudaBlocks), (256, PlainBlocks)):
        assert _picked(_empty_call(Visible(causal=True), "cuda", depth)) is expected


# the ops


def test_the_package_is_used_where_it_is_installed(installed):
    installed("torch")
    assert picked_ops() is FLASH_OPS["torch"]
    installed("flash_attn")
    assert picked_ops() is FLASH_OPS["flash_attn"]


def test_a_package_that_is_too_old_is_said_and_not_used(installed, monkeypatch, caplog):
    installed("flash_attn")
    interface = SimpleNamespace(_flash_attn_varlen_forward=None)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
    with caplog.at_level(logging.WARNING):
        assert picked_ops() is FLASH_OPS["torch"]
    assert "flash_attn" in caplog.text


def test_the_models_have_torchs_signatures():
    for name in ("forward", "backward"):
        schema = getattr(torch.ops.aten, f"_flash_attention_{name}").default._schema
        parameters = inspect.signature(getattr(fake_flash, f"torch_{name}")).parameters.values()
        arguments = {argument.name: argument for argument in schema.arguments}
        assert [p.name for p in parameters] == list(arguments)[: len(parameters)]
        for p in parameters:
            assert arguments[p.name].kwarg_only == (p.kind is inspect.Parameter.KEYWORD_ONLY)

"""ds4d's attention against transformers' own, for families that differ in their attention."""

import pytest
import torch

from tests.unit.attention_models import (
    CONFIGS,
    assert_same_gradients,
    build,
    config,
    gradients,
    loss_of,
    tokens,
)

LENGTH = 40


def _padding(side: str) -> torch.Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, slice(None, 11) if side == "left" else slice(29, None)] = 0
    return mask


def _holes() -> torch.Tensor:
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[0, 9:14] = 0
    return mask


def _own_mask() -> torch.Tensor:
    """A prefix that sees itself in both directions; additive, as "eager" wants a user's own."""
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    visible[:12, :12] = True
    return torch.zeros(2, 1, LENGTH, LENGTH).masked_fill(~visible, torch.finfo(torch.float32).min)


def _restarting_positions() -> torch.Tensor:
    return torch.cat([torch.arange(13), torch.arange(17), torch.arange(10)]).expand(2, -1)


INPUTS = {
    "causal": lambda: {},
    "left padding": lambda: {"attention_mask": _padding("left")},
    "right padding": lambda: {"attention_mask": _padding("right")},
    "padding inside": lambda: {"attention_mask": _holes()},
    "own mask": lambda: {"attention_mask": _own_mask()},
    "restarting positions": lambda: {"position_ids": _restarting_positions()},
}


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("family", CONFIGS)
def test_logits_and_every_gradient_are_those_of_eager(family, inputs):
    ids, inputs = tokens(2, LENGTH), INPUTS[inputs]()
    mask = inputs.get("attention_mask")
    real = mask.bool() if mask is not None and mask.ndim == 2 else torch.ones_like(ids).bool()
    counted = real & real.roll(-1, dims=1)
    logits, grads = {}, {}
    for implementation in ("eager", "ds4d"):
        model = build(config(family), implementation).train()
        out = model(input_ids=ids, use_cache=False, **inputs).logits
        loss_of(out, ids, counted).backward()
        logits[implementation], grads[implementation] = out[real], gradients(model)
    torch.testing.assert_close(logits["ds4d"], logits["eager"], rtol=1e-5, atol=2e-6)
    assert_same_gradients(grads["ds4d"], grads["eager"])


@pytest.mark.parametrize("family", CONFIGS)
def test_no_token_sees_a_later_one(family):
    model, ids = build(config(family), "ds4d").eval(), tokens(1, LENGTH)
    changed = ids.clone()
    changed[:, 25:] = (ids[:, 25:] + 1) % 60 + 3
    before, after = (model(input_ids=x, use_cache=False).logits for x in (ids, changed))
    # not to the bit: how many tokens an expert gets changes the rounding of its products
    torch.testing.assert_close(before[:, :25], after[:, :25], rtol=0, atol=1e-6)
    assert (before[:, 25:] - after[:, 25:]).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama_gqa", "gemma2", "gpt_oss"])
def test_gradient_checkpointing_changes_nothing(family):
    ids, grads = tokens(2, LENGTH), []
    for checkpointing in (False, True):
        model = build(config(family), "ds4d").train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        logits = model(input_ids=ids, position_ids=_restarting_positions(), use_cache=False).logits
        loss_of(logits, ids, torch.ones_like(ids).bool()).backward()
        grads.append(gradients(model))
    assert_same_gradients(*grads, tolerance=1e-7)


@pytest.mark.parametrize("family", ["llama_gqa", "mistral", "gemma2", "gpt_oss"])
def test_bf16_is_no_further_from_fp32_than_eager_bf16(family):
    ids = tokens(2, LENGTH)
    inputs = {"input_ids": ids, "position_ids": _restarting_positions(), "use_cache": False}
    exact = build(config(family), "eager").eval()(**inputs).logits
    errors = {}
    for implementation in ("eager", "ds4d"):
        model = build(config(family), implementation).eval().to(torch.bfloat16)
        errors[implementation] = (model(**inputs).logits.float() - exact).norm()
    assert errors["ds4d"] < 1.05 * errors["eager"]


GENERATE = ["llama_gqa", "mistral", "gemma2", "gemma3_text", "gpt2", "gpt_oss"]


@pytest.mark.parametrize("family", GENERATE)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_greedy_generation_from_left_padded_prompts_is_that_of_eager(family, cache):
    prompts, mask = tokens(3, 12), torch.ones(3, 12, dtype=torch.long)
    mask[0, :9], mask[1, :4] = 0, 0
    prompts[mask == 0] = 0
    written = {}
    for implementation in ("eager", "ds4d"):
        model = build(config(family), implementation).eval()
        written[implementation] = model.generate(
            prompts,
            attention_mask=mask,
            max_new_tokens=14,
            min_new_tokens=14,
            do_sample=False,
            cache_implementation=cache,
            disable_compile=True,
            output_logits=True,
            return_dict_in_generate=True,
        )
    assert torch.equal(written["ds4d"].sequences, written["eager"].sequences)
    ours, theirs = (torch.stack(written[i].logits) for i in ("ds4d", "eager"))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def test_a_prompt_may_enter_the_cache_in_pieces():
    model, ids = build(config("mistral"), "ds4d").eval(), tokens(2, 30)
    whole = model(input_ids=ids).logits
    first = model(input_ids=ids[:, :17], use_cache=True)
    rest = model(input_ids=ids[:, 17:], cache=first.cache).logits
    torch.testing.assert_close(rest, whole[:, 17:], rtol=1e-5, atol=2e-6)

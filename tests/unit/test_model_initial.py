"""From scratch: the values are by Hugging Face's rules, and follow from seed and name alone."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds4d.config.types import ModelConfig
from ds4d.model.build import build_model
from ds4d.model.config import hf_config
from ds4d.model.initial import InitialValues
from ds4d.model.meta import logical_model
from tests.unit.model_families import FAMILIES, fields


def build(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **kwargs):
    model = ModelConfig(config=fields(family) | kwargs.pop("changes", {}))
    return build_model(
        model,
        config=hf_config(model),
        dtype=dtype,
        device="cpu",
        seed=seed,
        attn_implementation="eager",
        **kwargs,
    )


def hugging_face(family: str):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(hf_config(ModelConfig(config=fields(family))))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_distributed_as_hugging_face_has_it(family):
    ours, theirs = build(family), hugging_face(family)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, expected in [*theirs.named_parameters(), *theirs.named_buffers()]:
        value = ours.get_parameter_or_buffer(name)
        assert value.shape == expected.shape and value.dtype == expected.dtype, name
        if isinstance(expected, torch.nn.Parameter) and expected.std() > 0:
            count, std = expected.numel(), expected.std().item()
            assert abs(value.mean() - expected.mean()) < 7 * std / math.sqrt(count), name
            assert value.std().item() == pytest.approx(std, rel=6 / math.sqrt(2 * count)), name
        else:  # ones, zeros, rotary frequencies, slopes
            assert torch.equal(value, expected), name


@pytest.mark.parametrize("family", ["gpt2", "llama-tied", "mixtral"])
def test_values_follow_from_seed_and_name_alone(family):
    two, three = build(family), build(family, changes={_layers(family): 3})
    longer = dict(three.named_parameters())
    skipped = _scaled_by_depth(family)
    for name, value in two.named_parameters():
        if skipped not in name:
            assert torch.equal(value, longer[name]), name
    other = dict(build(family, seed=1).named_parameters())
    random = [name for name, value in two.named_parameters() if value.std() > 0]
    assert random and not any(torch.equal(other[name], two.get_parameter(name)) for name in random)
    drawn = [two.get_parameter(name).flatten()[:16] for name in random]
    assert len({tuple(values.tolist()) for values in drawn}) == len(drawn)


def _layers(family: str) -> str:
    return "n_layer" if family == "gpt2" else "num_hidden_layers"


def _scaled_by_depth(family: str) -> str:
    return "c_proj" if family == "gpt2" else "\0"


def test_a_rule_of_the_parent_module_holds():
    model = build("gpt2", changes={"n_embd": 128, "n_layer": 8})
    expected = model.config.initializer_range / math.sqrt(2 * 8)
    for layer in model.transformer.h:
        assert layer.attn.c_proj.weight.std().item() == pytest.approx(expected, rel=0.03)
        assert layer.attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.03)


def test_lower_precision_is_the_rounded_fp32_and_the_default_generator_is_left_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    half, full = build("llama", dtype=torch.bfloat16), build("llama")
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in half.named_parameters():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, full.get_parameter(name).bfloat16()), name
    assert half.model.rotary_emb.inv_freq.dtype == torch.float32


def test_tied_parameters_are_one():
    model = build("llama-tied")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not build("llama").lm_head.weight is model.model.embed_tokens.weight


def test_the_model_stays_on_meta():
    model = logical_model(hf_config(ModelConfig(config=fields("gpt2"))))
    values = InitialValues(model, seed=0)
    for name, _ in model.named_parameters():
        assert values(name).device.type == "cpu"
    assert all(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])


def test_a_tensor_without_a_rule_is_named():
    with pytest.raises(ValueError, match=r"alpha_p .*ds4d\.model\.path"):
        model = ModelConfig(config={"model_type": "apertus", **FAMILIES["llama"]})
        build_model(
            model,
            config=hf_config(model),
            dtype=torch.float32,
            device="cpu",
            seed=0,
            attn_implementation="eager",
        )


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recompute_changes_no_gradient_and_saves_memory(family, recompute):
    ids = torch.arange(48).view(2, 24) % 90 + 3
    saved, grads = {}, {}
    for word in ("none", recompute):
        changes = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        model = build(family, recompute=word, changes=changes if family == "gpt2" else {})
        sizes = {}

        def keep(tensor):
            sizes[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        saved[word] = sum(sizes.values())
        grads[word] = {name: p.grad for name, p in model.named_parameters()}
    for name, grad in grads["none"].items():
        torch.testing.assert_close(grads[recompute][name], grad, rtol=1e-5, atol=1e-7)
    assert saved[recompute] < saved["none"]


def test_selective_does_not_repeat_the_products():
    from torch.utils.flop_counter import FlopCounterMode

    ids = torch.arange(48).view(2, 24) % 90 + 3
    flops = {}
    for word in ("none", "selective", "full"):
        model = build("llama", recompute=word)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=ids, labels=ids).loss.backward()
        by_op = counter.get_flop_counts()["Global"]
        flops[word] = sum(n for op, n in by_op.items() if "bmm" not in str(op))
    assert flops["selective"] == flops["none"] < flops["full"]

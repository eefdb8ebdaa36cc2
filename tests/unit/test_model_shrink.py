"""Small models of families of very different kinds, from default configs and from real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ds4d.model.shrink import shrunken

TOKENS = 64

FAMILIES = (
    "bamba", "bloom", "codegen", "cohere2", "deepseek_v3", "dory", "falcon", "gemma2",
    "gemma3_text", "gemma3n_text", "gemma4_text", "glm4", "gpt2", "gpt_neo", "gpt_oss", "gptj",
    "hrm_text", "jamba", "llama", "llama4_text", "mamba", "mamba2", "minicpm3", "mixtral", "mpt",
    "nemotron_h", "olmo2", "opt", "phi3", "qwen2", "qwen3_moe", "qwen3_next", "recurrent_gemma",
    "smollm3", "stablelm", "xglm", "zamba2",
)  # fmt: skip

LLAMA_31 = dict(
    hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
    bos_token_id=128000, eos_token_id=[128001, 128008], dtype="bfloat16",
    rope_parameters=dict(
        rope_type="llama3", rope_theta=5e5, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
)  # fmt: skip
PHI_4_MINI = dict(
    hidden_size=3072, num_attention_heads=24, num_key_value_heads=8, vocab_size=200064,
    max_position_embeddings=131072, original_max_position_embeddings=4096,
    sliding_window=262144, eos_token_id=199999, pad_token_id=199999, tie_word_embeddings=True,
    rope_parameters=dict(
        rope_type="longrope", rope_theta=1e4, partial_rotary_factor=0.75,
        short_factor=[1.0 + i for i in range(48)], long_factor=[2.0 + i for i in range(48)],
    ),
)  # fmt: skip
YARN = dict(
    rope_type="yarn", rope_theta=1e4, factor=40, original_max_position_embeddings=4096
)  # fmt: skip


def default(model_type: str, **fields: Any) -> PreTrainedConfig:
    return CONFIG_MAPPING[model_type](**fields)


def runs(config: PreTrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.config.use_cache = False
    tokens = torch.randint(3, config.vocab_size // 2, (1, TOKENS))
    logits = model(input_ids=tokens).logits[0]
    loss = F.cross_entropy(logits[:-1], tokens[0, 1:])
    loss.backward()
    assert loss.isfinite() and logits.shape == (TOKENS, config.vocab_size)
    assert all(weight.dtype == torch.float32 for weight in model.parameters())
    assert sum(weight.numel() for weight in model.parameters()) < 5_000_000
    return model


def number(config: PreTrainedConfig, name: str) -> int | None:
    return vars(config).get(config.attribute_map.get(name, name))


def rope_types(config: PreTrainedConfig) -> Any:
    rope = getattr(config, "rope_parameters", None) or {}
    inner = {name: value["rope_type"] for name, value in rope.items() if isinstance(value, dict)}
    return inner or rope.get("rope_type")


def switches(fields: dict[str, Any]) -> dict[str, Any]:
    return {n: v for n, v in fields.items() if isinstance(v, (bool, str, float)) and n != "dtype"}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_small_model_is_of_the_same_family_and_trains(model_type):
    big = default(model_type)
    before = big.to_dict()
    small = shrunken(big)
    assert big.to_dict() == before
    assert type(small) is type(big)
    for name in ("layer_types", "layers_block_type", "mlp_layer_types", "attention_layers"):
        assert set(getattr(small, name, None) or ()) == set(getattr(big, name, None) or ()), name
    kept, was = switches(small.to_dict()), switches(before)
    assert {name: kept[name] for name in was} == was
    assert rope_types(small) == rope_types(big)
    heads, shared = (number(big, f"num_{n}_heads") for n in ("attention", "key_value"))
    if heads and shared:
        few, few_shared = (number(small, f"num_{n}_heads") for n in ("attention", "key_value"))
        assert few == few_shared * min(heads // shared, 8)
        size, few_size = number(big, "head_dim"), number(small, "head_dim")
        if size:
            whole = heads * size == big.hidden_size
            assert (few * few_size == small.hidden_size) == whole
    runs(small)


def test_the_rope_of_a_stretched_model_stays_stretched():
    small = shrunken(default("llama", **LLAMA_31))
    rope = small.rope_parameters
    ratio = small.max_position_embeddings / rope["original_max_position_embeddings"]
    assert ratio == 131072 / 8192 and rope["original_max_position_embeddings"] < TOKENS
    assert small.bos_token_id < small.vocab_size and small.dtype is None
    assert len({small.bos_token_id, *small.eos_token_id}) == 3
    runs(small)


def test_the_factors_of_longrope_fit_the_small_head():
    small = shrunken(default("phi3", **PHI_4_MINI))
    rope = small.rope_parameters
    rotary = int(small.hidden_size // small.num_attention_heads * rope["partial_rotary_factor"])
    assert len(rope["short_factor"]) == len(rope["long_factor"]) == rotary // 2
    assert small.max_position_embeddings == 32 * small.original_max_position_embeddings
    assert small.eos_token_id == small.pad_token_id < small.vocab_size
    model = runs(small)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_sections_of_a_rotary_size_add_up():
    rope = dict(rope_type="default", rope_theta=1e7, partial_rotary_factor=0.25)
    rope |= dict(mrope_section=[11, 11, 10], mrope_interleaved=True)
    small = shrunken(default("qwen3_5_text", rope_parameters=rope))
    sections = small.rope_parameters["mrope_section"]
    assert min(sections) >= 1 and sum(sections) == small.head_dim * 0.25 / 2
    runs(small)


def test_groups_of_experts_and_the_parts_of_latent_heads():
    small = shrunken(default("deepseek_v3", rope_parameters=YARN, max_position_embeddings=163840))
    assert small.first_k_dense_replace == 1 and small.num_hidden_layers == 2
    assert small.n_group == 2 and small.topk_group == 1
    assert small.num_experts_per_tok < small.n_routed_experts // small.n_group
    assert small.qk_head_dim == small.qk_nope_head_dim + small.qk_rope_head_dim
    runs(small)


def test_kinds_of_layers_that_only_numbers_make():
    small = shrunken(default("qwen2_moe", decoder_sparse_step=2, mlp_only_layers=[0, 1]))
    sparse = [hasattr(layer.mlp, "experts") for layer in runs(small).model.layers]
    assert sparse == [False, False, False, True]

    jamba = runs(shrunken(default("jamba"))).model.layers
    kinds = {(hasattr(one, "mamba"), hasattr(one.feed_forward, "experts")) for one in jamba}
    assert kinds == {(True, False), (True, True), (False, False)}

    llama4 = shrunken(default("llama4_text", interleave_moe_layer_step=2))
    assert set(llama4.no_rope_layers) == {0, 1} and 0 < len(llama4.moe_layers) < 3

    window = dict(use_sliding_window=True, max_window_layers=28, num_hidden_layers=64)
    qwen2 = shrunken(default("qwen2", **window, num_attention_heads=40, num_key_value_heads=8))
    assert qwen2.layer_types == ["full_attention", "sliding_attention"]
    assert qwen2.max_window_layers == 1 and qwen2.sliding_window < TOKENS

    bamba = shrunken(default("bamba", attn_layer_indices=[9, 18, 27]))
    assert bamba.attn_layer_indices == [1] and bamba.num_hidden_layers == 2


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "jamba", "gemma3n_text", "zamba2"])
def test_more_layers_are_made_when_more_are_wanted(model_type):
    config = default(model_type)
    assert shrunken(config, layers=9).num_hidden_layers == 9
    few = shrunken(default("llama", num_hidden_layers=1))
    assert few.num_hidden_layers == 1 and shrunken(few, layers=4).num_hidden_layers == 4


def test_a_small_config_keeps_its_numbers():
    fields = dict(vocab_size=101, hidden_size=48, intermediate_size=57, num_hidden_layers=2)
    fields |= dict(num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    config = default("llama", **fields)
    assert {name: getattr(shrunken(config), name) for name in fields} == fields


def test_parts_beside_a_text_model_are_small_too():
    small = shrunken(default("gemma3"), layers=3)
    assert small.text_config.num_hidden_layers == 3 and small.vision_config.num_hidden_layers == 1
    assert small.image_token_index < small.text_config.vocab_size


def test_a_config_without_sizes_is_said_to_have_none():
    with pytest.raises(ValueError, match="no hidden size to make smaller"):
        shrunken(PreTrainedConfig())

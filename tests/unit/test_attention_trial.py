"""Which models may have their sequences shared: found by trying, not by a list."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.llama import modeling_llama

from ds4d.attention import context, trial
from ds4d.attention.mask import LazyMask

EXACT = (
    "apertus", "cohere2", "deepseek_v3", "gemma2", "gemma3_text", "glm4_moe", "gpt2", "gpt_bigcode",
    "gpt_neox", "gpt_oss", "gptj", "granite", "llama", "llama4_text", "mistral", "mixtral", "olmo2",
    "opt", "phi", "phi3", "qwen2", "qwen3_moe", "smollm3", "stablelm", "starcoder2",
)  # fmt: skip
OTHER = "is another model on parts of a sequence"
REFUSED = {
    "bloom": "has its own attention code",
    "falcon": "has its own attention code",  # with alibi and without
    "gpt_neo": "has its own attention code",
    "mamba": "has its own attention code",
    "deepseek_v32": "picks the keys that each query sees itself",
    "jamba": OTHER,
    "zamba2": OTHER,
    "qwen3_next": OTHER,  # linear attention and convolutions
    "recurrent_gemma": OTHER,
    "bart": OTHER,  # positions that it counts itself
    "doge": "learns its attention masks",
}


def of(model_type: str, **changes):
    return CONFIG_MAPPING[model_type](**changes)


@pytest.mark.parametrize("model_type", EXACT)
def test_exact(model_type):
    assert trial.why_not_shared(of(model_type)) is None


def test_fewer_tokens_and_positions_than_are_tried():
    assert trial.why_not_shared(of("gpt2", n_positions=30, vocab_size=50)) is None


@pytest.mark.parametrize("model_type", REFUSED)
def test_refused_by_name(model_type):
    assert REFUSED[model_type] in trial.why_not_shared(of(model_type))


@pytest.mark.parametrize("rope", ["dynamic", "longrope", "yarn", "llama3"])
def test_scales_of_rotary_positions(rope):
    more = {
        "dynamic": {"factor": 2.0},
        "longrope": {
            "factor": 4.0, "original_max_position_embeddings": 4096,
            "short_factor": [1.0] * 64, "long_factor": [3.0] * 64,
        },
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
        "llama3": {
            "factor": 8.0, "original_max_position_embeddings": 4096, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    }[rope]  # fmt: skip
    parameters = {"rope_type": rope, "rope_theta": 10000.0, **more}
    config = of("llama", max_position_embeddings=16384, rope_parameters=parameters)
    assert trial.why_not_shared(config) is None


def _local_positions(forward):
    def rotary(self, x, position_ids, *args, **kwargs):
        local = torch.arange(position_ids.shape[-1]).expand_as(position_ids)
        return forward(self, x, local, *args, **kwargs)

    return rotary


def _sees_its_neighbour(forward):
    def mlp(self, x):
        return forward(self, x) + 0.1 * x.roll(1, dims=1)

    return mlp


def _sees_the_mean(forward):
    def mlp(self, x):
        return forward(self, x) - x.mean(dim=1, keepdim=True)

    return mlp


PLANTED = {
    "local positions": (modeling_llama.LlamaRotaryEmbedding, "forward", _local_positions),
    "a token's neighbour": (modeling_llama.LlamaMLP, "forward", _sees_its_neighbour),
    "the mean of all tokens": (modeling_llama.LlamaMLP, "forward", _sees_the_mean),
    "documents forgotten": (
        LazyMask, "of_cut", lambda of_cut: lambda self, cut: _without_documents(of_cut(self, cut))
    ),
}  # fmt: skip


def _without_documents(mask: LazyMask) -> LazyMask:
    visible = mask.visible
    mask.visible = lambda documents: visible(None)
    return mask


@pytest.mark.parametrize("fault", PLANTED)
def test_what_is_wrong_is_found(fault):
    owner, name, change = PLANTED[fault]
    with mock.patch.object(owner, name, change(getattr(owner, name))):
        reason = trial.why_not_shared(of("llama"))
    assert reason is not None and ("parts of a sequence" in reason or "does not run" in reason)


def test_a_longest_position_of_one_rank_alone_is_found():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = of("llama", max_position_embeddings=16384, rope_parameters=rope)
    small = trial.shrunken(config)
    small.max_position_embeddings = trial.LENGTH - 8  # more than the second rank's positions
    with mock.patch.object(trial, "shrunken", lambda _: small):
        assert trial.why_not_shared(config) is None
        with mock.patch.object(context, "_follows_length", lambda _: False):
            assert OTHER in trial.why_not_shared(config)


def test_random_numbers_stay_where_they_are():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    trial.why_not_shared(of("llama"))
    assert torch.equal(torch.rand(2), expected)


def test_a_scale_by_length_inside_of_a_layer_is_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = of("llama", max_position_embeddings=16384, rope_parameters=rope)
    init = modeling_llama.LlamaAttention.__init__

    def with_rotary(self, config, layer_idx):
        init(self, config, layer_idx)
        self.rotary = modeling_llama.LlamaRotaryEmbedding(config)

    with mock.patch.object(modeling_llama.LlamaAttention, "__init__", with_rotary):
        reason = trial.why_not_shared(config)
    assert "model.layers.0.self_attn.rotary follows from the length of a sequence" in reason

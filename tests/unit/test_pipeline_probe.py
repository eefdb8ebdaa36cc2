"""What is found out about models before they are cut into stages."""

from __future__ import annotations

from functools import wraps

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from transformers.models.llama import modeling_llama

from ds4d.pipeline.check import why_not_generated, why_not_staged
from ds4d.pipeline.probe import probe
from tests.tp_families import FAMILIES, with_layers


def config_of(name: str, layers: int = 4):
    return AutoConfig.for_model(**with_layers(FAMILIES[name], layers))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_of_the_tensor_parallel_tests_can_be_cut(name):
    assert why_not_staged(config_of(name)) is None
    assert why_not_generated(config_of(name)) is None


def test_what_stands_before_and_after_the_layers():
    anatomy = probe(config_of("gpt2"))
    assert anatomy.stack == "transformer.h" and len(anatomy.outputs) == 4
    assert anatomy.before == ["transformer.wte", "transformer.wpe"]
    assert anatomy.after == ["transformer.ln_f", "lm_head"]
    assert (anatomy.width, anatomy.fp32_hidden) == (48, False)
    bloom = probe(config_of("bloom"))
    assert "transformer.word_embeddings_layernorm" in bloom.before
    assert bloom.outputs == [2] * 4  # a hidden state, and attention weights


def llama_with(monkeypatch, forward) -> str | None:
    """Why not, of a llama whose base model runs its layers by ``forward(model, hidden, call)``."""

    def run(self, input_ids=None, inputs_embeds=None, position_ids=None, **kwargs):
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        tables = self.rotary_emb(hidden, position_ids)

        def call(layer, x, **more):
            return layer(x, position_embeddings=tables, **more)

        return (self.norm(forward(self, hidden, call)),)

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", run)
    return why_not_staged(config_of("llama"))


def in_turn(model, hidden, call):
    for layer in model.layers:
        hidden = call(layer, hidden)
    return hidden


def with_the_embedding_again(model, hidden, call):
    embedded = hidden
    for layer in model.layers:
        hidden = call(layer, hidden) + embedded
    return hidden


def with_the_first_output_at_the_end(model, hidden, call):
    outputs = []
    for layer in model.layers:
        hidden = call(layer, hidden)
        outputs.append(hidden)
    return hidden + outputs[0]


def with_an_earlier_state_as_an_argument(model, hidden, call):
    embedded = hidden
    for layer in model.layers:
        hidden = call(layer, hidden, earlier=embedded)
    return hidden


def with_a_list_that_layers_fill(model, hidden, call):
    shared: list = []
    for layer in model.layers:
        hidden = call(layer, hidden, shared=shared)
    return hidden


def twice(model, hidden, call):
    return in_turn(model, in_turn(model, hidden, call), call)


def backwards(model, hidden, call):
    for layer in reversed(model.layers):
        hidden = call(layer, hidden)
    return hidden


def without_the_last(model, hidden, call):
    for layer in model.layers[:-1]:
        hidden = call(layer, hidden)
    return hidden


@pytest.mark.parametrize(
    "forward, reason",
    [
        (in_turn, None),
        (with_the_embedding_again, "takes something else than layer 0 returns"),
        (with_the_first_output_at_the_end, "not made of the last layer's output alone"),
        (with_an_earlier_state_as_an_argument, "takes more that is learned"),
        (with_a_list_that_layers_fill, "share a list"),
        (twice, "layer 0 is called as number 4"),
        (backwards, "layer 3 is called as number 0"),
        (without_the_last, "model.norm is used between layers"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_a_cut_would_make_another_model_of_is_refused(monkeypatch, forward, reason):
    found = llama_with(monkeypatch, forward)
    assert found is None if reason is None else reason in found


def test_weights_that_layers_share_are_refused(monkeypatch):
    made = modeling_llama.LlamaModel.__init__

    def with_one_mlp(self, config):
        made(self, config)
        self.layers[2].mlp = self.layers[0].mlp

    monkeypatch.setattr(modeling_llama.LlamaModel, "__init__", with_one_mlp)
    assert "one weight in two places" in why_not_staged(config_of("llama"))


def test_layers_tied_by_name_are_refused(monkeypatch):
    ties = {"model.layers.1.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight"}
    monkeypatch.setattr(
        modeling_llama.LlamaForCausalLM, "get_expanded_tied_weights_keys", lambda *_, **__: ties
    )
    assert "one weight in two places" in why_not_staged(config_of("llama"))


def test_a_residual_stream_in_fp32_is_seen(monkeypatch):
    def in_fp32(model, hidden, call):
        return in_turn(model, hidden.float(), call)

    layer = modeling_llama.LlamaDecoderLayer
    forward = layer.forward

    def keep(self, hidden_states, **kwargs):
        return hidden_states + forward(self, hidden_states.bfloat16(), **kwargs).float()

    monkeypatch.setattr(layer, "forward", keep)
    assert llama_with(monkeypatch, in_fp32) is None
    assert probe(config_of("llama")).fp32_hidden


def test_parameters_that_belong_to_the_model_itself_are_refused(monkeypatch):
    made = modeling_llama.LlamaModel.__init__

    def with_scale(self, config):
        made(self, config)
        self.scale = nn.Parameter(torch.ones(()))

    monkeypatch.setattr(modeling_llama.LlamaModel, "__init__", with_scale)
    assert "parameters that are in no module" in why_not_staged(config_of("llama"))


@pytest.mark.parametrize("model_type", ["mamba", "openai-gpt"])
def test_states_in_a_cache_of_transformers_and_no_cache_at_all_can_generate(model_type):
    assert why_not_generated(AutoConfig.for_model(model_type)) is None


def test_what_a_text_leaves_elsewhere_than_in_a_cache_of_transformers_is_refused(monkeypatch):
    assert "a text, state, is no cache" in why_not_generated(AutoConfig.for_model("rwkv"))
    forward = modeling_llama.LlamaModel.forward

    @wraps(forward)
    def with_own_cache(self, *args, **kwargs):
        output = forward(self, *args, **kwargs)
        output.cache = [(layer.keys, layer.values) for layer in output.cache.layers]
        return output

    monkeypatch.setattr(modeling_llama.LlamaModel, "forward", with_own_cache)
    assert "cache, is no cache of transformers" in why_not_generated(config_of("llama"))


@pytest.mark.parametrize(
    "model_type, reason",
    [("cpmant", "more that is learned"), ("dory", "takes something else"), ("blt", "no list of")],
)
def test_families_that_cannot_be_cut(model_type, reason):
    assert reason in why_not_staged(AutoConfig.for_model(model_type))

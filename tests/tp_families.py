"""Tiny configs of the families that tensor parallelism must get right, odd sizes on purpose."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

COMMON = dict(
    vocab_size=101,
    hidden_size=48,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
GPT2_LIKE = dict(
    vocab_size=101, n_embd=48, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
)
NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
FALCON = dict(
    vocab_size=101, hidden_size=64, num_hidden_layers=2, num_attention_heads=8,
    bos_token_id=1, eos_token_id=2, pad_token_id=0, hidden_dropout=0.0, attention_dropout=0.0,
)  # fmt: skip
MOE = dict(num_experts_per_tok=2, num_local_experts=4)
WINDOW = dict(sliding_window=8)


def _with(model_type: str, *parts: dict, drop: tuple[str, ...] = (), **fields) -> dict[str, Any]:
    merged: dict[str, Any] = {"model_type": model_type}
    for part in parts:
        merged |= part
    return {name: value for name, value in {**merged, **fields}.items() if name not in drop}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _with("llama", COMMON),
    "llama tied": _with("llama", COMMON, tie_word_embeddings=True),
    "llama with biases": _with("llama", COMMON, attention_bias=True, mlp_bias=True),
    "llama, odd inner size": _with("llama", COMMON, intermediate_size=57),
    "llama, one key head": _with("llama", COMMON, num_key_value_heads=1),
    "llama, 10 heads, 5 key heads": _with(
        "llama", COMMON, hidden_size=80, num_attention_heads=10, num_key_value_heads=5
    ),
    "llama, 20 heads, 10 key heads": _with(
        "llama", COMMON, hidden_size=80, num_attention_heads=20, num_key_value_heads=10
    ),
    "llama, 9 heads, 3 key heads": _with(
        "llama", COMMON, hidden_size=72, num_attention_heads=9, num_key_value_heads=3
    ),
    "mistral": _with("mistral", COMMON, WINDOW),
    "qwen2": _with("qwen2", COMMON),
    "qwen3": _with("qwen3", COMMON, head_dim=16),
    "gemma": _with("gemma", COMMON, head_dim=16),
    "gemma2": _with("gemma2", COMMON, WINDOW, head_dim=16, query_pre_attn_scalar=16),
    "gemma3_text": _with(
        "gemma3_text", COMMON, WINDOW, head_dim=16,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "phi": _with("phi", COMMON),
    "phi3": _with("phi3", COMMON),
    "gpt2": _with("gpt2", GPT2_LIKE, NO_DROPOUT),
    "gpt_neox": _with("gpt_neox", COMMON, drop=("num_key_value_heads", "pad_token_id")),
    "gptj": _with("gptj", GPT2_LIKE, NO_DROPOUT, rotary_dim=8),
    "codegen": _with("codegen", GPT2_LIKE, NO_DROPOUT, n_embd=64, rotary_dim=8),
    "bloom": _with("bloom", vocab_size=101, hidden_size=48, n_layer=2, n_head=4),
    "falcon, one key head": _with("falcon", FALCON, multi_query=True, alibi=False),
    "falcon, groups": _with(
        "falcon", FALCON, new_decoder_architecture=True, num_kv_heads=4, alibi=False
    ),
    "falcon, alibi": _with("falcon", FALCON, multi_query=False, alibi=True, bias=True),
    "opt": _with(
        "opt", COMMON, drop=("num_key_value_heads", "intermediate_size"),
        ffn_dim=56, word_embed_proj_dim=48, dropout=0.0,
    ),
    "olmo2": _with("olmo2", COMMON),
    "starcoder2": _with("starcoder2", COMMON, residual_dropout=0.0, embedding_dropout=0.0),
    "stablelm": _with("stablelm", COMMON, hidden_size=64, hidden_dropout=0.0),
    "granite": _with(
        "granite", COMMON, logits_scaling=2.0, residual_multiplier=0.5, embedding_multiplier=2.0
    ),
    "cohere": _with("cohere", COMMON, logit_scale=0.5),
    "cohere, norms by head": _with("cohere", COMMON, logit_scale=0.5, use_qk_norm=True),
    "smollm3": _with("smollm3", COMMON),
    "persimmon": _with(
        "persimmon", COMMON, drop=("num_key_value_heads",), hidden_size=64, hidden_dropout=0.0
    ),
    "gpt_bigcode": _with("gpt_bigcode", GPT2_LIKE, NO_DROPOUT),
    "gpt_neo": _with(
        "gpt_neo", vocab_size=101, hidden_size=48, num_layers=2, num_heads=4,
        attention_types=[[["global", "local"], 1]], window_size=8, max_position_embeddings=64,
        resid_dropout=0.0, embed_dropout=0.0, attention_dropout=0.0,
    ),
    "qwen2_moe": _with(
        "qwen2_moe", COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=64,
    ),
    "deepseek_v3": _with(
        "deepseek_v3", COMMON, num_key_value_heads=4, intermediate_size=64, n_group=1,
        moe_intermediate_size=32, n_routed_experts=4, num_experts_per_tok=2, topk_group=1,
        kv_lora_rank=16, q_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
        first_k_dense_replace=1, n_shared_experts=1,
    ),
    "llama4_text": _with(
        "llama4_text", COMMON, head_dim=16, intermediate_size=64, intermediate_size_mlp=64,
        num_local_experts=4, moe_layers=[1], attention_chunk_size=8, no_rope_layer_interval=2,
        floor_scale=4,
    ),
    "mixtral": _with("mixtral", COMMON, MOE, intermediate_size=64),
    "gpt_oss": _with("gpt_oss", COMMON, MOE, WINDOW, head_dim=16, intermediate_size=64),
}  # fmt: skip

# With a loss of their routers; large, so that gradients show it.
BALANCED = dict(output_router_logits=True, router_aux_loss_coef=0.5)
ROUTED: dict[str, dict[str, Any]] = {
    "mixtral, balanced": FAMILIES["mixtral"] | BALANCED,
    "gpt_oss, balanced": FAMILIES["gpt_oss"] | BALANCED,
    "qwen3_moe, balanced": _with(  # one layer in two has experts
        "qwen3_moe", COMMON, BALANCED, head_dim=16, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=32, decoder_sparse_step=2,
    ),
}  # fmt: skip

# They make their masks themselves, so their residual stream is not cut along the sequence.
OWN_ATTENTION = (
    "bloom", "falcon, one key head", "falcon, groups", "falcon, alibi", "gpt_neo"
)  # fmt: skip


def with_layers(config: dict[str, Any], count: int) -> dict[str, Any]:
    """The same family with more layers: lists of one entry a layer go on as they began."""
    name = next(n for n in ("num_hidden_layers", "n_layer", "num_layers") if n in config)
    changed = {**config, name: count}
    if "layer_types" in config:
        changed["layer_types"] = (config["layer_types"] * count)[:count]
    if "attention_types" in config:  # gpt_neo's: [[[kinds], repeats]]
        changed["attention_types"] = [[["global", "local"], count // 2], [["global"], count % 2]]
    return changed


def dealt(names: Iterable[str], turn: int, *, turns: int = 3) -> list[Any]:
    """All names as parameters of a test, one in ``turns`` in the ordinary run, the others slow.

    The tests of tp, pp and cp have a turn each, so that together they have every family; the zoo
    (``test_zoo.py``) has its part of them on all axes."""
    return [
        pytest.param(name, marks=() if place % turns == turn else pytest.mark.slow)
        for place, name in enumerate(names)
    ]

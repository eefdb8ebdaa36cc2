"""Tiny configs of many families, for the tests of building and loading."""

from __future__ import annotations

from typing import Any

COMMON = dict(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
GPT2_LIKE = dict(
    vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2
)
MOE = dict(num_experts_per_tok=2, moe_intermediate_size=24)


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in COMMON.items() if name not in names}


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": COMMON,
    "llama-tied": {**COMMON, "model_type": "llama", "tie_word_embeddings": True},
    "qwen2": COMMON,
    "qwen3": {**COMMON, "head_dim": 8},
    "gemma2": {**COMMON, "head_dim": 8},
    "gemma3_text": {**COMMON, "head_dim": 8},
    "phi": COMMON,
    "phi3": COMMON,
    "olmo2": COMMON,
    "cohere": COMMON,
    "starcoder2": COMMON,
    "gpt2": GPT2_LIKE,
    "bloom": dict(vocab_size=96, hidden_size=32, n_layer=2, n_head=4)
    | dict(bos_token_id=1, eos_token_id=2),
    "opt": {**_without("num_key_value_heads", "intermediate_size"), "ffn_dim": 48}
    | dict(word_embed_proj_dim=32),
    "gpt_neox": _without("num_key_value_heads", "pad_token_id"),
    "falcon": _without("intermediate_size", "num_key_value_heads"),
    "mixtral": {**COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**COMMON, **MOE, "num_experts": 4, "head_dim": 8},
    "modernbert-decoder": _without("num_key_value_heads"),
    "mamba": dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, state_size=4)
    | dict(bos_token_id=1, eos_token_id=2, pad_token_id=0),
}  # fmt: skip


def fields(family: str) -> dict[str, Any]:
    """``ds4d.model.config`` of a family."""
    return {"model_type": family, **FAMILIES[family]}

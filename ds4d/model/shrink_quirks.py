"""What the rules of ``shrink.py`` cannot know of single families."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import PreTrainedConfig

# What a family's default config leaves out though its model needs it. Lists go on as they begin.
MISSING: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    },
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16,
        "indexer_budget": 8, "indexer_compress_ratio": 4,
    },
}  # fmt: skip


def _blt(config: PreTrainedConfig, small: dict[str, Any]) -> None:
    """The global model is as wide as the keys of a patch together."""
    encoder, decoder, whole = (small[f"{n}_config"] for n in ("encoder", "decoder", "global"))
    width = encoder["hidden_size"] * config.cross_attn_k
    encoder["hidden_size_global"] = decoder["hidden_size_global"] = whole["hidden_size"] = width
    whole["head_dim"] = width // whole["num_attention_heads"]


def _dbrx(config: PreTrainedConfig, small: dict[str, Any]) -> None:
    for name, value in (("rope_theta", 10000.0), ("clip_qkv", 8.0)):
        if small["attn_config"].get(name) is None:
            small["attn_config"][name] = value


def _hrm_text(config: PreTrainedConfig, small: dict[str, Any]) -> None:
    """``num_hidden_layers`` counts how often a layer is called."""
    calls = config.H_cycles * (config.L_cycles + 1)
    small["num_layers_per_stack"] = small["num_hidden_layers"]
    small["num_hidden_layers"] *= calls


def _inkling2_loop_text(config: PreTrainedConfig, small: dict[str, Any]) -> None:
    small["n_layers_per_attn_res_block"] = 1  # the loop begins and ends between blocks


def _reformer(config: PreTrainedConfig, small: dict[str, Any]) -> None:
    """It trains on as many tokens as the table of positions has, and no others."""
    small["axial_pos_shape"], small["max_position_embeddings"] = [8, 8], 64


def _xmod(config: PreTrainedConfig, small: dict[str, Any]) -> None:
    small["default_language"] = config.default_language or config.languages[0]


QUIRKS: dict[str, Callable[[PreTrainedConfig, dict[str, Any]], None]] = {
    "blt": _blt,
    "dbrx": _dbrx,
    "hrm_text": _hrm_text,
    "inkling2_loop_text": _inkling2_loop_text,
    "reformer": _reformer,
    "xmod": _xmod,
}

"""Tiny random models of many families, once with transformers' attention and once with ds4d's."""

from __future__ import annotations

import copy

import torch
import transformers

from ds4d.attention import register

VOCAB = 67
WINDOW = 8  # shorter than the sequences of the tests

_COMMON = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_GROUPED = dict(_COMMON, num_key_value_heads=2)
_SLIDING = dict(_GROUPED, head_dim=8, sliding_window=WINDOW)
_BOTH_KINDS = dict(_SLIDING, layer_types=["sliding_attention", "full_attention"])
_EXPERTS = dict(num_local_experts=4, num_experts_per_tok=2)

CONFIGS = {
    "llama": ("LlamaConfig", dict(_COMMON, num_key_value_heads=4)),
    "llama_gqa": ("LlamaConfig", _GROUPED),
    "mistral": ("MistralConfig", _SLIDING),
    "gemma2": ("Gemma2Config", dict(_BOTH_KINDS, query_pre_attn_scalar=8)),
    "gemma3_text": ("Gemma3TextConfig", _BOTH_KINDS),
    "gpt2": (
        "GPT2Config",
        dict(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128, pad_token_id=0)
        | dict(bos_token_id=1, eos_token_id=2, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0),
    ),
    "gpt_neox": ("GPTNeoXConfig", dict(_COMMON, attention_dropout=0.0, hidden_dropout=0.0)),
    "qwen3": ("Qwen3Config", dict(_GROUPED, head_dim=8)),
    "gpt_oss": ("GptOssConfig", dict(_BOTH_KINDS, **_EXPERTS)),
    "phi3": ("Phi3Config", _GROUPED),
    "olmo2": ("Olmo2Config", _GROUPED),
    "llama4_text": (  # chunks of attention, and layers without positions
        "Llama4TextConfig",
        dict(_GROUPED, head_dim=8, attention_chunk_size=WINDOW, intermediate_size_mlp=48)
        | dict(_EXPERTS, layer_types=["chunked_attention", "full_attention"]),
    ),
    "deepseek_v3": (  # values narrower than queries
        "DeepseekV3Config",
        dict(_COMMON, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, v_head_dim=8)
        | dict(qk_rope_head_dim=4, qk_nope_head_dim=8, first_k_dense_replace=2),
    ),
}


def config(family: str, **changes: object) -> transformers.PretrainedConfig:
    name, fields = CONFIGS[family]
    return getattr(transformers, name)(**fields | changes)


def build(
    config: transformers.PretrainedConfig, implementation: str
) -> transformers.PreTrainedModel:
    """Equal weights for equal configs, whatever the implementation."""
    if implementation == "ds4d":
        register()
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        copy.deepcopy(config), attn_implementation=implementation
    )
    with torch.no_grad():
        for parameter in model.parameters():  # biases, norms and sinks too must tell
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


def loss_of(logits: torch.Tensor, ids: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Mean loss over the predictions [B, s] that count: token i predicts token i + 1."""
    losses = -logits.float().log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    return losses[counted[:, :-1]].mean()


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_gradients(ours: dict, reference: dict, tolerance: float = 1e-5) -> None:
    """Relative L2 of each gradient; one that is zero but for rounding, next to the largest."""
    assert ours.keys() == reference.keys() and ours
    largest = max(g.norm() for g in reference.values())
    for name, expected in reference.items():
        error = (ours[name] - expected).norm() / (expected.norm() + 1e-4 * largest)
        assert error < tolerance, f"{name}: relative error {error:.1e}"

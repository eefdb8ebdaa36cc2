"""GPT-2: Conv1D, [q | k | v] in one, learned positions."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("gpt2",),
    plan={
        "transformer.h.*.attn.c_attn": "qkv_colwise",
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    },
    divided=("split_size",),
    whole_after="transformer.ln_f",
    why_not=lambda config, tp: (
        "add_cross_attention: only self-attention is cut" if config.add_cross_attention else None
    ),
)

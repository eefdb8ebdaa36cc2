"""GPT-1: as GPT-2; its own attention code wants masks of whole sequences."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("openai-gpt",),
    plan={
        "transformer.h.*.attn.c_attn": "qkv_colwise",
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    },
    divided=("split_size",),
    attention_dropout=("attn_dropout",),
)

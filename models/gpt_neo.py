"""GPT-Neo: as GPT-2, with separate projections one module deeper."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("gpt_neo",),
    plan={
        "transformer.h.*.attn.attention.q_proj": "colwise",
        "transformer.h.*.attn.attention.k_proj": "colwise",
        "transformer.h.*.attn.attention.v_proj": "colwise",
        "transformer.h.*.attn.attention.out_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    },
    attention_dropout=("attn_dropout",),
    whole_after="transformer.ln_f",
)

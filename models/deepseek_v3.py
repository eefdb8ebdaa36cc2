"""DeepSeek-V3: transformers' plan leaves its attention whole. Its heads begin behind the low-rank
projections, which stay whole, as the plan of DeepSeek-V2 has it."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("deepseek_v3",),
    plan={
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.q_b_proj": "colwise",
        "model.layers.*.self_attn.kv_b_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
    },
)

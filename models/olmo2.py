"""OLMo 2, 3 and OLMoE, FlexOlmo, MiniMax-M2: the norms of queries and keys span all heads."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("olmo2", "olmo3", "olmoe", "flex_olmo", "minimax_m2"),
    plan={
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.self_attn.q_norm": "norm_over_heads",
        "model.layers.*.self_attn.k_norm": "norm_over_heads",
    },
)

"""LFM3: a gate for each head behind the attention."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("lfm3",),
    plan={
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.g_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.feed_forward.w1": "colwise",
        "model.layers.*.feed_forward.w3": "colwise",
        "model.layers.*.feed_forward.w2": "rowwise",
    },
)

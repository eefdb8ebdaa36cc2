"""ModernBERT as a decoder: [inner | gate] in one."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("modernbert-decoder",),
    plan={
        "model.layers.*.attn.q_proj": "colwise",
        "model.layers.*.attn.k_proj": "colwise",
        "model.layers.*.attn.v_proj": "colwise",
        "model.layers.*.attn.Wo": "rowwise",
        "model.layers.*.mlp.Wi": "packed_colwise",
        "model.layers.*.mlp.Wo": "rowwise",
    },
    divided=("all_head_size",),
    why_not=lambda config, tp: (
        "mlp_dropout: each rank would drop the same of what is its own; set it to 0"
        if config.mlp_dropout
        else None
    ),
)

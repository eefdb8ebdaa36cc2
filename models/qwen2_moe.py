"""Qwen2-MoE: the expert that all tokens share is not in transformers' plan."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("qwen2_moe",),
    plan={
        "model.layers.*.mlp.shared_expert.gate_proj": "colwise",
        "model.layers.*.mlp.shared_expert.up_proj": "colwise",
        "model.layers.*.mlp.shared_expert.down_proj": "rowwise",
    },
)

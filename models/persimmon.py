"""Persimmon: (q, k, v) by head in one layer."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("persimmon",),
    plan={
        "model.layers.*.self_attn.query_key_value": "grouped_colwise",
        "model.layers.*.self_attn.dense": "rowwise",
        "model.layers.*.mlp.dense_h_to_4h": "colwise",
        "model.layers.*.mlp.dense_4h_to_h": "rowwise",
    },
)

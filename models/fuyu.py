"""Fuyu: Persimmon as its text model."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("fuyu",),
    plan={
        "model.language_model.layers.*.self_attn.query_key_value": "grouped_colwise",
        "model.language_model.layers.*.self_attn.dense": "rowwise",
        "model.language_model.layers.*.mlp.dense_h_to_4h": "colwise",
        "model.language_model.layers.*.mlp.dense_4h_to_h": "rowwise",
    },
)

"""Cohere: with ``use_qk_norm`` the norms of queries and keys have a row for each head."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("cohere",),
    plan={
        "model.layers.*.self_attn.q_norm.weight": "by_head",
        "model.layers.*.self_attn.k_norm.weight": "by_head",
    },
)

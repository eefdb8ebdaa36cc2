"""Phi-3: [q | k | v] and [gate | up] in one. transformers' plan puts the outputs together again,
which is right too, but then every rank computes the whole attention."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("phi3", "phi4_multimodal"),
    plan={
        "model.layers.*.self_attn.qkv_proj": "qkv_colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.gate_up_proj": "packed_colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    },
)

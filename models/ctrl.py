"""CTRL: attention and MLP under names of their own."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("ctrl",),
    plan={
        "transformer.h.*.multi_head_attention.Wq": "colwise",
        "transformer.h.*.multi_head_attention.Wk": "colwise",
        "transformer.h.*.multi_head_attention.Wv": "colwise",
        "transformer.h.*.multi_head_attention.dense": "rowwise",
        "transformer.h.*.ffn.0": "colwise",
        "transformer.h.*.ffn.2": "rowwise",
    },
    heads=lambda config: (config.n_head, config.n_head),
    divided=("d_model_size",),
)

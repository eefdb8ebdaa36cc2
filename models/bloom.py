"""BLOOM: (q, k, v) by head, alibi made for all heads in the model."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("bloom",),
    plan={
        "transformer.h.*.self_attention.query_key_value": "grouped_colwise",
        "transformer.h.*.self_attention.dense": "rowwise",
        "transformer.h.*.mlp.dense_h_to_4h": "colwise",
        "transformer.h.*.mlp.dense_4h_to_h": "rowwise",
    },
    heads=lambda config: (config.n_head, config.n_head),
    per_head_inputs={"alibi": -3},
    attention_dropout=("attention_dropout",),
    why_not=lambda config, tp: (
        "slow_but_exact with pretraining_tp: it slices whole weights; set slow_but_exact to false"
        if config.slow_but_exact and config.pretraining_tp > 1
        else None
    ),
)

"""Falcon: three layouts of query_key_value, told apart by the config."""

from ds4d.models.blueprint import Blueprint


def _heads(config) -> tuple[int, int]:
    heads = config.num_attention_heads
    if config.new_decoder_architecture:
        return heads, config.num_kv_heads
    return heads, 1 if config.multi_query else heads


def _layout(config) -> str:
    """Groups of (queries, key, value); or all queries, then the one key and value."""
    is_multi_query = config.multi_query and not config.new_decoder_architecture
    return "qkv_colwise" if is_multi_query else "grouped_colwise"


BLUEPRINT = Blueprint(
    model_types=("falcon",),
    plan={
        "transformer.h.*.self_attention.query_key_value": _layout,
        "transformer.h.*.self_attention.dense": "rowwise",
        "transformer.h.*.mlp.dense_h_to_4h": "colwise",
        "transformer.h.*.mlp.dense_4h_to_h": "rowwise",
    },
    heads=_heads,
    per_head_inputs={"alibi": -3, "attention_mask": -3},
    attention_dropout=("attention_dropout",),
)

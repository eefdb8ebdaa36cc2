"""Gemma 3n: gates are cut off by the mean and deviation of all of a token's, so they are put
together again, where transformers' plan leaves each rank its own."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("gemma3n_text", "gemma3n"),
    plan={
        "**.layers.*.mlp.gate_proj": "colwise_gather_output",
        "**.layers.*.mlp.up_proj": "colwise_gather_output",
        "**.layers.*.mlp.down_proj": "rowwise_split_input",
    },
)

"""BART and its like: decoders whose attention to an encoder is not used, and stays whole."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=(
        "bart", "bigbird_pegasus", "biogpt", "blenderbot", "blenderbot-small", "marian", "mbart",
        "mvp", "pegasus", "plbart", "whisper", "xglm",
    ),
    plan={
        "**.layers.*.self_attn.q_proj": "colwise",
        "**.layers.*.self_attn.k_proj": "colwise",
        "**.layers.*.self_attn.v_proj": "colwise",
        "**.layers.*.self_attn.out_proj": "rowwise",
        "**.layers.*.fc1": "colwise",
        "**.layers.*.fc2": "rowwise",
    },
    divided=("embed_dim",),
)  # fmt: skip

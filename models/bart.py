"""BART and its like: decoders whose attention to an encoder is not used, and stays whole."""

from ds4d.models.blueprint import Blueprint

OWN_ATTENTION = ("mvp", "xglm")  # and no module that drops its weights


def _why_not(config, tp: int) -> str | None:
    kinds = ["activation_dropout"]
    if config.model_type in OWN_ATTENTION:
        kinds.append("attention_dropout")
    for name in kinds:
        if getattr(config, name, 0):
            return f"{name}: each rank would drop the same of what is its own; set it to 0"
    return None


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
    why_not=_why_not,
)  # fmt: skip

"""OPT: learned positions; the MLP's layers stand in the decoder layer itself."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("opt",),
    plan={
        "model.decoder.layers.*.self_attn.q_proj": "colwise",
        "model.decoder.layers.*.self_attn.k_proj": "colwise",
        "model.decoder.layers.*.self_attn.v_proj": "colwise",
        "model.decoder.layers.*.self_attn.out_proj": "rowwise",
        "model.decoder.layers.*.fc1": "colwise",
        "model.decoder.layers.*.fc2": "rowwise",
    },
)

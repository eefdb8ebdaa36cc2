"""StableLM: as Llama, without a plan of its own in transformers."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("stablelm",),
    plan={
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    },
    why_not=lambda config, tp: (
        "qk_layernorm: true has a norm module for every head, which can't be cut; set "
        "ds4d.parallel.tp to 1"
        if config.qk_layernorm
        else None
    ),
)

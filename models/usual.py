"""Families without a plan in transformers, whose layers have Llama's names and do what these do.

Where only some layers have attention, the others (states, convolutions) stay whole on every rank.
"""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("bamba", "emu3_text_model", "hunyuan_v1_dense", "lfm2"),
    plan={
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.self_attn.out_proj": "rowwise",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
        "model.layers.*.feed_forward.gate_proj": "colwise",
        "model.layers.*.feed_forward.up_proj": "colwise",
        "model.layers.*.feed_forward.down_proj": "rowwise",
        "model.layers.*.feed_forward.w1": "colwise",
        "model.layers.*.feed_forward.w3": "colwise",
        "model.layers.*.feed_forward.w2": "rowwise",
    },
)

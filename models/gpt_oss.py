"""GPT-OSS: attention sinks, and experts whose gate and up columns alternate."""

from ds4d.models.blueprint import Blueprint, Cut

BLUEPRINT = Blueprint(
    model_types=("gpt_oss",),
    plan={
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.self_attn.sinks": "by_head",
        "model.layers.*.mlp.experts": "experts",
        "model.layers.*.mlp.experts.gate_up_proj": Cut(2, unit=2),
        "model.layers.*.mlp.experts.gate_up_proj_bias": Cut(1, unit=2),
        "model.layers.*.mlp.experts.down_proj": Cut(1),
        "model.layers.*.mlp.experts.down_proj_bias": "shared_by_ranks",
    },
)

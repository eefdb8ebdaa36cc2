"""GPT-BigCode (StarCoder): all queries and one key and value; or (q, k, v) by head."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=("gpt_bigcode",),
    plan={
        "transformer.h.*.attn.c_attn": lambda config: (
            "qkv_colwise" if config.multi_query else "grouped_colwise"
        ),
        "transformer.h.*.attn.c_proj": "rowwise",
        "transformer.h.*.mlp.c_fc": "colwise",
        "transformer.h.*.mlp.c_proj": "rowwise",
    },
    heads=lambda config: (config.n_head, 1 if config.multi_query else config.n_head),
    divided=("embed_dim",),
)

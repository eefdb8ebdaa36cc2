"""BERT and its like: the layer behind the attention stands beside it, with the residual."""

from ds4d.models.blueprint import Blueprint

BLUEPRINT = Blueprint(
    model_types=(
        "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie",
        "megatron-bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
        "xlm-roberta", "xlm-roberta-xl", "xmod",
    ),
    plan={
        "**.attention.self.query": "colwise",
        "**.attention.self.key": "colwise",
        "**.attention.self.value": "colwise",
        "**.attention.output.dense": "rowwise",
        "**.intermediate.dense": "colwise",
        "**.layer.*.output.dense": "rowwise",
    },
    divided=("all_head_size",),
    attention_dropout=("dropout",),
)  # fmt: skip

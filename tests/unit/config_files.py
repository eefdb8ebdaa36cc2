"""A small valid file, and a way to change it, for the tests of the configuration."""

from __future__ import annotations

import copy
from typing import Any

from ds4d.config.errors import ConfigError
from ds4d.config.load import load

SMALL = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "ds4d": {
        "model": {
            "config": {
                "model_type": "llama",
                "vocab_size": "auto",
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "max_position_embeddings": 128,
            }
        },
        "data": {
            "seq_len": 64,
            "train": {"type": "python_stdlib"},
            "tokenizer": {"vocab_size": 512},
        },
        "training": {"steps": 10},
    },
}
ABSENT = object()


def changed(**changes: Any) -> dict[str, Any]:
    """``SMALL`` with dotted keys set; ``__`` stands for the dot, ``ABSENT`` removes."""
    content = copy.deepcopy(SMALL)
    for path, value in changes.items():
        *parents, last = path.split("__")
        holder = content
        for key in parents:
            holder = holder.setdefault(key, {})
        if value is ABSENT:
            holder.pop(last, None)
        else:
            holder[last] = value
    return content


def problems(content: Any, **arguments: Any) -> dict[str, str]:
    """Dotted key -> message of everything that ``load`` finds wrong."""
    try:
        load(content, **arguments)
    except ConfigError as error:
        return {problem.path: problem.message for problem in error.problems}
    return {}

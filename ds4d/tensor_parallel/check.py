"""Whether a model can be cut over tp ranks, known before any rank is started: it is tried, on meta
and without a process group."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from ds4d import attention
from ds4d.model.meta import meta_model
from ds4d.tensor_parallel.inject import inject
from ds4d.tensor_parallel.state import NoGroup, TensorParallel


def why_not_cut(
    config: PreTrainedConfig, tp: int, *, sequence_parallel: bool = False
) -> str | None:
    """Why the model of ``config`` can't be cut over ``tp`` ranks; None: it can.

    Args:
        sequence_parallel: with the residual stream cut along the sequence, too.
    """
    attention.register()
    implementation = attention.implementation_for(config)
    model = meta_model(config, dtype=torch.float32, attn_implementation=implementation)
    try:
        inject(model, TensorParallel(NoGroup(tp), sequence_parallel))
    except ValueError as error:
        return str(error)
    return None

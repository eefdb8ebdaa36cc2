"""Whether a model can be cut over tp ranks, known before any rank is started: it is tried, on meta
and without a process group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedConfig

from ds4d import attention
from ds4d.model.meta import meta_model
from ds4d.tensor_parallel.inject import inject
from ds4d.tensor_parallel.state import TensorParallel


@dataclass(frozen=True)
class _Place:
    """A process group as far as cutting asks it."""

    ranks: int

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return 0


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
        inject(model, TensorParallel(_Place(tp), sequence_parallel))
    except ValueError as error:
        return str(error)
    return None

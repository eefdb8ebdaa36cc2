"""Whether a model can be cut into the stages of a pipeline, known before any rank is started."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from ds4d.model.meta import meta_model
from ds4d.pipeline.stack import layer_stack


def why_not_staged(config: PreTrainedConfig) -> str | None:
    """Why the model of ``config`` can't be cut into stages; None: it can."""
    try:
        layer_stack(meta_model(config, dtype=torch.float32))
    except ValueError as error:
        return str(error)
    return None

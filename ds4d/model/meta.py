"""A Hugging Face model on meta: modules, names, shapes and ties, without memory."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel


def meta_model(
    config: PreTrainedConfig, *, dtype: torch.dtype, attn_implementation: str = "eager"
) -> PreTrainedModel:
    """The model of ``config``, which is not changed."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            deepcopy(config), dtype=dtype, attn_implementation=attn_implementation
        )


def logical_model(config: PreTrainedConfig) -> PreTrainedModel:
    """What one plain process would have, in fp32 and with its ties undone: a parameter a name, as
    transformers has it while it fills a model."""
    model = meta_model(config, dtype=torch.float32)
    for name in model.all_tied_weights_keys:
        path, _, attribute = name.rpartition(".")
        untied = nn.Parameter(torch.empty_like(model.get_parameter(name)))
        setattr(model.get_submodule(path), attribute, untied)
    return model

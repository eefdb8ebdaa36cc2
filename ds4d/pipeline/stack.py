"""Where a model keeps its layers."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel


def layer_stack(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The layers that a pipeline shares out, and their dotted path ("model.layers").

    Raises:
        ValueError: the model has no list of ``num_hidden_layers`` modules.
    """
    text = model.config.get_text_config(decoder=True)
    count = getattr(text, "decoder_layers", None) or getattr(text, "num_hidden_layers", None)
    for path, module in model.named_modules():  # outer lists come before those inside of layers
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return path, module
    raise ValueError(
        f"{model.config.model_type} has no list of num_hidden_layers modules, which a pipeline "
        "could share out; set ds4d.parallel.pp to 1"
    )

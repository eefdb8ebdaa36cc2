"""The model that is trained for comparison: of the file's family, with weights that all matter."""

from __future__ import annotations

import re
from copy import deepcopy
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ds4d.config.types import ParallelConfig
from ds4d.model.shrink import VOCABULARY, shrunken

# No two layouts draw the same noise.
NOISE = re.compile(r".*(dropout|pdrop|jitter).*|.*_drop")


def small_model(
    config: PreTrainedConfig, parallel: ParallelConfig, *, layers: int | None, ulysses: int
) -> PreTrainedConfig:
    """Args:
    parallel: of the file, or with fewer ranks.
    layers: at least so many; None: as few as have every kind.
    ulysses: ranks that exchange heads.
    """
    small = shrunken(config, layers=layers, ranks=parallel.tp * ulysses)
    text, full = small.get_text_config(decoder=True), config.get_text_config(decoder=True)
    if full.vocab_size > text.vocab_size and full.vocab_size % parallel.tp:
        # one that is padded, as the file's is; ids of special tokens stay below
        text.vocab_size = VOCABULARY + -VOCABULARY % parallel.tp + full.vocab_size % parallel.tp
    return small


def without_noise(config: PreTrainedConfig) -> tuple[PreTrainedConfig, list[str]]:
    """A copy in which nothing is drawn in a step, and the names of what was."""
    config = deepcopy(config)
    names = []
    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            inner, more = without_noise(value)
            setattr(config, name, inner)
            names += more
        elif NOISE.fullmatch(name) and isinstance(value, float) and value:
            setattr(config, name, 0.0)
            names.append(name)
    return config, names


@torch.no_grad()
def save_random(config: PreTrainedConfig, folder: Path, *, dtype: torch.dtype) -> None:
    """A Hugging Face folder in fp32 whose numbers ``dtype`` has too, so that all begin alike.

    Vectors (norms, biases, scales, which may be small numbers or large ones) are moved from where
    the model's own rule puts them, by a part of what they are; matrices keep the size of what they
    are multiplied with.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float32
        )
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() > 1:
                value = noise * parameter.shape[-1] ** -0.5
            else:
                value = torch.where(parameter == 0, 0.1 * noise, parameter * (1 + 0.1 * noise))
            parameter.copy_(value.to(dtype))
    model.save_pretrained(folder)
    config.save_pretrained(folder)  # of the whole model, where it has taken its text's alone

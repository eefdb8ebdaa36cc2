"""``from_pretrained`` without weights: each rank reads its own part of them later.

Scripts load the whole model on every rank before they prepare it, which a large one does not fit
into a host's memory that often.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig, PreTrainedModel

from ds4d.model.build import stored_in
from ds4d.model.config import model_folder
from ds4d.model.meta import logical_model
from ds4d.tensor_parallel.shard import Shard


@contextmanager
def lazily() -> Iterator[None]:
    """Within, ``from_pretrained`` of a model gives one without memory, whose weights each rank
    reads when the run begins: of them no more than it keeps.

    The model can be prepared and trained; until then its weights can't be looked at or changed
    (``resize_token_embeddings`` and the like).

    Raises:
        ValueError: where the run begins: the folder's weights do not fit the model.
    """
    before = PreTrainedModel.__dict__["from_pretrained"]
    PreTrainedModel.from_pretrained = classmethod(_without_weights)
    try:
        yield
    finally:
        PreTrainedModel.from_pretrained = before


def _without_weights(cls: type, path: Any, *_: Any, config: Any = None, **options: Any) -> Any:
    folder = model_folder(str(path))
    if config is None:
        config = AutoConfig.from_pretrained(folder)
    dtype = options.get("dtype") or options.get("torch_dtype") or config.dtype
    given = {"dtype": dtype} if isinstance(dtype, torch.dtype) else {}
    with torch.device("meta"):
        model = cls._from_config(config, **given)
    if model.can_generate() and (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    model.ds4d_source = folder
    return model.eval()


def source_of(model: nn.Module) -> Path | None:
    """Where the weights of a model without memory are; None: it has them."""
    return model.__dict__.get("ds4d_source")


class InFiles:
    """Weights that are read where they are asked for; as ``takeover.Given``."""

    def __init__(self, folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> None:
        self._logical = logical_model(config)
        self._stored = stored_in(folder, self._logical)
        self._dtype = dtype

    def __contains__(self, name: str) -> bool:
        return name in self._stored

    def __call__(self, name: str, shard: Shard | None = None) -> Tensor:
        return self._stored(name, shard)

    @property
    def is_wide(self) -> bool:
        if self._dtype == torch.float32:
            return False
        named = self._logical.named_parameters()
        name, parameter = next(pair for pair in named if pair[0] in self._stored)
        nothing = Shard(0, len(parameter), ranges=())
        return self._stored(name, nothing).dtype == torch.float32

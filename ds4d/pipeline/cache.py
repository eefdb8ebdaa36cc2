"""What a layer of another rank leaves in this rank's KV cache: how far the text is, and no more.

Hugging Face's forward reads that off the cache: positions off its first layer, sizes of masks off
the first layer of each kind. These may be on another stage, so each passage (``stage.py``) keeps
an entry of its own in step, of one head with one feature.

Letters: B sequences, S new tokens, E hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


def cache_of(args: tuple, kwargs: dict[str, Any]) -> Cache | None:
    """The KV cache among what a layer is called with, wherever its family puts it."""
    given = (*args, *kwargs.values())
    return next((value for value in given if isinstance(value, Cache)), None)


def pass_over(cache: Cache, index: int, hidden: Tensor) -> None:
    """Move layer ``index`` of the cache on.

    Args:
        hidden: [B, S, E], of the new tokens; only its shape counts.
    """
    entries = cache.layers[index : index + 1]  # none yet where they are made when needed
    if all(isinstance(entry, CacheLayerMixin) for entry in entries):  # others have no length
        tokens = hidden[:, None, :, :1]  # [B, S, E] -> [B, 1, S, 1]
        cache.update(tokens, tokens, index)

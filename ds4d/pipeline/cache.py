"""What a layer of another rank leaves in this rank's KV cache: how far the text is, and no more.

Hugging Face's forward reads that off the cache: positions off its first layer, sizes of masks off
the first layer of each kind, whether there is a state yet off the last one that has states. Any of
these may be on another stage, so each passage (``stage.py``) keeps an entry of its own in step, of
one head with one feature.

Letters: B sequences, S new tokens, E hidden size.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin


def cache_of(args: tuple, kwargs: dict[str, Any]) -> Cache | None:
    """The KV cache among what a layer is called with, wherever its family puts it."""
    given = (*args, *kwargs.values())
    return next((value for value in given if isinstance(value, Cache)), None)


def pass_over(cache: Cache, index: int, hidden: Tensor) -> None:
    """Move layer ``index`` of the cache on.

    Args:
        hidden: [B, S, E], of the new tokens; only its shape counts.
    """
    entry = cache.layers[index] if index < len(cache.layers) else None  # some are made when needed
    if isinstance(entry, LinearAttentionCacheLayerMixin):
        for state in range(entry.number_of_states):
            cache.update_conv_state(hidden[:, :1, :1], index, state)
    if entry is None or isinstance(entry, CacheLayerMixin):
        tokens = hidden[:, None, :, :1]  # [B, 1, S, 1]
        cache.update(tokens, tokens, index)

"""Flash attention over runs of tokens on CUDA: the package ``flash_attn`` where it is installed, or
else what torch has of it.

Letters: T queries of all runs together, t keys, H heads, K key/value heads, D head dim.

Both are one algorithm, and take the same arguments here. Queries of a run see the keys of the same
run, the last query and the last key standing at the same place. A query that sees nothing would get
lse = +inf: no run has one.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


class Runs(NamedTuple):
    """Attributes:
    query_bounds, key_bounds: int32 [runs + 1], where each run starts, then T or t.
    longest_query, longest_key: tokens of the longest runs.
    window: how many keys before and after its own place a query sees; -1: all.
    """

    query_bounds: Tensor
    key_bounds: Tensor
    longest_query: int
    longest_key: int
    window: tuple[int, int]

    @property
    def is_causal(self) -> bool:
        return self.window == (-1, 0)


class Options(NamedTuple):
    scale: float
    dropout: float = 0.0
    softcap: float | None = None


class FlashOps(NamedTuple):
    """Attributes:
    forward: (query [T, H, D], key, value [t, K, D], runs, options)
        -> (out [T, H, D], lse fp32 [H, T], what was drawn for dropout).
    backward: (grad_out, query, key, value, out, lse, drawn, runs, options) -> the gradients of
        query, key and value. ``out`` and ``lse`` may be of more keys than these.
    knows_softcap: or else ``options.softcap`` is None.
    """

    forward: Callable
    backward: Callable
    knows_softcap: bool


def _torch_forward(query, key, value, runs: Runs, options: Options):
    out, lse, *drawn, _ = torch.ops.aten._flash_attention_forward(
        query, key, value, *runs[:4], options.dropout, runs.is_causal, False, **_further(runs, options)
    )  # fmt: skip
    return out, lse, drawn


def _torch_backward(grad_out, query, key, value, out, lse, drawn, runs: Runs, options: Options):
    if drawn is None:
        drawn = [torch.empty(2, dtype=torch.uint64, device=query.device)] * 2  # never read
    return torch.ops.aten._flash_attention_backward(
        grad_out, query, key, value, out, lse, *runs[:4], options.dropout, runs.is_causal, *drawn,
        **_further(runs, options),
    )  # fmt: skip


def _further(runs: Runs, options: Options) -> dict[str, float | int]:
    left, right = runs.window
    return {"scale": options.scale, "window_size_left": left, "window_size_right": right}


def _package_forward(query, key, value, runs: Runs, options: Options):
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_varlen_forward

    out, lse, _, drawn = _wrapped_flash_attn_varlen_forward(
        query, key, value, *runs[:4], options.dropout, options.scale, runs.is_causal, *runs.window,
        softcap=options.softcap or 0.0, alibi_slopes=None, return_softmax=False,
    )  # fmt: skip
    return out, lse, drawn


def _package_backward(grad_out, query, key, value, out, lse, drawn, runs: Runs, options: Options):
    from flash_attn.flash_attn_interface import _wrapped_flash_attn_varlen_backward

    grads = [x.new_empty(x.shape) for x in (query, key, value)]
    _wrapped_flash_attn_varlen_backward(
        grad_out, query, key, value, out, lse, *grads, *runs[:4], options.dropout, options.scale,
        runs.is_causal, *runs.window, softcap=options.softcap or 0.0, alibi_slopes=None,
        deterministic=torch.are_deterministic_algorithms_enabled(), rng_state=drawn,
    )  # fmt: skip
    return tuple(grads)


FLASH_OPS = {
    "torch": FlashOps(_torch_forward, _torch_backward, knows_softcap=False),
    "flash_attn": FlashOps(_package_forward, _package_backward, knows_softcap=True),
}


def flash_ops() -> FlashOps:
    """Those that are used on CUDA."""
    return FLASH_OPS["flash_attn" if _has_package() else "torch"]


@lru_cache(maxsize=1)
def _has_package() -> bool:
    if importlib.util.find_spec("flash_attn") is None:
        return False
    try:  # from version 2.7 on; and it may have been built for another torch
        from flash_attn.flash_attn_interface import (  # noqa: F401
            _wrapped_flash_attn_varlen_backward,
            _wrapped_flash_attn_varlen_forward,
        )
    except ImportError as error:
        logger.warning("flash_attn is installed but can't be used (%s); torch's is used", error)
        return False
    return True

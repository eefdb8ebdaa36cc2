"""Attention: ds4d's attention and mask functions for transformers, in every layout.

The functions here import torch and transformers only when they are called, so that the config can
be checked without them.
"""

from __future__ import annotations

NAME = "ds4d"


def register() -> str:
    """Registers ds4d's attention and mask functions with transformers; again does no harm.

    Both, always: without its own mask function transformers gives an implementation no mask at
    all, and causality is lost in silence.

    Returns:
        The name for ``attn_implementation``.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    from ds4d.attention.interface import attention
    from ds4d.attention.mask import lazy_mask

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lazy_mask)
    return NAME


def supports(model, *, documents: bool = True) -> str | None:
    """Why a model (its config or class) can't be exact here; None: it can. See ``support``."""
    from ds4d.attention.support import supports

    return supports(model, documents=documents)


def implementation_for(config) -> str:
    """The ``attn_implementation`` for a model: "ds4d", or "sdpa" / "eager". See ``support``."""
    from ds4d.attention.support import implementation_for

    return implementation_for(config)

"""Which models can be exact under ds4d's attention: known from their class, before any is built."""

from __future__ import annotations

import inspect
import re
import sys
from functools import lru_cache

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from ds4d.attention import NAME


def supports(
    model: PretrainedConfig | type[PreTrainedModel], *, documents: bool = True
) -> str | None:
    """Why a model can't be exact under ds4d's attention, in one sentence; None: it can.

    Args:
        documents: with several documents in a sequence, too; or else only one a sequence.
    """
    cls = _model_class(model) if isinstance(model, PretrainedConfig) else model
    if cls is None:
        return f"model_type {model.model_type!r} is no causal language model of transformers"
    for applies_always, is_so, reason in _REASONS:
        if (applies_always or documents) and is_so(cls, _source(cls)):
            return f"{cls.__name__} {reason}"
    return None


def implementation_for(config: PretrainedConfig) -> str:
    """The ``attn_implementation`` to build a model with.

    ds4d's wherever the model's attention goes through transformers' interface. A model with its
    own attention code runs with that code: "sdpa" where it has it, or else "eager". Such a model,
    and any other for which ``supports`` names a reason, can't be trained on packed documents.
    """
    if supports(config, documents=False) is None:
        return NAME
    cls = _model_class(config)
    if cls is None or not cls._supports_sdpa or _learns_mask(cls, _source(cls)):
        return "eager"  # for "sdpa" transformers leaves out a mask that is only causal
    return "sdpa"


def packs_by_positions(cls: type[PreTrainedModel]) -> bool:
    """Whether a model gives its masks the positions: then another packed sequence begins where
    these jump."""
    return _POSITIONS_FOR_MASKS.search(_source(cls)) is not None


_POSITIONS_FOR_MASKS = re.compile(
    r"mask\w*\((?:[^()]|\([^()]*\))*\bposition_ids=|mask_kwargs = \{[^{}]*\"position_ids\""
)


def _model_class(config: PretrainedConfig) -> type[PreTrainedModel] | None:
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return found[0] if isinstance(found, (list, tuple)) else found


@lru_cache(maxsize=None)
def _source(cls: type) -> str:
    return inspect.getsource(sys.modules[cls.__module__])


def _has_own_attention(cls: type[PreTrainedModel], source: str) -> bool:
    through_interface = "ALL_ATTENTION_FUNCTIONS" in source and "ATTENTION_CLASSES[" not in source
    return not cls._can_set_attn_implementation() or not through_interface


def _has_own_masks(cls: type[PreTrainedModel], source: str) -> bool:
    return "masking_utils" not in source


def _picks_keys(cls: type[PreTrainedModel], source: str) -> bool:
    return _PICKED_KEYS.search(source) is not None


def _learns_mask(cls: type[PreTrainedModel], source: str) -> bool:
    return "prepare_dynamic_mask" in source


def _joins_tokens(cls: type[PreTrainedModel], source: str) -> bool:
    return _JOINED_TOKENS.search(source) is not None


def _has_state(cls: type[PreTrainedModel], source: str) -> bool:
    return cls._is_stateful or "create_recurrent_attention_mask" in source


def _has_fixed_positions(cls: type[PreTrainedModel], source: str) -> bool:
    return "position_ids" not in inspect.signature(cls.forward).parameters


# A mask for transformers' own implementations, and a list of keys for all others.
_PICKED_KEYS = re.compile(r"_attn_implementation in \(\"eager\", \"sdpa\"\)")
_JOINED_TOKENS = re.compile(r"\bcompress_rates?\b|\bpatch_lengths\b")

# (even without documents, what is looked for in the class and its module, the sentence about it)
_REASONS = (
    (True, _has_own_attention, "has its own attention code instead of transformers' interface"),
    (True, _has_own_masks, "builds its attention masks itself"),
    (True, _picks_keys, "picks the keys that each query sees itself"),
    (True, _learns_mask, "learns its attention masks"),
    (True, _joins_tokens, "has queries that see several tokens joined in one"),
    (
        False,
        _has_state,
        "has layers that carry a state or a convolution along the sequence, and so from one "
        "document into the next",
    ),
    (
        False,
        _has_fixed_positions,
        "takes no position_ids, so that positions can't restart in each document",
    ),
)

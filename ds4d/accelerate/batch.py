"""What a script gives its model, as the micro-batch that ds4d trains on.

Letters: B sequences in the batch, S tokens of each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds4d.attention.documents import PADDING, Documents
from ds4d.data.batch import IGNORE, MicroBatch

IDS, MASK, POSITIONS, LABELS = "input_ids", "attention_mask", "position_ids", "labels"
SHIFTED = "shift_labels"
TENSORS = (IDS, MASK, POSITIONS, LABELS, SHIFTED)
# Say nothing about what is computed.
WITHOUT_EFFECT = ("use_cache", "return_dict", "num_items_in_batch")
# Say where packed sequences begin; so do positions, which ds4d reads.
PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")
# Swallowed by the keyword arguments of most models.
NOT_GIVEN = ("output_hidden_states", "output_attentions", "logits_to_keep", "inputs_embeds")
# Families that count positions by the mask, so that padding on the left does not shift them.
COUNT_BY_MASK = ("opt", "biogpt")


def micro_batch(inputs: Mapping[str, Tensor], *, model_type: str, counts: bool) -> MicroBatch:
    """The whole sequences, on the CPU.

    Args:
        inputs: ``input_ids`` [B, S], and of ``attention_mask``, ``position_ids``, ``labels`` (as
            Hugging Face has them, not shifted) and ``shift_labels`` (shifted), each [B, S], what
            the script gives; on the CPU.
        counts: false: other ranks have these samples, too, and count them.

    Raises:
        ValueError: shapes that do not fit.
    """
    ids = inputs[IDS]
    if ids.dim() != 2:
        raise ValueError(f"input_ids has the shape {list(ids.shape)}; [sequences, tokens] is meant")
    for name in TENSORS:
        given = inputs.get(name)
        if given is not None and given.shape != ids.shape:
            raise ValueError(
                f"{name} has the shape {list(given.shape)}, input_ids {list(ids.shape)}: ds4d "
                "makes masks itself, from one number a token"
            )
    mask = inputs.get(MASK)
    real = None if mask is None or bool(mask.all()) else mask.bool()
    if real is not None and bool((F.pad(real.int(), (1, 0)).diff() > 0).sum(1).gt(1).any()):
        raise ValueError(
            "attention_mask has zeros between ones; ds4d knows padding at the ends of a row"
        )
    positions = _positions(ids, real, inputs.get(POSITIONS), model_type)
    documents = None
    if real is not None:
        documents = Documents.from_ids(torch.where(real, 0, PADDING), positions)
        documents = replace(documents, blind_padding=not bool(real[:, 0].all()))
    targets = _targets(ids, inputs)
    if not counts:
        targets.fill_(IGNORE)
    return MicroBatch(ids, targets, positions, documents, real=real)


def _positions(ids: Tensor, real: Tensor | None, given: Tensor | None, model_type: str) -> Tensor:
    if given is not None:
        return given.long()
    if real is not None and model_type in COUNT_BY_MASK:
        return (real.long().cumsum(dim=1) * real).sub(1).clamp(min=0)
    return torch.arange(ids.shape[1]).expand_as(ids).contiguous()


def _targets(ids: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """A new tensor."""
    if inputs.get(SHIFTED) is not None:
        return inputs[SHIFTED].long().clone()
    if inputs.get(LABELS) is None:
        return torch.full_like(ids, IGNORE)
    return F.pad(inputs[LABELS][:, 1:].long(), (0, 1), value=IGNORE)


def refused(inputs: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[str]:
    """Names of arguments that ask for something else than what ``micro_batch`` says.

    Args:
        inputs: all keyword arguments of the model's call.
        parameters: of the signature of the model's own forward.
    """
    known = {*TENSORS, *WITHOUT_EFFECT}
    named = {*parameters, *NOT_GIVEN}
    if inputs.get(POSITIONS) is None:
        named |= {*PACKED}
    return [
        name
        for name, value in inputs.items()
        if name not in known and name in named and _asks(value)
    ]


def _asks(value: Any) -> bool:
    return value is not None and not (isinstance(value, (bool, int)) and not value)

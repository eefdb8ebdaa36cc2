"""The loss of ds4d: the sum over valid targets, divided by the count of the whole global batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ds4d import attention
from ds4d.attention.context import Context
from ds4d.data.batch import IGNORE, MicroBatch
from ds4d.tensor_parallel import sequence
from ds4d.tensor_parallel.cross_entropy import Objective, sum_cross_entropy
from ds4d.tensor_parallel.state import TensorParallel
from ds4d.tensor_parallel.vocab import head_of

__all__ = [
    "Objective", "count_targets", "eval_sums", "sum_cross_entropy", "sum_loss", "whole_logits",
]  # fmt: skip


def sum_loss(
    model: nn.Module,
    batch: MicroBatch,
    objective: Objective = Objective(),
    *,
    scale: Tensor | float = 1.0,
    embeds: Tensor | None = None,
) -> Tensor:
    """Run the model and sum its token losses; fp32 scalar, the same on every tp rank.

    Logits are computed a chunk at a time together with the loss, where ``install_head`` has found
    that the model allows it; else all at once, whole on every rank.

    A model with attention code of its own gets no documents: it may only see batches in which a
    row is one document, perhaps padded on the right, which a causal model does not look at.

    Args:
        model: a Hugging Face causal language model, or a DeepSpeed engine around one.
        batch: on the model's device.
        objective: what else is minimised; nothing, where a model is judged.
        scale: what the sum will be multiplied by before its backward pass, as far as is known:
            gradients are rounded to half precision once, with it in them.
        embeds: [B, S, *], in the place of what the embedding makes of the tokens (``pipeline/``).

    Collective: tp, and whatever else the model's forward pass is.
    """
    module = getattr(model, "module", model)
    tp = getattr(module, "ds4d_tp", None)
    batch = padded(batch, tp)
    inputs = model_inputs(module, batch, embeds)
    head = head_of(module)
    with sequence.scattered(tp):
        if head is None:
            logits = model(**inputs).logits
            return sum_cross_entropy(logits, batch.targets, objective, scale=scale)
        with head.deferred(batch.targets, objective, scale=scale):
            return model(**inputs).logits


def whole_logits(
    model: nn.Module,
    batch: MicroBatch,
    objective: Objective = Objective(),
    *,
    scale: Tensor | float = 1.0,
    embeds: Tensor | None = None,
) -> Tensor:
    """[B, s, V] of this rank's tokens, the same on every tp rank; arguments as in ``sum_loss``, of
    which the loss's are not looked at.

    Collective: as ``sum_loss``.
    """
    module, length = getattr(model, "module", model), batch.input_ids.shape[1]
    tp = getattr(module, "ds4d_tp", None)
    batch = padded(batch, tp)
    inputs = model_inputs(module, batch, embeds)
    with sequence.scattered(tp):
        return model(**inputs).logits[:, :length]


@torch.no_grad()
def eval_sums(
    model: nn.Module, batches: Iterable[MicroBatch], *, device: torch.device | str
) -> Iterator[tuple[Tensor, Tensor]]:
    """(sum of token losses, count of valid targets) of each micro-batch, float64 scalars.

    The likelihood alone: label smoothing and z-loss are for training.

    Args:
        model: as in ``sum_loss``, in eval mode.
        batches: on any device.
        device: of the model.

    Collective: as ``sum_loss``, for each micro-batch.
    """
    for batch in batches:
        batch = batch.to(device)
        yield sum_loss(model, batch).double(), count_targets(batch.targets).double()


def padded(batch: MicroBatch, tp: TensorParallel | None) -> MicroBatch:
    """With rows that can be cut along the sequence, where they will be."""
    return batch.padded(tp.size) if tp is not None and tp.sequence_parallel else batch


def model_inputs(
    module: nn.Module, batch: MicroBatch, embeds: Tensor | None = None
) -> dict[str, Any]:
    """What a Hugging Face model, or the base model in it, is called with."""
    tokens = {"input_ids": batch.input_ids} if embeds is None else {"inputs_embeds": embeds}
    inputs: dict[str, Any] = {**tokens, "use_cache": False}
    if _takes_positions(type(module)):
        inputs["position_ids"] = batch.position_ids
    if batch.documents is not None and module.config._attn_implementation == attention.NAME:
        inputs["documents"] = batch.documents
    if batch.cut is not None:
        inputs["context"] = Context(batch.cut, module.ds4d_cp)
    return inputs


@lru_cache
def _takes_positions(cls: type[nn.Module]) -> bool:
    return "position_ids" in inspect.signature(cls.forward).parameters


def count_targets(targets: Tensor) -> Tensor:
    """How many targets count, as an int64 scalar on the device of ``targets`` (no sync)."""
    return (targets != IGNORE).sum()

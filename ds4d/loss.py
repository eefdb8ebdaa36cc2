"""The loss of ds4d: the sum over valid targets, divided by the count of the whole global batch.

Letters: N tokens of a micro-batch (B * s), V vocabulary.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from ds4d import attention
from ds4d.data.batch import IGNORE, MicroBatch

CHUNK_ELEMENTS = 1 << 24  # logits held in fp32 at a time: 64 MiB


class _SumCrossEntropy(torch.autograd.Function):
    """Cross-entropy summed over the targets that count.

    Rows are taken in chunks, so that no fp32 copy of the logits ever exists; of the forward pass
    only the log-sum-exp of each row is kept beside the logits themselves.
    """

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> Tensor:  # [N, V], [N] -> []
        log_sum_exp = torch.empty(len(targets), dtype=torch.float32, device=logits.device)
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        for rows in _chunks(logits):
            z = logits[rows].float()
            log_sum_exp[rows] = torch.logsumexp(z, dim=-1)
            chosen = z.gather(-1, targets[rows].clamp(min=0)[:, None])[:, 0]
            losses = log_sum_exp[rows] - chosen
            total += losses.masked_fill_(targets[rows] == IGNORE, 0.0).sum()
        ctx.save_for_backward(logits, targets, log_sum_exp)
        return total

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        logits, targets, log_sum_exp = ctx.saved_tensors
        grad_logits = torch.empty_like(logits)
        for rows in _chunks(logits):
            z = logits[rows].float().sub_(log_sum_exp[rows][:, None]).exp_()
            counted = (targets[rows] != IGNORE).to(z.dtype)
            z.scatter_add_(-1, targets[rows].clamp(min=0)[:, None], -counted[:, None])
            grad_logits[rows] = z.mul_((counted * grad)[:, None])
        return grad_logits, None


def _chunks(logits: Tensor) -> list[slice]:
    rows, columns = logits.shape
    step = max(1, CHUNK_ELEMENTS // columns)
    return [slice(start, start + step) for start in range(0, rows, step)]


def sum_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of the token losses.

    Args:
        logits: [B, s, V] in any float type, on every rank its own tokens.
        targets: int64 [B, s], already shifted; ``IGNORE`` (-100) is not counted.

    Returns:
        fp32 scalar; 0 when nothing is counted.
    """
    return _SumCrossEntropy.apply(logits.flatten(0, 1), targets.flatten())


def sum_loss(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Run the model and sum its token losses; fp32 scalar.

    A model with attention code of its own gets no documents: it may only see batches in which a
    row is one document, perhaps padded on the right, which a causal model does not look at.

    Args:
        model: a Hugging Face causal language model, or a DeepSpeed engine around one.
        batch: on the model's device.
    """
    module = getattr(model, "module", model)
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    if _takes_positions(type(module)):
        inputs["position_ids"] = batch.position_ids
    if batch.documents is not None and module.config._attn_implementation == attention.NAME:
        inputs["documents"] = batch.documents
    return sum_cross_entropy(model(**inputs).logits, batch.targets)


@lru_cache
def _takes_positions(cls: type[nn.Module]) -> bool:
    return "position_ids" in inspect.signature(cls.forward).parameters


def count_targets(targets: Tensor) -> Tensor:
    """How many targets count, as an int64 scalar on the device of ``targets`` (no sync)."""
    return (targets != IGNORE).sum()

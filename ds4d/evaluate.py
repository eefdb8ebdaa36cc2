"""The exact loss of a held-out set: the mean over all its valid targets, the same number for every
layout and batch size."""

from __future__ import annotations

import math
from typing import Iterable

import torch
import torch.distributed as dist

from ds4d.data.batch import MicroBatch
from ds4d.engine import Engine


def evaluate(engine: Engine, batches: Iterable[MicroBatch], *, group: dist.ProcessGroup) -> float:
    """Token-weighted mean loss.

    Args:
        engine: its dropout is off during evaluation; training goes on unchanged afterwards.
        batches: this rank's part of the set, as many on every rank (``data.loader.eval_batches``).
        group: dp x cp, over which the set is spread.

    Returns:
        the mean, equal on all ranks; NaN for a set without a valid target.

    Collective: ``group`` (the world under ZeRO-3).
    """
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for batch in batches:
        total += torch.stack(engine.eval_step(batch))
    dist.all_reduce(total, group=group)
    loss_sum, tokens = total.tolist()
    return loss_sum / tokens if tokens else math.nan

"""Nested tensors over the ranks of dp, as Accelerate's operations are over all processes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate.utils import find_batch_size as _find_batch_size
from accelerate.utils import recursively_apply
from torch import Tensor

SUM, MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


def find_batch_size(batch: Any) -> int | None:
    """Rows of the first tensor in it; None: there is none."""
    try:
        return _find_batch_size(batch)
    except (TypeError, ValueError, StopIteration):
        return None


def gather(data: Any, group: dist.ProcessGroup, *, uneven: bool = False) -> Any:
    """Each tensor of all ranks, one after the other along its first dim. Collective: ``group``.

    Args:
        uneven: ranks may have different numbers of rows.
    """

    def one(x: Tensor) -> Tensor:
        x = x[None] if x.dim() == 0 else x.contiguous()
        rows = [len(x)] * group.size()
        if uneven:
            rows = _all_of(len(x), x.device, group)
            x = F.pad(x, (*(0, 0) * (x.dim() - 1), 0, max(rows) - len(x)))
        parts = [torch.empty_like(x) for _ in rows]
        dist.all_gather(parts, x, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, rows)])

    return recursively_apply(one, data, error_on_other_type=True)


def _all_of(number: int, device: torch.device, group: dist.ProcessGroup) -> list[int]:
    """Each rank's. Collective: ``group``."""
    found = torch.zeros(group.size(), dtype=torch.int64, device=device)
    found[group.rank()] = number
    dist.all_reduce(found, group=group)
    return found.tolist()


def gather_objects(data: list[Any], group: dist.ProcessGroup) -> list[Any]:
    """The lists of all ranks as one. Collective: ``group``, on the CPU or not."""
    found: list[Any] = [None] * group.size()
    dist.all_gather_object(found, data, group=group)
    return [x for part in found for x in part]


def reduce(data: Any, group: dist.ProcessGroup, reduction: str) -> Any:
    """Args:
        reduction: "sum", "mean", "max" or "none".

    Collective: ``group``.
    """

    def one(x: Tensor) -> Tensor:
        x = x.clone()
        if reduction != "none":
            dist.all_reduce(x, op=MAX if reduction == "max" else SUM, group=group)
        return x / group.size() if reduction == "mean" else x

    return recursively_apply(one, data, error_on_other_type=True)


def pad(data: Any, group: dist.ProcessGroup, *, dim: int, value: Any, first: bool) -> Any:
    """Each tensor as long along ``dim`` as the longest of all ranks. Collective: ``group``."""

    def one(x: Tensor) -> Tensor:
        if dim >= x.dim() or dim < -x.dim():
            return x
        at = dim % x.dim()
        length = torch.tensor(x.shape[at], device=x.device)
        dist.all_reduce(length, op=MAX, group=group)
        extra = int(length) - x.shape[at]
        sides = (extra, 0) if first else (0, extra)
        return F.pad(x, (*(0, 0) * (x.dim() - 1 - at), *sides), value=value)

    return recursively_apply(one, data, error_on_other_type=True)

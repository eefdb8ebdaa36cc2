"""Whole things from the parts that ranks have of them: logits of a sequence, weights of a model.

Letters: B sequences, S tokens of each, s of them on this rank, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds4d.checkpoint.logical import LogicalTensor, Piece

MEETING_SECONDS = 120.0
Box = tuple[str, tuple[int, ...], tuple[int, ...]]  # name, offsets, sizes


def gather_sequence(
    x: Tensor, places: Sequence[Tensor], group: dist.ProcessGroup
) -> Tensor:
    """[B, s, V] -> [B, S, V], the same on every rank of ``group``, cp, and so is what is computed
    from it.

    Args:
        places: where each rank's tokens stand, [s] each.

    Collective: ``group``.
    """
    return _Gather.apply(x, torch.cat(list(places)).to(x.device), group)


class _Gather(torch.autograd.Function):
    """Each rank has the gradient of all of it, and goes on with that of its own tokens. Gradients
    of weights are averaged over cp later, but each rank has only its part of a sum: so times cp."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, length = group, x.shape[1]
        ctx.mine = places[group.rank() * length : (group.rank() + 1) * length]
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group=group)
        whole = torch.empty_like(x).new_empty(x.shape[0], len(places), *x.shape[2:])
        whole[:, places] = torch.cat(parts, dim=1)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        return grad[:, ctx.mine] * ctx.group.size(), None, None


def meet(what: str, *, rank: int, size: int, seconds: float = MEETING_SECONDS) -> None:
    """All ranks come here, or the first to come says so instead of waiting for ever.

    Raises:
        RuntimeError: some did not come.
    """
    if size == 1:
        return
    store = dist.distributed_c10d._get_default_store()
    number = _meetings[what] = _meetings.get(what, 0) + 1
    key = f"ds4d/{what}/{number}"
    store.add(key, 1)
    until = time.monotonic() + seconds
    while (came := store.add(key, 0)) < size:
        if time.monotonic() > until:
            raise RuntimeError(
                f"{what} was called on {came} of {size} ranks: in this layout no rank holds the "
                "whole model, so all of them must call it (not only the main process; name the "
                "one that writes by is_main_process=...)"
            )
        time.sleep(0.002)


_meetings: dict[str, int] = {}


def whole_tensors(
    state: Mapping[str, LogicalTensor], *, dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Logical tensors as rank 0 has them then, on the CPU; nothing elsewhere.

    Each box is sent once, by the first rank that has it.

    Args:
        dtype: of floating tensors; None: as they are.

    Collective: the world.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = {_box(name, piece): piece.tensor for name, piece in _pieces(state)}
    facts: list[Any] = [None] * size
    shapes = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
    dist.all_gather_object(facts, (list(mine), shapes))
    senders: dict[str, dict[Box, int]] = {}
    every: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for sender, (boxes, theirs) in enumerate(facts):
        every |= theirs
        for box in boxes:
            senders.setdefault(box[0], {}).setdefault(box, sender)
    whole = {}
    for name in sorted(every):
        shape, kind = every[name]
        found = torch.empty(shape, dtype=kind) if rank == 0 else None
        boxes = senders.get(name, {})
        if sum(prod(sizes) for _, _, sizes in boxes) < prod(shape):
            raise RuntimeError(f"{name}: no rank has all of its {list(shape)}")
        for box, sender in sorted(boxes.items()):
            _move(box, sender, mine.get(box), kind, found)
        if found is not None:
            change = dtype is not None and found.is_floating_point()
            whole[name] = found.to(dtype) if change else found
    return whole


def _pieces(state: Mapping[str, LogicalTensor]) -> Iterator[tuple[str, Piece]]:
    return ((name, piece) for name, tensor in state.items() for piece in tensor.pieces)


def _box(name: str, piece: Piece) -> Box:
    return name, tuple(piece.offsets), tuple(piece.tensor.shape)


def _move(
    box: Box, sender: int, here: Tensor | None, dtype: torch.dtype, found: Tensor | None
) -> None:
    """One box to rank 0."""
    rank, (_, offsets, sizes) = dist.get_rank(), box
    if found is None:
        if rank == sender:
            dist.send(here.detach().to(_device()).contiguous(), dst=0)
        return
    if sender == 0:
        part = here.detach()
    else:
        part = torch.empty(sizes, dtype=dtype, device=_device())
        dist.recv(part, src=sender)
    for dim, (start, count) in enumerate(zip(offsets, sizes)):
        found = found.narrow(dim, start, count)
    found.copy_(part)


def _device() -> torch.device:
    """That tensors travel from."""
    nccl = dist.get_backend() == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")

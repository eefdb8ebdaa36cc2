"""The entry into a block (an attention or an MLP) whose weights are cut over the tp ranks.

Letters: t ranks, B sequences, S tokens of the whole sequence, s = S / t, E hidden size.

Outside of blocks the residual stream is either whole and equal on every rank, or, when
``tp.scattered``, each rank holds its stretch of the sequence. What happens:

1. entry: the input is gathered, [B, s, E] -> [B, S, E] (scattered), or taken as it is;
2. inside, each rank computes with its part of the weights, on all tokens;
3. exit (``layers.RowLinear``, or the end of a block with experts): the ranks' partial outputs are
   summed, and scattered again.

Backward: at the exit the gradient is made complete for each rank, and from there on **every
gradient inside a block is partial**: the sum over the ranks is the gradient. That holds for
activations that are equal on all ranks and for weights that are whole on all ranks (norms of
queries and keys, routers) alike, because back-propagation is linear. At the entry the input's
gradient is summed, once, and such weights' gradients once a step, all together.

The entry and the column-parallel layers behind it share an ``Entry``. It lets these layers keep
the shard rather than the gathered input, gather it once again for all of them in the backward
pass, add up the input's gradient in one buffer, and begin its sum as soon as the last of them has
added to it, while its own weight's gradient is still to be computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds4d import comm
from ds4d.tensor_parallel.state import TensorParallel

PURPOSE = "block"


@dataclass(eq=False)
class Entry:
    """One entry into one block. Holds no activation of the forward pass: those are saved through
    autograd, where recomputation finds them.

    Attributes:
        early: the column-parallel layers are the only ones that read the input, so its gradient is
            complete when the last of them has been there.
        consumers: column-parallel layers that have not been there in the backward pass.
        grad: sum of the input's gradient on this rank, [B * S, E].
    """

    tp: TensorParallel
    shape: torch.Size  # [B, S, E]
    scattered: bool
    early: bool
    purpose: str  # whose bytes are counted
    consumers: int = 0
    grad: Tensor | None = None
    _reducing: comm.Pending | None = None
    _gathering: comm.PendingSequence | None = None
    _gathered: Tensor | None = None

    @property
    def keeps_shard(self) -> bool:
        """Under recomputation what is kept is dropped anyway, and gathered again once."""
        return self.scattered and self.tp.recompute == "none"

    def begin_gather(self, shard: Tensor) -> None:
        """Gather the input again, once for all layers that need it."""
        if self._gathering is None and self._gathered is None:
            by_row = shard if shard.dim() == 3 else shard[None]
            self._gathering = comm.begin_gather(by_row, self.tp.group, purpose=self.purpose)
            if not self.tp.overlap:
                self.gathered()

    def gathered(self) -> Tensor:
        if self._gathered is None:
            self._gathered = self._gathering.wait()
        return self._gathered

    def add(self, grad: Tensor, weight: Tensor) -> None:
        """Add ``grad @ weight`` ([B * S, out] @ [out, E]) to the input's gradient."""
        if self.grad is None:
            self.grad = grad @ weight
        else:
            self.grad.addmm_(grad, weight)

    def leave(self) -> None:
        """A layer has added its part; after the last one the sum over the ranks begins."""
        self.consumers -= 1
        last = self.consumers == 0 and self.early and self.tp.overlap
        if last and self.grad is not None:
            self._begin_reduce(self.grad.view(self.shape))

    def _begin_reduce(self, grad: Tensor) -> None:
        begin = comm.begin_reduce_scatter if self.scattered else comm.begin_all_reduce
        self._reducing = begin(grad, self.tp.group, purpose=self.purpose)

    def finish(self, other: Tensor | None) -> Tensor | None:
        """The gradient of the block's input.

        Args:
            other: what those who are not column-parallel layers sent back, partial too.
        """
        self._gathered = self._gathering = None
        if self._reducing is None:
            if self.grad is None and other is None:
                return None
            if self.grad is None:
                total = other.clone()  # is summed in place, and may be somebody else's
            else:
                total = self.grad.view(self.shape)
                total = total if other is None else total + other
            self._begin_reduce(total)
            other = None
        result, self._reducing, self.grad = self._reducing.wait(), None, None
        if other is not None:
            self._begin_reduce(other.clone())
            result = result + self._reducing.wait()
        return result


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, entry: Entry) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.entry = entry
        if entry.scattered:
            return comm.gather_sequence(x, entry.tp.group, purpose=entry.purpose)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor | None):
        return ctx.entry.finish(grad), None


def enter(x: Tensor, tp: TensorParallel, *, early: bool, purpose: str = PURPOSE) -> Tensor:
    """The input of a block, complete on every rank: [B, s, E] (scattered) or [B, S, E] ->
    [B, S, E]; or the same with B and the sequence in one.

    Collective: tp, when scattered.
    """
    if tp.size == 1:
        return x
    by_row = x if x.dim() == 3 else x[None]  # tokens of all rows in one: their order is no matter
    batch, length, width = by_row.shape
    shape = torch.Size((batch, length * tp.size if tp.scattered else length, width))
    entry = Entry(tp, shape, tp.scattered, early, purpose)
    whole = _Enter.apply(by_row, entry)
    whole = whole if x.dim() == 3 else whole[0]
    if torch.is_grad_enabled():
        whole.ds4d_entry = entry
        whole.ds4d_kept = x.detach() if entry.keeps_shard else None
        whole.ds4d_version = whole._version
    return whole


def entry_of(x: Tensor) -> Entry | None:
    """The entry that made ``x``; None: another tensor, or one that was changed in place since, so
    that what the entry keeps is not what ``x`` is."""
    entry = getattr(x, "ds4d_entry", None)
    return entry if entry is not None and x._version == x.ds4d_version else None

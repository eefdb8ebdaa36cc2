"""Cross-entropy over a vocabulary that is cut over the tp ranks, fused with the head.

Letters: t ranks, B sequences, S tokens of a sequence, s = S / t, N = B * S, R rows (tokens) of a
chunk, E hidden size, V vocabulary, v real rows of this rank's weight (padding left off).

Logits exist for one chunk of tokens at a time, and their gradient takes their place. As the loss is
a sum, its gradient by the logits is known but for one factor as soon as the loss is; so what they
are needed for is done at once and they are computed once. In the forward pass, with tp:

1. hidden [B, s, E] -> [B, S, E], when scattered (else it is whole on every rank);
2. for each chunk: z = h W^T (+ b) and the model's tail, [R, v]; max over the vocabulary (all-reduce
   MAX of 4 bytes a token); sum of exp(z - max), the target's z - max and, with label smoothing, the
   sum of z - max (one all-reduce SUM of 8 bytes a token, 12 with smoothing): the bytes of three
   all-reduces of 4 * B * S, formulas.md 2.4, in two calls. Then the gradient in place of z, and
   from it this chunk's gradient of hidden and its share of the weight's;
3. the gradient of hidden, partial over the vocabulary, summed over tp: all-reduce, or
   reduce-scatter to the shard.

The backward pass multiplies by the factor and communicates nothing. In half precision a gradient
that was rounded before it is multiplied is rounded twice; so the caller may tell the factor
beforehand (``scale``), as the engine does, and what is left to multiply with is 1.

With a label smoothing of e and a z-loss of c the loss of a token is, where y is its target,
    (1 - e) (lse - z_y) + e (lse - mean of z over all V) + c lse^2,    lse = log sum exp z
and its gradient    (1 + 2 c lse) softmax(z) - (1 - e) [k = y] - e / V.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds4d import comm
from ds4d.data.batch import IGNORE
from ds4d.logits import Tail
from ds4d.tensor_parallel.state import NoGroup

CHUNK_ELEMENTS = 1 << 24  # logits that a rank holds in fp32 at a time: 64 MiB


@dataclass(frozen=True)
class Objective:
    """What is minimised beside the likelihood.

    Attributes:
        label_smoothing: probability that is spread evenly over the vocabulary.
        z_loss: coefficient of lse^2, which keeps logits from drifting.
    """

    label_smoothing: float = 0.0
    z_loss: float = 0.0


@dataclass(frozen=True)
class Vocabulary:
    """The columns [start, stop) of ``size`` that this rank has; none where start == stop."""

    start: int
    stop: int
    size: int
    group: dist.ProcessGroup

    @classmethod
    def whole(cls, size: int) -> Vocabulary:
        return cls(0, size, size, NoGroup())


# -- one chunk ------------------------------------------------------------------------------------


def _score(
    z: Tensor,
    targets: Tensor,
    vocabulary: Vocabulary,
    objective: Objective,
    *,
    scale: Tensor | float | None,
) -> Tensor:
    """The summed loss of a chunk.

    Args:
        z: fp32 [R, v], this rank's columns. It is overwritten: with ``scale`` times the gradient,
            if there is a scale.
        targets: int64 [R], on every rank the same.

    Returns:
        fp32 scalar, the same on every rank.

    Collective: ``vocabulary.group``.
    """
    smoothing, group = objective.label_smoothing, vocabulary.group
    counted = targets != IGNORE
    own = (targets >= vocabulary.start) & (targets < vocabulary.stop)
    column = (targets - vocabulary.start).clamp_(0, max(0, z.shape[1] - 1))[:, None]  # [R, 1]

    highest = _highest(z)
    comm.all_reduce(highest, group, purpose="loss", op=dist.ReduceOp.MAX)
    z.sub_(highest[:, None])
    sums = z.new_zeros(3 if smoothing else 2, len(z))
    if z.shape[1]:
        sums[1] = z.gather(1, column)[:, 0].masked_fill_(~own, 0.0)
    if smoothing:
        torch.sum(z, 1, out=sums[2])
    torch.sum(z.exp_(), 1, out=sums[0])
    comm.all_reduce(sums, group, purpose="loss")

    log_sum = sums[0].log()
    losses = log_sum - (1 - smoothing) * sums[1]
    if smoothing:
        losses -= (smoothing / vocabulary.size) * sums[2]
    if objective.z_loss:
        losses += objective.z_loss * (log_sum + highest).square()
    total = losses.masked_fill_(~counted, 0.0).sum()

    if scale is not None and z.shape[1]:
        each = counted * scale  # [R]
        factor = each / sums[0]
        if objective.z_loss:
            factor *= 1 + 2 * objective.z_loss * (log_sum + highest)
        z.mul_(factor[:, None])
        z.scatter_add_(1, column, ((smoothing - 1) * own * each)[:, None])
        if smoothing:
            z.sub_((smoothing / vocabulary.size * each)[:, None])
    return total


def _highest(z: Tensor) -> Tensor:
    return z.amax(1) if z.shape[1] else z.new_full((len(z),), float("-inf"))


def _chunks(rows: int, columns: int) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    return [slice(start, min(start + step, rows)) for start in range(0, rows, step)]


# -- fused with the head --------------------------------------------------------------------------


@dataclass(frozen=True)
class HeadLoss:
    """All of the fused function but its tensors.

    Attributes:
        scattered: hidden is a shard of the sequence.
        scale: the factor of the loss that gradients are computed with at once.
        grad: gradients will be asked for (inside of the function autograd no longer says).
    """

    vocabulary: Vocabulary
    objective: Objective
    tail: Tail
    scattered: bool
    scale: Tensor | float
    grad: bool


@dataclass
class _Gradients:
    """What the chunks add up to. ``None`` where nobody asks.

    Attributes:
        hidden: [N, E], in hidden's dtype.
        weight, bias: fp32, with rows of zeros for the padding.
    """

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    _first: bool = field(default=True, repr=False)

    def add(self, rows: slice, z: Tensor, h: Tensor, weight: Tensor) -> None:
        """One chunk: the logits' gradient z fp32 [R, v], h [R, E], the real weight [v, E]."""
        real = z.shape[1]
        if self.bias is not None:
            self.bias[:real] += z.sum(0)
        half = z.to(h.dtype)
        if self.hidden is not None:
            torch.mm(half, weight, out=self.hidden[rows])
        if self.weight is not None and real:
            _add_product(self.weight[:real], z, half, h, first=self._first)
        self._first = False


def _add_product(total: Tensor, z: Tensor, half: Tensor, h: Tensor, *, first: bool) -> None:
    """total [v, E] += z^T h, in fp32; ``half`` is z in h's dtype."""
    into = {"out": total}
    if h.dtype != torch.float32 and _mixes(h):
        z, into = half, {"out": total, "out_dtype": torch.float32}
    elif h.dtype != torch.float32:
        h = h.float()
    if first:
        torch.mm(z.T, h, **into)
    else:
        torch.addmm(total, z.T, h, **into)


def _mixes(x: Tensor) -> bool:
    """The device multiplies half precision into fp32 (cuBLAS)."""
    return x.is_cuda and torch.version.cuda is not None


def _logits(h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """fp32 [R, v] of [R, E] and [v, E]; nobody else's memory."""
    if h.dtype != torch.float32 and _mixes(h):
        z = torch.mm(h, weight.T, out_dtype=torch.float32)
    else:
        z = torch.mm(h, weight.T).float()
    return z if bias is None else z.add_(bias)


class _FusedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, work: HeadLoss
    ) -> Tensor:
        vocabulary, group = work.vocabulary, work.vocabulary.group
        whole = hidden
        if work.scattered:
            whole = comm.gather_sequence(hidden, group, purpose="head")  # [B, s, E] -> [B, S, E]
        h, targets = whole.flatten(0, 1), targets.flatten()
        real = vocabulary.stop - vocabulary.start
        weight, bias = weight.detach(), None if bias is None else bias.detach()

        wanted = [work.grad and needed for needed in ctx.needs_input_grad]
        gradients = _Gradients(
            hidden=torch.empty_like(h) if wanted[0] else None,
            weight=_zeros(weight, above=real) if wanted[1] else None,
            bias=torch.zeros_like(bias, dtype=torch.float32) if wanted[2] else None,
        )
        total = torch.zeros((), dtype=torch.float32, device=h.device)
        # by the padded size, so that all ranks take the same chunks
        for rows in _chunks(len(h), len(weight)):
            z = _logits(h[rows], weight[:real], None if bias is None else bias[:real])
            kept = work.tail.apply_(z, keep=any(wanted))
            scale = work.scale if any(wanted) else None
            total += _score(z, targets[rows], vocabulary, work.objective, scale=scale)
            if any(wanted):
                work.tail.backward_(z, kept)
                gradients.add(rows, z, h[rows], weight[:real])
            del z, kept  # before the next chunk's
        if gradients.hidden is not None:
            gradients.hidden = _sum_hidden(gradients.hidden.view(whole.shape), work)
        ctx.gradients, ctx.dtype, ctx.scale = gradients, weight.dtype, work.scale
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        gradients, ctx.gradients = ctx.gradients, None
        assert gradients is not None, "the loss was back-propagated a second time"
        hidden, weight, bias = (
            None if g is None else g.mul_(grad / ctx.scale)
            for g in (gradients.hidden, gradients.weight, gradients.bias)
        )
        weight, bias = (None if g is None else g.to(ctx.dtype) for g in (weight, bias))
        return hidden, weight, bias, None, None


def _zeros(weight: Tensor, *, above: int) -> Tensor:
    """fp32, of the weight's shape; only the rows from ``above`` on are written."""
    out = torch.empty_like(weight, dtype=torch.float32)
    out[above:] = 0.0
    return out


def _sum_hidden(grad: Tensor, work: HeadLoss) -> Tensor:
    """[B, S, E], partial over the vocabulary -> complete; [B, s, E] when scattered."""
    group = work.vocabulary.group
    if work.scattered:
        return comm.reduce_scatter_sequence(grad, group, purpose="head")
    return comm.all_reduce(grad, group, purpose="head")


def fused_head_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, work: HeadLoss
) -> Tensor:
    """Sum of the token losses of ``tail(hidden weight^T + bias)``.

    Args:
        hidden: [B, S, E], whole and equal on every rank, or the shard [B, s, E].
        weight: this rank's rows, [v + padding, E].
        bias: [v + padding].
        targets: int64 [B, S], already shifted; ``IGNORE`` (-100) is not counted.

    Returns:
        fp32 scalar, the same on every rank. Its gradient reaches ``hidden`` complete.

    Collective: the vocabulary's group.
    """
    length = hidden.shape[1] * (work.vocabulary.group.size() if work.scattered else 1)
    assert targets.shape == (len(hidden), length), f"{targets.shape} targets, {hidden.shape} hidden"
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):  # as F.linear would
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        return _FusedHeadLoss.apply(hidden, weight, bias, targets, work)


# -- of logits that are there ---------------------------------------------------------------------


class _SumCrossEntropy(torch.autograd.Function):
    """Rows in chunks, so that no fp32 copy of the logits exists."""

    @staticmethod
    def forward(
        ctx, logits: Tensor, targets: Tensor, objective: Objective, scale: Tensor | float | None
    ) -> Tensor:
        scale = scale if ctx.needs_input_grad[0] else None
        ctx.grad, ctx.scale = None if scale is None else torch.empty_like(logits), scale
        total = torch.zeros((), dtype=torch.float32, device=logits.device)
        vocabulary = Vocabulary.whole(logits.shape[1])
        for rows in _chunks(*logits.shape):
            z = logits[rows].to(torch.float32, copy=True)
            total += _score(z, targets[rows], vocabulary, objective, scale=scale)
            if scale is not None:
                ctx.grad[rows] = z
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        gradient, ctx.grad = ctx.grad, None
        assert gradient is not None, "the loss was back-propagated a second time"
        return gradient.mul_(grad / ctx.scale), None, None, None


def sum_cross_entropy(
    logits: Tensor,
    targets: Tensor,
    objective: Objective = Objective(),
    *,
    scale: Tensor | float = 1.0,
) -> Tensor:
    """Sum of the token losses, where logits are whole.

    Args:
        logits: [B, S, V] in any float type.
        targets: int64 [B, S], already shifted; ``IGNORE`` (-100) is not counted.
        scale: what the sum will be multiplied by; a wrong one costs precision, no more.

    Returns:
        fp32 scalar; 0 when nothing is counted.
    """
    known = scale if torch.is_grad_enabled() else None
    return _SumCrossEntropy.apply(logits.flatten(0, 1), targets.flatten(), objective, known)

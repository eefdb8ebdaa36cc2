"""Embedding and head, cut by the vocabulary over the tp ranks; the head computes its loss itself.

Letters: t ranks, B sequences, S tokens of a sequence, s = S / t, E hidden size, V vocabulary.

Each rank has a stretch of the rows of both weights, [ceil(V / t), E]; the last ones are padded.

Embedding, by hooks, so that subclasses that scale their output stay what they are:
1. before: ids of other ranks become row 0 of this one;
2. after: their outputs become zeros, and the ranks' outputs are summed, [B, S, E], or summed and
   scattered, [B, s, E].

Head, called as always (generation): the input is gathered if it is a shard, each rank computes its
columns, and they are gathered and lose their padding, [B, S, V]. Every rank then holds the same
logits and goes on to compute the same, so their gradient is complete, and that of the input is
summed over the ranks.

Head while the loss *defers* it: its call computes nothing and returns ``DeferredLogits``, which go
through the rest of the model's own forward. A hook at the end of that forward then calls the head
as a module, with the targets and what was recorded, and it returns the loss. As a module, because
ZeRO-3 gathers a module's weights only in hooks around its own forward.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ds4d import comm
from ds4d.logits import DeferredLogits
from ds4d.tensor_parallel.blocks import enter
from ds4d.tensor_parallel.cross_entropy import (
    HeadLoss,
    Objective,
    Vocabulary,
    fused_head_loss,
)
from ds4d.tensor_parallel.shard import Shard, even, local_parameter
from ds4d.tensor_parallel.state import NoGroup, TensorParallel

log = logging.getLogger(__name__)

Memo = dict[int, nn.Parameter]  # id of a whole parameter -> this rank's


def _rows(count: int, tp: TensorParallel) -> Shard:
    return even(0, count, tp.rank, tp.size, padded=True)


def _span(shard: Shard) -> tuple[int, int]:
    return shard.ranges[0] if shard.ranges else (shard.size, shard.size)


# -- embedding ------------------------------------------------------------------------------------


def shard_embedding(module: nn.Embedding, tp: TensorParallel, memo: Memo | None = None) -> None:
    """Cut the rows of an embedding on meta over the ranks, in place.

    Args:
        memo: of all who cut this model, so that ties hold.

    Collective: its forward and, when scattered, its backward pass; tp.
    """
    if tp.size == 1:
        return
    rows = _rows(module.num_embeddings, tp)
    start, stop = _span(rows)
    module.weight = local_parameter(module.weight, rows, {} if memo is None else memo)
    module.num_embeddings = module.weight.shape[0]
    if module.padding_idx is not None:  # the row that gets no gradient
        here = start <= module.padding_idx < stop
        module.padding_idx = module.padding_idx - start if here else None
    lookup = _Lookup(tp, start, stop)
    module.register_forward_pre_hook(lookup.before, with_kwargs=True)
    module.register_forward_hook(lookup.after)


@dataclass
class _Lookup:
    tp: TensorParallel
    start: int
    stop: int
    elsewhere: Tensor | None = None  # [B, S], between the two hooks

    def before(self, _module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        (ids,) = (*args, *kwargs.values())
        self.elsewhere = (ids < self.start) | (ids >= self.stop)
        return ((ids - self.start).masked_fill_(self.elsewhere, 0),), {}

    def after(self, _module: nn.Module, _args: tuple, output: Tensor) -> Tensor:
        part = output.masked_fill(self.elsewhere[..., None], 0.0)
        self.elsewhere = None
        total = comm.scatter_sum if self.tp.scattered else comm.reduce
        return total(part, self.tp.group, purpose="embedding")


# -- head -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Task:
    """What a deferred head is to do."""

    targets: Tensor
    objective: Objective
    scale: Tensor | float


class ParallelHead(nn.Module):
    """Takes the place, and the weights, of the linear layer that makes logits.

    Attributes:
        defers: the loss may defer it; false for models that do with logits what cannot be recorded.
    """

    def __init__(self, head: nn.Linear, tp: TensorParallel, memo: Memo) -> None:
        super().__init__()
        self.in_features, self.out_features = head.in_features, head.out_features
        self.weight, self.bias = head.weight, head.bias
        if tp.size > 1:
            rows = _rows(head.out_features, tp)
            self.weight = local_parameter(head.weight, rows, memo)
            self.bias = None if head.bias is None else local_parameter(head.bias, rows, memo)
        self.train(head.training)
        self.defers = True
        self._tp = tp
        self._vocabulary = Vocabulary(
            *_span(_rows(head.out_features, tp)), head.out_features, tp.group
        )
        self._task: _Task | None = None

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}"

    @contextmanager
    def deferred(
        self,
        targets: Tensor,
        objective: Objective = Objective(),
        *,
        scale: Tensor | float = 1.0,
    ) -> Iterator[None]:
        """Within, the model's ``logits`` are the summed loss of these targets.

        Args:
            targets: int64 [B, S], already shifted, on every tp rank the same.
            scale: what the sum will be multiplied by; a wrong one costs precision, no more.
        """
        self._task = _Task(targets, objective, scale)
        try:
            yield
        finally:
            self._task = None

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        if self._task is not None:
            return DeferredLogits(hidden, self.out_features, self.weight.dtype)
        return super().__call__(hidden, *args, **kwargs)

    def loss_of(self, logits: DeferredLogits) -> Tensor:
        """fp32 scalar, the same on every rank. Collective: tp."""
        return super().__call__(logits.hidden, logits, self._task)

    def forward(
        self, hidden: Tensor, logits: DeferredLogits | None = None, task: _Task | None = None
    ) -> Tensor:
        """[B, S, E], or the shard [B, s, E] -> logits [B, S, V], or with a task the loss.

        Collective: tp.
        """
        if task is None:
            whole = enter(hidden, self._tp, early=False, purpose="head")
            columns = F.linear(whole, self.weight, self.bias)
            logits = comm.gather_last_complete(columns, self._tp.group, purpose="head")
            return logits[..., : self.out_features]
        work = HeadLoss(
            self._vocabulary,
            task.objective,
            logits.tail,
            scattered=hidden.shape[1] != task.targets.shape[1],
            scale=task.scale,
            grad=torch.is_grad_enabled(),
        )
        return fused_head_loss(hidden, self.weight, self.bias, task.targets, work)


# -- a model's own head ---------------------------------------------------------------------------


def install_head(
    model: PreTrainedModel, tp: TensorParallel | None = None, memo: Memo | None = None
) -> None:
    """Put a ``ParallelHead`` where ``model`` has its head, and let the loss be fused with it.

    A head that is no plain linear layer stays as it is, whole on every rank; so does the way to
    its logits. Before DeepSpeed adds its own hooks to the model.

    Args:
        model: on meta if tp has several ranks.
        tp: None: one rank, without a process group.
        memo: of all who cut this model, so that ties hold.

    Raises:
        ValueError: the head stays whole, but the embedding, its tied weight, is cut.
    """
    tp = TensorParallel(NoGroup()) if tp is None else tp
    head = model.get_output_embeddings()
    if head is None or type(head).forward is not nn.Linear.forward:
        _keep_whole(model, head, tp)
        return
    new = ParallelHead(head, tp, {} if memo is None else memo)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if child is head:
                setattr(parent, name, new)
        for name, param in parent.named_parameters(recurse=False):
            if param is head.bias:  # BERT's is another module's, too
                setattr(parent, name, new.bias)
    if reason := _why_not_deferred(model, new):
        new.defers = False
        log.warning("%s: logits are computed whole: %s", type(model).__name__, reason)
    model.register_forward_hook(partial(_compute_deferred, new))


def head_of(model: PreTrainedModel) -> ParallelHead | None:
    """The head that the loss can defer, where there is one."""
    head = model.get_output_embeddings()
    return head if isinstance(head, ParallelHead) and head.defers else None


def _compute_deferred(head: ParallelHead, _model: nn.Module, _args: tuple, output: Any) -> None:
    if isinstance(getattr(output, "logits", None), DeferredLogits):
        output.logits = head.loss_of(output.logits)


def _keep_whole(model: PreTrainedModel, head: nn.Module | None, tp: TensorParallel) -> None:
    name = type(head).__name__
    log.warning("%s: logits are computed whole: its head is a %s", type(model).__name__, name)
    if head is None or tp.size == 1:
        return
    embedding = model.get_input_embeddings()
    if hasattr(embedding.weight, "tp_shard") and model.config.get_text_config().tie_word_embeddings:
        raise ValueError(
            f"ds4d.parallel.tp {tp.size}: the head of {type(model).__name__} is a {name}, which is "
            "not cut by the vocabulary, but its weight is the embedding's, which is; set "
            'ds4d.parallel.tp to 1, or "tie_word_embeddings": false in the model\'s config'
        )
    head.register_forward_pre_hook(partial(_gather_whole, tp))


def _gather_whole(tp: TensorParallel, _module: nn.Module, args: tuple) -> tuple:
    """A head that is whole on every rank needs all tokens: [B, s, E] -> [B, S, E]."""
    if not tp.scattered:
        return args
    return (comm.gather_complete(args[0], tp.group, purpose="head"), *args[1:])


# -- does the model do with its logits what can be recorded? ---------------------------------------


class _Outputs:
    """What stands for the outputs of a base model: a hidden state and nothing else."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)
        return None

    def __getitem__(self, index: int | slice) -> Any:
        return (self.last_hidden_state, *[None] * 9)[index]


def _why_not_deferred(model: PreTrainedModel, head: ParallelHead) -> str | None:
    """Run the model's own forward with nothing below its head; None: its end can be recorded."""
    hidden = torch.empty(1, 2, head.in_features, dtype=head.weight.dtype, device="meta")
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    below = [
        module for module in model.modules()
        if isinstance(module, PreTrainedModel) and head not in module.modules()
    ]  # fmt: skip
    try:
        for module in below:
            module.forward = lambda *_args, **_kwargs: _Outputs(hidden)
        with head.deferred(ids), torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits
        if not isinstance(logits, DeferredLogits):
            return "its head is not the last that makes them"
    except Exception as error:  # whatever a family's own code makes of it
        return str(error).partition("\n")[0]
    finally:
        for module in below:
            module.__dict__.pop("forward", None)
    return None

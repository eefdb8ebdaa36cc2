"""Faults that a training system can have, each planted in the ranks' own code while they train.

A fault is a context manager, entered on every rank, and stands in what is true of a run of
``tests.verify_runs.run_of``: the layout that shows it, and the axes that are to blame.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds4d import engine, gradients, optim, optimizer_state, zero_engine
from ds4d.attention import ring, ulysses
from ds4d.data import loader
from ds4d.data.batch import IGNORE
from ds4d.data.loader import TrainLoader
from ds4d.model import build
from ds4d.pipeline import engine as pipeline
from ds4d.tensor_parallel import layers, vocab

Plant = Callable[[], AbstractContextManager]


@dataclass(frozen=True)
class Fault:
    """Attributes:
    plant: makes it.
    axes: that are to blame.
    layout: keywords of ``run_of``.
    tensor: the first that is off, where only some are.
    """

    plant: Plant
    axes: tuple[str, ...]
    layout: dict[str, Any] = field(default_factory=dict)
    tensor: str | None = None


FAULTS: dict[str, Fault] = {}


def fault(name: str, *axes: str, tensor: str | None = None, **layout: Any):
    """Enter a function that gives the context manager."""

    def enter(plant: Plant) -> Plant:
        FAULTS[name] = Fault(plant, axes, layout, tensor)
        return plant

    return enter


def _after(owner: Any, name: str, change: Callable) -> AbstractContextManager:
    """What ``owner.name`` returns goes through ``change(result, *args, **kwargs)``."""
    real = getattr(owner, name)

    def changed(*args, **kwargs):
        return change(real(*args, **kwargs), *args, **kwargs)

    return mock.patch.object(owner, name, changed)


# -- loss and data -------------------------------------------------------------------------------


@fault("the loss is a mean of the means of micro-batches", dp=2)
def _means():
    def of_each(loss, _model, batch, *_args, **_kwargs):
        return loss * 60 / engine.count_targets(batch.targets)

    return _after(engine, "sum_loss", of_each)


@fault("padding and what is masked are counted", dp=2)
def _counted():
    return mock.patch.object(engine, "count_targets", lambda x: torch.tensor(x.numel()))


@fault("a micro-batch is taken twice, another not at all", tp=2)
def _twice():
    real = engine.Engine._pass_after_pass

    def first_again(self, batches, *scales):
        return real(self, [*batches[:-1], batches[0]], *scales)

    return mock.patch.object(engine.Engine, "_pass_after_pass", first_again)


@fault("ranks of dp read the same samples", "dp", dp=2, tp=2)
def _same_samples():
    real = TrainLoader.__init__

    def init(self, *args, **kwargs):
        real(self, *args, **kwargs | {"dp_rank": 0})

    return mock.patch.object(TrainLoader, "__init__", init)


# -- optimizer -----------------------------------------------------------------------------------


@fault("gradients are averaged over dp and the loss does not undo it", "dp", dp=2, tp=2)
def _averaged():
    def one(_none, self, *_args, **_kwargs):
        self._group_size = 1

    return _after(engine.Engine, "__init__", one)


@fault("one rank does not step its part of the weights", "dp", "zero", dp=2, tp=2)
def _not_stepped():
    real = DeepSpeedZeroOptimizer._optimizer_step

    def step(self, group):
        if dist.get_rank(self.dp_process_group) == 0:
            real(self, group)

    return mock.patch.object(DeepSpeedZeroOptimizer, "_optimizer_step", step)


@fault("norms and biases decay", dp=2, tensor="model.layers.0.input_layernorm.weight")
def _decay():
    real = optim.param_groups
    return mock.patch.object(
        optim, "param_groups", lambda named, **kwargs: real(named, **kwargs | {"decay_all": True})
    )


@fault("there are no fp32 weights", "bf16", tp=2, keys={"bf16": {"enabled": True}})
def _rounded():
    def rounding(result, self, *_args, **_kwargs):
        if self._engine.bfloat16_enabled():
            for flat in optimizer_state._flats(self._engine):
                flat.data.copy_(flat.data.bfloat16())
        return result

    return _after(engine.Engine, "train_step", rounding)


# -- tp ------------------------------------------------------------------------------------------


@fault("the norm is that of one tp rank's shards", "tp", tp=2, dp=2, stage=0)
def _norm():
    real = zero_engine.all_reduce

    def reduce(x, group, *, purpose):
        return x if purpose == "gradient norm" else real(x, group, purpose=purpose)

    return mock.patch.object(zero_engine, "all_reduce", reduce)


@fault("a rank's range of the vocabulary is shifted by one", "tp", tp=2, dp=2)
def _shifted():
    def shifted(span, _shard):
        start, stop = span
        return (start + 1, stop + 1) if start else span

    return _after(vocab, "_span", shifted)


GPT2 = dict(model_type="gpt2", vocab_size=4097, n_embd=64, n_layer=4, n_head=4, n_positions=128,
            bos_token_id=1, eos_token_id=2)  # fmt: skip


@fault("a row-parallel layer adds its bias before the sum", "tp", model=GPT2, tp=2, pp=2)
def _bias():
    def forward(self, x):
        return layers.leave(F.linear(x, self.matrix, self.bias), self.tp)

    return mock.patch.object(layers.RowLinear, "forward", forward)


@fault(
    "gradients of norms are not summed over tp", "tp", "sequence_parallel", tp=2, dp=2,
    tensor="model.layers.0.input_layernorm.weight",
)  # fmt: skip
def _norms():
    return mock.patch.object(gradients, "sum_partial_gradients", lambda *_args: None)


# -- cp ------------------------------------------------------------------------------------------


def _cut(change: Callable) -> AbstractContextManager:
    """Of batches that are cut, but not of those that the trainer tries the model with."""

    def changed(batch, *_args, **_kwargs):
        return batch if batch.cut is None else change(batch)

    return _after(loader, "collate", changed)


@fault("positions begin at 0 on every cp rank", "cp", cp=2, dp=2)
def _positions():
    return _cut(
        lambda batch: replace(
            batch, position_ids=torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
        )
    )


@fault("labels are shifted after the cut", "cp", cp=2, tp=2)
def _labels():
    def shift(batch):
        following = F.pad(batch.input_ids[:, 1:], (0, 1), value=IGNORE)
        return replace(batch, targets=following.masked_fill(batch.targets == IGNORE, IGNORE))

    return _cut(shift)


@fault("documents see each other", "cp", cp=2, dp=2)
def _documents():
    return _cut(lambda batch: replace(batch, cut=replace(batch.cut, documents=None, packed=None)))


@fault("gradients of keys return to the wrong tokens", "cp", cp=2, pp=2)
def _keys():
    def add_to(self, dk, dv):
        for grad, came in zip((dk, dv), self.wait()):
            for (start, stop), part in zip(self._ranges, ring._parts(came, self._ranges)):
                grad[:, :, start:stop, : came.shape[-1]] += part.flip(2)

    return mock.patch.object(ring._Returning, "add_to", add_to)


@fault("heads come back in another order", "cp", cp=2, tp=2, context={"method": "ulysses"})
def _heads():
    return _after(ulysses, "to_tokens", lambda out, *_args: out.flip(1))


# -- pp ------------------------------------------------------------------------------------------


@fault("the last stage has the labels of another micro-batch", "pp", pp=2, tp=2)
def _other_labels():
    real, seen = pipeline.sum_loss, []

    def loss(model, batch, *args, **kwargs):
        seen.append(batch.targets)
        return real(model, replace(batch, targets=seen[max(0, len(seen) - 2)]), *args, **kwargs)

    return mock.patch.object(pipeline, "sum_loss", loss)


@fault(
    "the gradient of a tied weight is not summed over its stages", "pp", pp=2, dp=2,
    model=GPT2, tensor="transformer.wte.weight",
)  # fmt: skip
def _tied():
    return mock.patch.object(gradients, "sum_over_stages", lambda *_args: None)


# -- recompute -----------------------------------------------------------------------------------


@fault(
    "a layer that is computed again loses a gradient", "recompute", tp=2, recompute="full",
    tensor="model.layers.1.mlp.down_proj.weight",
)  # fmt: skip
def _lost():
    def lose(_none, model, recompute):
        if recompute != "none":
            weight = model.get_parameter("model.layers.1.mlp.down_proj.weight")
            weight.register_hook(torch.zeros_like)

    return _after(build, "_enable_recompute", lose)


# -- and one that raises -------------------------------------------------------------------------


@fault("a tp rank raises", "tp", tp=2, dp=2)
def _raises():
    def stop(span, shard):
        if span[0]:
            raise ArithmeticError("the second half of the vocabulary")
        return span

    return _after(vocab, "_span", stop)

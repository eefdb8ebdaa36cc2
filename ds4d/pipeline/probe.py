"""What a model's forward does around its layers, found by running it once without memory.

A pipeline cuts a model between its layers. That is right if a layer's hidden state is all that one
layer hands to the next, and all that comes out of the last one. So the model's own forward is run
on fake tensors, with every layer's output replaced by a fresh leaf of autograd: what then reaches
a later layer, or the end, by another way gives itself away by its gradient.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils import ModelOutput

from ds4d import attention
from ds4d.model.meta import meta_model
from ds4d.pipeline.stack import layer_stack

NO_ATTENTION = "ds4d_probe"  # only shapes matter
SHAPE = (2, 4)  # of the ids it is tried with: B, S
DTYPE = torch.bfloat16  # so that a residual stream kept in fp32 shows


@dataclass
class Anatomy:
    """A model around its layers.

    Attributes:
        stack: path of the list of layers.
        outputs: of each layer, how many things it returns; 0: a hidden state that is not in a
            tuple.
        before: paths of the modules outside of the layers, with parameters of their own, that are
            called before the first layer.
        after: those that are called after the last layer, or by nobody but the head.
        width: features of the hidden states between layers.
        fp32_hidden: they are fp32 whatever the parameters are.
    """

    stack: str
    outputs: list[int] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    width: int = 0
    fp32_hidden: bool = False


def hidden_of(args: tuple, kwargs: dict[str, Any]) -> Tensor:
    """The hidden state among what a layer is called with."""
    return args[0] if args else kwargs["hidden_states"]


def probe(config: PreTrainedConfig) -> Anatomy:
    """Build the model of ``config`` without memory and run it once.

    Raises:
        ValueError: it can't be cut between its layers; says why.
    """
    with fake_model(config) as model:
        try:
            path, layers = layer_stack(model)
        except ValueError as error:
            raise Refusal(str(error)) from None
        watch = _Watch(Anatomy(path), layers)
        watch.install(model)
        watch.check_end(run_base(model))
    return watch.anatomy


@contextmanager
def fake_model(config: PreTrainedConfig) -> Iterator[PreTrainedModel]:
    """The model on fake tensors, to be tried out within.

    Raises:
        ValueError: a ``Refusal``, or whatever its own code has made of what was tried.
    """
    try:
        model = meta_model(config, dtype=DTYPE, attn_implementation=_implementation(config))
        with FakeTensorMode(), _quiet():
            _become_fake(model)
            yield model
    except Refusal as refusal:
        raise ValueError(str(refusal)) from None
    except Exception as error:
        text = str(error).partition("\n")[0]
        message = f"its forward could not be followed ({type(error).__name__}: {text})"
        raise ValueError(message) from error


def _become_fake(model: nn.Module) -> None:
    """From meta, on which much of a forward pass does not run."""
    fakes: dict[Tensor, Tensor] = {}  # one for each, that ties hold
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is None:
                    continue
                if tensor not in fakes:
                    fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    fakes[tensor] = fake
                tensors[name] = fakes[tensor]


def run_base(model: PreTrainedModel, embeds: Tensor | None = None) -> Tensor:
    """The last hidden state of the base model.

    Args:
        embeds: [*SHAPE, *], given in the place of tokens.
    """
    return call_base(model, embeds)[0]


def call_base(
    model: PreTrainedModel, embeds: Tensor | None = None, *, use_cache: bool = False
) -> ModelOutput:
    """All that the base model returns; see ``run_base``."""
    base = model.base_model
    ids = torch.zeros(SHAPE, dtype=torch.long)
    # with a mask transformers does not look for documents in the positions
    inputs = {"use_cache": use_cache, "attention_mask": torch.ones_like(ids)}
    inputs |= {"input_ids": ids} if embeds is None else {"inputs_embeds": embeds}
    if "position_ids" in inspect.signature(base.forward).parameters:
        inputs["position_ids"] = ids
    return base(**inputs)


def _implementation(config: PreTrainedConfig) -> str:
    chosen = attention.implementation_for(config)
    if chosen != attention.NAME:
        return chosen
    AttentionInterface.register(NO_ATTENTION, _no_attention)
    AttentionMaskInterface.register(NO_ATTENTION, _any_mask)
    return NO_ATTENTION


def _any_mask(batch_size: int, q_length: int, kv_length: int, *_args, **_kwargs) -> Tensor:
    return torch.ones(batch_size, 1, q_length, kv_length, dtype=torch.bool)


def _no_attention(_module, query: Tensor, _key, value: Tensor, *_args, **_kwargs):
    """[B, H, q, D], [B, K, k, D'] -> [B, q, H, D']"""
    batch, heads, queries, _ = query.shape
    return value.new_empty(batch, queries, heads, value.shape[-1]), None


@contextmanager
def _quiet() -> Iterator[None]:
    """torch logs what fake tensors can't do, which is no news to a user."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(level)


class Refusal(Exception):
    """A reason for people."""


@dataclass
class _Watch:
    """Hooks on one forward pass."""

    anatomy: Anatomy
    layers: nn.ModuleList
    leaves: list[Tensor] = field(default_factory=list)  # of what is before, then of each layer
    handed: Tensor | None = None  # by the last layer so far

    def install(self, model: PreTrainedModel) -> None:
        self._check_shared(model)
        inside = {id(module) for module in self.layers.modules()}
        for name, module in model.named_modules():
            if id(module) in inside or not list(module.parameters(recurse=False)):
                continue
            if isinstance(module, PreTrainedModel) and self.anatomy.stack.startswith(name):
                raise Refusal(f"{name or 'the model'} has parameters that are in no module")
            self.anatomy.after.append(name)
            module.register_forward_pre_hook(self._outside(name))
            module.register_forward_hook(self._made_outside)
        for index, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(self._entering(index), with_kwargs=True)
            layer.register_forward_hook(self._leaving)

    def _check_shared(self, model: PreTrainedModel) -> None:
        """A weight may be shared by what is outside of the layers, or within one of them: copies on
        other stages would each learn their own way."""
        in_layer = re.compile(re.escape(self.anatomy.stack) + r"\.\d+\.")

        def place(name: str) -> str:
            found = in_layer.match(name)
            return found[0] if found else ""

        first: dict[nn.Parameter, str] = {}
        pairs = [
            (name, first.setdefault(p, name))
            for name, p in model.named_parameters(remove_duplicate=False)
        ]
        for name, other in (*pairs, *model.all_tied_weights_keys.items()):
            if place(name) != place(other):
                raise Refusal(f"{name} and {other} are one weight in two places")

    @property
    def _done(self) -> int:
        return len(self.anatomy.outputs)

    def _outside(self, name: str):
        anatomy = self.anatomy

        def hook(_module: nn.Module, _args: tuple) -> None:
            if self._done == 0 and name in anatomy.after:
                anatomy.after.remove(name)
                anatomy.before.append(name)
            elif self._done and name in anatomy.before:
                raise Refusal(f"{name} is used before the layers and again later")
            elif 0 < self._done < len(self.layers):
                raise Refusal(f"{name} is used between layers")

        return hook

    def _made_outside(self, _module: nn.Module, _args: tuple, output: Any) -> Any:
        """What is made before the layers must reach them in the hidden state alone."""
        before = self._done == 0 and isinstance(output, Tensor) and output.is_floating_point()
        return self._leaf(output) if before else output

    def _leaf(self, like: Tensor) -> Tensor:
        self.leaves.append(torch.empty_like(like, requires_grad=True))
        return self.leaves[-1].clone()  # some models scale it in place

    def _entering(self, index: int):
        def hook(_layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if index != self._done:
                raise Refusal(f"layer {index} is called as number {self._done}")
            hidden = hidden_of(args, kwargs)
            if index and hidden is not self.handed:
                raise Refusal(f"layer {index} takes something else than layer {index - 1} returns")
            for value in _opened([*args, *kwargs.values()]):
                if isinstance(value, dict | list):
                    raise Refusal(f"its layers share a {type(value).__name__}")
                if isinstance(value, Tensor) and value is not hidden and value.requires_grad:
                    raise Refusal(f"layer {index} takes more that is learned than a hidden state")

        return hook

    def _leaving(self, _layer: nn.Module, _args: tuple, output: Any) -> Any:
        several = isinstance(output, tuple | list)
        whole = list(output) if several else [output]
        self.anatomy.outputs.append(len(whole) if several else 0)
        self.anatomy.width = whole[0].shape[-1]
        self.anatomy.fp32_hidden |= whole[0].dtype == torch.float32
        self.handed = self._leaf(whole[0])
        return (self.handed, *whole[1:]) if several else self.handed

    def check_end(self, end: Tensor) -> None:
        if self._done != len(self.layers):
            raise Refusal(f"only {self._done} of its {len(self.layers)} layers are called")
        found = torch.autograd.grad(end.sum(), self.leaves, allow_unused=True)
        if found[-1] is None or any(grad is not None for grad in found[:-1]):
            raise Refusal("what comes out is not made of the last layer's output alone")


def _opened(values: list[Any]) -> Iterator[Any]:
    """Tables of cosines and sines come in pairs."""
    for value in values:
        if isinstance(value, tuple):
            yield from _opened(list(value))
        else:
            yield value

"""The Hugging Face model that is trained: from scratch or from weights, one module at a time.

The model is made on meta, where it has shapes and no memory. Then, children first, each module's
own tensors get their values (``initial.py``, ``weights.py``) on the device, and ``partition`` may
take the module and split it, as ZeRO-3 does. What a rank ever holds is what it keeps, one module,
and one tensor as it is read or drawn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedConfig, PreTrainedModel

from ds4d import comm  # noqa: F401 (its operators)
from ds4d.attention import context
from ds4d.attention.context import ContextParallel
from ds4d.config.types import ModelConfig
from ds4d.model.checkpoint_weights import CheckpointWeights
from ds4d.model.config import model_folder
from ds4d.model.initial import InitialValues
from ds4d.model.meta import logical_model, meta_model
from ds4d.model.weights import Weights
from ds4d.tensor_parallel.inject import inject
from ds4d.tensor_parallel.shard import Shard
from ds4d.tensor_parallel.state import NoGroup, TensorParallel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

aten = torch.ops.aten
# What "selective" keeps: the products, which are most of the arithmetic. What lies between them
# (norms, activations, rotary, the scores of unfused attention) is cheap and is computed again. And
# what came over the network.
KEPT = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten._grouped_mm.default,
        aten._flash_attention_forward.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.ds4d.all_reduce.default,
        torch.ops.ds4d.reduce_scatter.default,
        torch.ops.ds4d.gather_last.default,
        torch.ops.ds4d.all_to_all.default,
        torch.ops.ds4d.attend_over_ranks.default,
    }
)


def build_model(
    model: ModelConfig,
    *,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device | str,
    seed: int,
    attn_implementation: str,
    recompute: str = "none",
    partition: Callable[[nn.Module], None] | None = None,
    tp: TensorParallel | None = None,
    cp: ContextParallel | None = None,
    cut: Callable[[PreTrainedModel], Any] | None = None,
    given: Stored | None = None,
) -> PreTrainedModel:
    """Build the model in train mode, with its weights read or drawn.

    Args:
        config: ``hf_config(model)``; it is not changed.
        dtype: of the parameters.
        seed: from scratch, what the weights follow from, together with the tensors' names.
        recompute: activation checkpointing: "none", "full" (only each layer's input is kept), or
            "selective" (``KEPT`` is kept too).
        partition: gets each module that owns parameters as soon as these are filled; modules
            below it had their turn. A tied parameter is there once, in the module that comes first.
        tp: whose rank's part is built; None: one rank's, which is the whole model.
        cp: the ranks that share a sequence; None: a rank has whole ones.
        cut: takes away what this rank of a pipeline does not hold; nothing of that is made.
        given: weights that are here already; None: they are at ``model.path``, or drawn.

    Raises:
        ValueError: the folder does not fit the config, or the model has no initial values.

    Collective: what ``partition`` is; every rank calls it for the same modules in the same order.
    """
    built = meta_model(config, dtype=dtype, attn_implementation=attn_implementation)
    built.config.use_cache = False
    tp = TensorParallel(NoGroup()) if tp is None else tp
    tp.recompute = recompute
    inject(built, tp)
    if cp is not None:
        context.install(built, cp)
    if cut is not None:
        cut(built)
    fill(
        built,
        first_values(model, config=config, seed=seed, given=given),
        device=device,
        partition=partition,
    )
    _enable_recompute(built, recompute)
    return built


def first_values(
    model: ModelConfig, *, config: PreTrainedConfig, seed: int, given: Stored | None = None
) -> Values:
    """What a model begins with; arguments as in ``build_model``. Values keep the precision in which
    they are stored or drawn.

    Raises:
        ValueError: as ``build_model``.
    """
    logical = logical_model(config)
    values = InitialValues(logical, seed=seed)
    if given is None and model.path is not None:
        given = stored_in(model_folder(model.path), logical)
    return values if given is None else stored_or_initial(given, values)


def stored_in(folder: Path, logical: PreTrainedModel) -> Stored:
    """The weights of an exported folder or a ds4d checkpoint.

    Args:
        logical: ``logical_model`` of its config.

    Raises:
        ValueError: they do not fit it.
    """
    is_exported = (folder / "config.json").is_file()
    return (Weights if is_exported else CheckpointWeights)(folder, logical)


class Values(Protocol):
    """A model's tensors by its names for them, on the CPU; with a shard, a tp rank's part."""

    def __call__(self, name: str, shard: Shard | None = None) -> Tensor: ...


class Stored(Values, Protocol):
    """Some of a model's tensors."""

    def __contains__(self, name: str) -> bool: ...


def stored_or_initial(stored: Stored, initial: InitialValues) -> Values:
    """Buffers that are computed, like rotary frequencies, are in no file: the rest is."""
    return lambda name, shard=None: (stored if name in stored else initial)(name, shard)


def fill(
    model: PreTrainedModel,
    values: Values,
    *,
    device: torch.device | str,
    partition: Callable[[nn.Module], None] | None = None,
) -> None:
    """Give a model on meta memory and values, module by module, children first.

    Args:
        model: with logical shapes, or a tp rank's part of it, its cut tensors with ``tp_shard``.
        values: asked once for tied names, by the name of the first of them.
        partition: see ``build_model``.
    """
    done: set[Tensor] = set()
    # a stage may have the head's weight and no embedding
    sources = getattr(model, "all_tied_weights_keys", {})
    for path, module in _children_first(model):
        new_parameters = False
        for name, tensor in _own_tensors(module):
            if tensor in done:
                continue
            name = f"{path}.{name}" if path else name
            dtype = _dtype_of(name, tensor, model)
            value = _value(values, sources.get(name, name), tensor)
            _become(tensor, value.to(device=device, dtype=dtype))
            done.add(tensor)
            new_parameters |= isinstance(tensor, nn.Parameter)
        if new_parameters and partition is not None:
            partition(module)


def _value(values: Values, name: str, tensor: Tensor) -> Tensor:
    value = values(name, getattr(tensor, "tp_shard", None))
    assert value.shape == tensor.shape, f"{name}: {value.shape} instead of {tensor.shape}"
    return value


def _children_first(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _children_first(child, f"{path}.{name}" if path else name)
    yield path, module


def _own_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _dtype_of(name: str, tensor: Tensor, model: PreTrainedModel) -> torch.dtype:
    """Parameters follow the training dtype. Buffers are as the model declares them; those that it
    names for fp32 (router corrections) are kept so, as transformers does on loading."""
    if isinstance(tensor, nn.Parameter) or not tensor.is_floating_point():
        return tensor.dtype
    patterns = set(model._keep_in_fp32_modules_strict)
    if model.dtype == torch.float16:
        patterns |= model._keep_in_fp32_modules
    fp32 = any(re.search(pattern.replace("*", ".*"), name) for pattern in patterns)
    return torch.float32 if fp32 else tensor.dtype


def _become(tensor: Tensor, value: Tensor) -> None:
    """Give a meta tensor memory and a value in place, so that all who hold it (ties) see it."""
    if value.untyped_storage().nbytes() != value.nbytes:  # a view would keep all it was cut from
        value = value.clone()
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
    value.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, value)


def _enable_recompute(model: PreTrainedModel, recompute: str) -> None:
    if recompute == "none":
        return
    if not model.supports_gradient_checkpointing:
        raise ValueError(
            f'ds4d.recompute: {model.config.model_type} has no layers that transformers can '
            'recompute; set "none"'
        )
    kwargs = {"use_reentrant": False}
    if recompute == "selective":
        kept = KEPT
        if any(name.endswith("_proj_bias") for name, _ in model.named_parameters()):
            kept -= {aten._grouped_mm.default}  # experts add their biases to it in place
        policy = partial(_keep, kept)
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


def _keep(kept: frozenset, _context, op, *_args, **_kwargs) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE

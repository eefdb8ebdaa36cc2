"""The attention module on one tp rank: its share of the heads, and the counts that say so.

Letters: H heads, K key/value heads, D head dim, t ranks.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ds4d.models.blueprint import Blueprint
from ds4d.tensor_parallel.arrange import Heads, kv_heads_of
from ds4d.tensor_parallel.dropout import OwnDropout
from ds4d.tensor_parallel.state import TensorParallel

# By these names attention modules count what they hold.
COUNTS_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
COUNTS_KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")
COUNTS_GROUPS = ("num_key_value_groups",)  # H / K
HEAD_DIMS = ("head_dim", "head_size", "qk_head_dim")


def heads_of(
    model: PreTrainedModel, blueprint: Blueprint, block: nn.Module, tp: TensorParallel
) -> Heads | None:
    """The heads of a block; None: it is no attention."""
    known = (*COUNTS_HEADS, *COUNTS_GROUPS, *HEAD_DIMS)
    if not any(isinstance(getattr(block, name, None), int) for name in known):
        return None
    try:
        total, kv_total = blueprint.heads(model.config.get_text_config())
    except RuntimeError:  # transformers' own: they differ from layer to layer
        total, kv_total = _own_heads_of(block)
    if not isinstance(total, int) or not isinstance(kv_total, int):
        raise ValueError(
            f"{tp.size}: the layers of this {model.config.model_type} differ in their heads "
            f"({total}, {kv_total}), which is not known to be cut right; set ds4d.parallel.tp to 1"
        )
    dims = (getattr(block, name, None) for name in HEAD_DIMS)
    dim = next((d for d in dims if isinstance(d, int)), None)
    if dim is None:
        dim = model.config.hidden_size // total
    own: tuple[int, ...] = ()
    if total % tp.size == 0:
        own = kv_heads_of(total, kv_total, tp.rank, tp.size)
    return Heads(total, kv_total, dim, own)


def _own_heads_of(block: nn.Module) -> tuple[int | None, int | None]:
    """What the attention itself counts."""

    def count(names: tuple[str, ...]) -> int | None:
        found = (getattr(block, name, None) for name in names)
        return next((number for number in found if isinstance(number, int)), None)

    heads, kv_heads, groups = map(count, (COUNTS_HEADS, COUNTS_KV_HEADS, COUNTS_GROUPS))
    if heads and groups:
        return heads, heads // groups
    return heads, kv_heads or heads


def check_heads(model_type: str, heads: Heads, ranks: int) -> None:
    """Raises:
    ValueError: the heads do not divide.
    """
    if heads.total % ranks:
        raise refusal(model_type, heads, ranks, "heads must divide evenly among the ranks")
    if heads.kv_total % ranks and heads.kv_total * heads.dim % ranks:
        reason = f"their {heads.kv_total} x {heads.dim} key features do not divide either"
        raise refusal(model_type, heads, ranks, reason)


def refusal(model_type: str, heads: Heads, ranks: int, reason: str) -> ValueError:
    works = [
        n for n in range(1, heads.total + 1)
        if heads.total % n == 0 and (heads.kv_total % n == 0 or "one entry" not in reason)
    ]  # fmt: skip
    if any(words in reason for words in ("groups", "spans")):
        works = [n for n in works if heads.kv_total % n == 0]
    return ValueError(
        f"{ranks}: this {model_type} has {heads.total} heads and "
        f"{heads.kv_total} key/value heads, and {reason}; tp can be "
        f"{', '.join(map(str, works))}"
    )


def patch(block: nn.Module, blueprint: Blueprint, heads: Heads, tp: TensorParallel) -> None:
    """Let the attention count this rank's heads."""
    local, kv_local = heads.total // tp.size, len(heads.own)
    if not heads.gathered(tp):
        kv_local = heads.kv_total // tp.size
    table = [
        (COUNTS_HEADS, heads.total, local),
        (COUNTS_KV_HEADS, heads.kv_total, kv_local),
        (COUNTS_GROUPS, heads.total // heads.kv_total, local // kv_local),
    ]
    for module in block.modules():
        for names, whole, part in table:
            for name in names:
                if getattr(module, name, None) == whole:
                    setattr(module, name, part)
        for name in blueprint.divided:
            if isinstance(getattr(module, name, None), int):
                setattr(module, name, getattr(module, name) // tp.size)
    for name in blueprint.attention_dropout:
        setattr(block, name, OwnDropout(getattr(block, name), tp))
    block.ds4d_tp = tp
    if hasattr(block, "config") and "config.num_" in inspect.getsource(type(block)):
        counts = {"num_attention_heads": local, "num_key_value_heads": kv_local}
        block.config = _LocalConfig(block.config, counts)
    if blueprint.per_head_inputs:
        hook = partial(_cut_inputs, blueprint.per_head_inputs, heads.total, tp)
        block.register_forward_pre_hook(hook, with_kwargs=True)


class _LocalConfig:
    """The model's config as an attention with fewer heads sees it."""

    def __init__(self, config: Any, counts: dict[str, int]) -> None:
        self._config, self._counts = config, counts

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._counts[name] if name in self._counts else getattr(self._config, name)


def _cut_inputs(dims, total: int, tp: TensorParallel, module: nn.Module, args, kwargs):
    """Arguments that are made for all heads, given by position or by name."""
    order = list(inspect.signature(type(module).forward).parameters)[1:]

    def own(name: str, value):
        return _own_heads(value, dims[name], total, tp) if name in dims else value

    args = tuple(own(name, value) for name, value in zip(order, args))
    return args, {name: own(name, value) for name, value in kwargs.items()}


def _own_heads(value: Tensor | None, dim: int, total: int, tp: TensorParallel) -> Tensor | None:
    """[..., anything * H, ...] -> [..., anything * H / t, ...]"""
    if value is None or value.shape[dim] == 1:
        return value
    dim %= value.dim()
    by_head = value.unflatten(dim, (-1, total))
    local = total // tp.size
    return by_head.narrow(dim + 1, tp.rank * local, local).flatten(dim, dim + 1)

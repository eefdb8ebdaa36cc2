"""Turn a Hugging Face model on meta into one tp rank's part of it, in place, from its blueprint.

Names stay, shapes become local, and the model stays the Hugging Face model: its forward, config and
``generate`` are its own. In this order:

1. find the blocks: the attention and MLP modules whose weights are cut;
2. replace the linear layers in them, cut other parameters, patch the counts of heads;
3. embedding and head by the vocabulary;
4. mark parameters for DeepSpeed (``tensor_model_parallel``), for files and checkpoints
   (``tp_shard``), and those whose gradients are partial (``tp_partial``).

All that cannot be cut is refused here, in words for people: ``ds4d check`` runs this too.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ds4d import comm, router_loss
from ds4d.models.blueprint import Blueprint, Cut, Style
from ds4d.models.derive import HOW_TO_ADD, blueprint_of, plan_of
from ds4d.tensor_parallel import arrange, attention, sequence
from ds4d.tensor_parallel.arrange import Heads
from ds4d.tensor_parallel.layers import ColumnLinear, ParallelLinear, RowLinear
from ds4d.tensor_parallel.norm import NormOverHeads
from ds4d.tensor_parallel.passage import Passage
from ds4d.tensor_parallel.shard import Shard, even, local_parameter, packed
from ds4d.tensor_parallel.state import TensorParallel
from ds4d.tensor_parallel.vocab import install_head, shard_embedding

log = logging.getLogger(__name__)

GROUPED_PRODUCT_BYTES = 16  # rows of torch._grouped_mm start at multiples of this
COLUMNS = ("colwise", "colwise_gather_output", "packed_colwise", "qkv_colwise", "grouped_colwise")
ROWS = ("rowwise", "rowwise_split_input")


@dataclass
class _Model:
    """A model being cut."""

    model: PreTrainedModel
    tp: TensorParallel
    blueprint: Blueprint
    styles: dict[str, Style]  # by the path of a module or parameter
    memo: dict[int, nn.Parameter]

    @property
    def name(self) -> str:
        return self.model.config.model_type

    def module(self, path: str) -> nn.Module:
        return self.model.get_submodule(path)


def inject(model: PreTrainedModel, tp: TensorParallel) -> None:
    """Cut ``model``, which is on meta, for this rank, and fuse its head with the loss. The model
    has the modules at whose end ranks sum as ``ds4d_blocks``.

    Raises:
        ValueError: it cannot be cut into ``tp.size`` parts; says which size does not fit.
    """
    memo: dict[int, nn.Parameter] = {}
    model.ds4d_tp = tp
    blocks: list[str] = []
    model.ds4d_blocks = []
    if tp.size > 1:
        blocks = _cut_layers(model, tp, memo)
        embedding = model.get_input_embeddings()
        shard_embedding(embedding, tp, memo)
        _mark_partial(embedding)  # a norm in it sees each rank's rows
    install_head(model, tp, memo)
    router_loss.install(model, tp, blocks)
    sequence.install(model, tp)
    if tp.sequence_parallel:
        if reason := sequence.why_not(model, blocks):
            raise ValueError(reason)
        sequence.mark_partial(model)


def _cut_layers(model: PreTrainedModel, tp: TensorParallel, memo) -> list[str]:
    """Returns: the paths of the blocks."""
    blueprint = blueprint_of(model.config.model_type)
    if reason := blueprint.why_not(model.config, tp.size):
        raise ValueError(f"{tp.size}: model_type {model.config.model_type}: {reason}")
    if getattr(model.config.get_text_config(), "router_jitter_noise", 0):
        raise ValueError(f"{tp.size}: router_jitter_noise is drawn by each rank; set it to 0")
    cut = _Model(model, tp, blueprint, dict(_resolve(model, plan_of(model))), memo)
    embedding = _path_of(model, model.get_input_embeddings())
    for path, style in cut.styles.items():
        if style == "vocabulary" and path != embedding:
            raise ValueError(f"{path} of this {cut.name} is no input embedding; {HOW_TO_ADD}")
    blocks = _find_blocks(cut)
    for path in blocks:
        _cut_block(cut, path)
    loose = _loose(cut, blocks)
    for path in loose:
        _replace_linear(cut, path, None, loose=True)
    for path in blocks:
        _mark_partial(cut.module(path))
    model.ds4d_blocks = [model.get_submodule(path) for path in (*blocks, *loose)]
    return blocks


def _resolve(model: PreTrainedModel, plan) -> Iterator[tuple[str, Style]]:
    """Concrete paths of the plan's patterns."""
    patterns = [(_pattern(path), style) for path, style in plan.items()]
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters()]
    for name in names:
        for pattern, style in patterns:
            if pattern.fullmatch(name):
                yield name, style


def _pattern(path: str) -> re.Pattern:
    return re.compile(re.escape(path).replace(r"\*\*", ".+").replace(r"\*", r"\d+"))


# -- blocks ---------------------------------------------------------------------------------------


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _find_blocks(cut: _Model) -> list[str]:
    """Paths of the modules at whose input the sequence is whole and gradients are summed.

    The parent of column-parallel layers and of a row-parallel one, whose outputs are summed; or,
    with experts, the module that holds them and all beside them; or an attention whose row-parallel
    layer stands elsewhere, and is loose. A parent that holds other blocks (a decoder layer) is none:
    its own layers are loose, each a block of its own.
    """
    sparse = {_parent(p) for p, style in cut.styles.items() if style == "experts"}
    columns, rows = (
        {_parent(p) for p, style in cut.styles.items() if style in styles}
        for styles in (COLUMNS, ROWS)
    )
    parents = columns & rows
    parents.discard("")
    parents |= {p for p in columns - parents if _is_lone_attention(cut, p, parents)}
    inner = {p for p in parents if any(p.startswith(f"{s}.") for s in sparse)}
    found = sorted(sparse | parents - inner)
    return [p for p in found if not any(other.startswith(f"{p}.") for other in found)]


def _is_lone_attention(cut: _Model, path: str, blocks: set[str]) -> bool:
    near = any(f"{path}.".startswith(f"{p}.") or p.startswith(f"{path}.") for p in blocks)
    heads = attention.heads_of(cut.model, cut.blueprint, cut.module(path), cut.tp)
    return not near and heads is not None


def _loose(cut: _Model, blocks: list[str]) -> list[str]:
    inside = tuple(f"{block}." for block in blocks)
    head = _path_of(cut.model, cut.model.get_output_embeddings())
    return [
        path for path, style in cut.styles.items()
        if style in (*COLUMNS, *ROWS) and path != head and not path.startswith(inside)
    ]  # fmt: skip


def _path_of(model: nn.Module, module: nn.Module | None) -> str | None:
    return next((path for path, found in model.named_modules() if found is module), None)


def _cut_block(cut: _Model, path: str) -> None:
    block, tp = cut.module(path), cut.tp
    inside = {p: s for p, s in cut.styles.items() if p.startswith(f"{path}.")}
    sparse = "experts" in inside.values()
    heads = attention.heads_of(cut.model, cut.blueprint, block, tp)
    if {style for style in inside.values() if style in COLUMNS} == {"colwise_gather_output"}:
        heads = None  # they are put together again
    if heads is not None:
        attention.check_heads(cut.name, heads, tp.size)
    for child, style in inside.items():
        if style in (*COLUMNS, *ROWS):
            _replace_linear(cut, child, heads, exits=not sparse)
        elif isinstance(style, Cut) or style == "by_head":
            _cut_parameter(cut, child, style, heads)
        elif style == "norm_over_heads":
            _replace_norm(cut, child, heads)
        elif style == "shared_by_ranks":
            _share(cut, child)
    if heads is not None:
        _check_nothing_forgotten(cut, path, inside, heads)
        attention.patch(block, cut.blueprint, heads, tp)
    early = not sparse and not any(
        isinstance(m, nn.Linear | Conv1D) for m in block.modules()
    )
    passage = Passage(tp, early)
    block.register_forward_pre_hook(passage.enter, with_kwargs=True)
    if sparse:
        _check_whole_beside_experts(cut, path, inside)
        block.register_forward_hook(passage.leave)


# -- parameters -----------------------------------------------------------------------------------


def _refuse(cut: _Model, path: str, size: int, what: str) -> ValueError:
    return ValueError(
        f"{cut.tp.size}: {path} of this {cut.name} has {size} {what}, which do not divide by "
        f"{cut.tp.size}"
    )


def _replace_linear(
    cut: _Model, path: str, heads: Heads | None, *, loose: bool = False, exits: bool = True
) -> None:
    """Args:
    loose: it stands in no block, and is one.
    exits: a row-parallel layer sums its outputs itself; else the block does at its end.
    """
    layer, style, tp = cut.module(path), cut.styles[path], cut.tp
    if not hasattr(layer, "weight") or layer.weight.dim() != 2:
        raise ValueError(
            f'{path} of this {cut.name} is a {type(layer).__name__}, but its plan is "{style}", '
            f"which is for linear layers; {HOW_TO_ADD}"
        )
    transposed = isinstance(layer, Conv1D)
    out_dim, in_dim = (1, 0) if transposed else (0, 1)
    if style in ROWS:
        shard = even(in_dim, layer.weight.shape[in_dim], tp.rank, tp.size, padded=True)
        if shard.size % tp.size and (heads is not None or style == "rowwise_split_input"):
            raise _refuse(cut, path, shard.size, "input features")
        layer.weight = local_parameter(layer.weight, shard, cut.memo)
        real = shard.local_size - shard.padding if shard.size % tp.size else None
        split = None
        if style == "rowwise_split_input":
            split = comm.split_last_complete if loose else comm.split_last
        new = RowLinear(layer, tp, transposed=transposed, exits=exits, split=split, real=real)
    else:
        features = layer.weight.shape[out_dim]
        shard, arranged = _columns(cut, path, features, style, heads)
        if loose and style == "colwise_gather_output":
            arranged = partial(arrange.gather_complete, tp=tp, features=features)
        layer.weight = local_parameter(layer.weight, _at(shard, out_dim), cut.memo)
        if layer.bias is not None:
            layer.bias = local_parameter(layer.bias, _at(shard, 0), cut.memo)
        new = ColumnLinear(layer, tp, transposed=transposed, enters=loose, arrange=arranged)
    parent, _, name = path.rpartition(".")
    setattr(cut.module(parent), name, new)


def _at(shard: Shard, dim: int) -> Shard:
    return Shard(dim, shard.size, shard.ranges, shard.padding)


def _columns(
    cut: _Model, path: str, features: int, style: str, heads: Heads | None
) -> tuple[Shard, Callable[[Tensor], Tensor] | None]:
    """How output features are cut (dim 0), and what is done with the outputs."""
    tp = cut.tp
    rank, ranks = tp.rank, tp.size
    if style == "colwise_gather_output":
        shard = even(0, features, rank, ranks, padded=True)
        return shard, partial(arrange.gather, tp=tp, features=features)
    if style == "packed_colwise":
        if features % (2 * ranks):
            raise _refuse(cut, path, features // 2, "output features in each of its two blocks")
        return packed(0, (features // 2, features // 2), rank, ranks), None
    if style == "qkv_colwise":
        sizes = (heads.total * heads.dim, heads.kv_total * heads.dim, heads.kv_total * heads.dim)
        choose = partial(arrange.choose_packed, tp=tp, heads=heads)
        return packed(0, sizes, rank, ranks), choose if heads.gathered(tp) else None
    if style == "grouped_colwise" and heads.kv_total % ranks:
        raise attention.refusal(cut.name, heads, ranks, "they stand together in groups")
    if heads is not None:
        is_kv = features == heads.kv_total * heads.dim and heads.kv_total != heads.total
        arranged = None
        if is_kv and heads.gathered(tp):
            arranged = partial(arrange.choose, tp=tp, heads=heads)
        if features % ranks:
            raise _refuse(cut, path, features, "output features")
        return even(0, features, rank, ranks), arranged
    return even(0, features, rank, ranks, padded=True), None


def _cut_parameter(cut: _Model, path: str, style: Cut | str, heads: Heads | None) -> None:
    parent, _, name = path.rpartition(".")
    module = cut.module(parent)
    param, ranks = getattr(module, name), cut.tp.size
    of_heads = style == "by_head"
    how = Cut(0) if of_heads else style
    size = param.shape[how.dim] // how.blocks
    if size % (ranks * how.unit):
        if of_heads:
            raise attention.refusal(cut.name, heads, ranks, f"{path} has one entry for each")
        raise _refuse(cut, path, size // how.unit, "inner features")
    if param.dim() == 3 and size // ranks * param.element_size() % GROUPED_PRODUCT_BYTES:
        _avoid_grouped_products(cut, path, size // ranks)
    shard = packed(how.dim, (size,) * how.blocks, cut.tp.rank, ranks)
    setattr(module, name, local_parameter(param, shard, cut.memo))


def _avoid_grouped_products(cut: _Model, path: str, features: int) -> None:
    if cut.tp.rank == 0 and cut.model.config._experts_implementation != "eager":
        log.warning(
            "%s: %d inner features on each rank are no multiple of %d bytes, which grouped "
            "products want; the experts are computed one after the other",
            path, features, GROUPED_PRODUCT_BYTES,
        )  # fmt: skip
    cut.model.set_experts_implementation("eager")


def _replace_norm(cut: _Model, path: str, heads: Heads) -> None:
    parent, _, name = path.rpartition(".")
    norm = cut.module(path)
    if heads.gathered(cut.tp):
        raise attention.refusal(cut.name, heads, cut.tp.size, f"{path} spans them all")
    width = norm.weight.shape[0]
    shard = even(0, width, cut.tp.rank, cut.tp.size)
    norm.weight = local_parameter(norm.weight, shard, cut.memo)
    setattr(cut.module(parent), name, NormOverHeads(norm, cut.tp, width))


def _share(cut: _Model, path: str) -> None:
    """A parameter or module whose value all ranks add to one sum."""
    parent, _, name = path.rpartition(".")
    module, ranks = cut.module(parent), cut.tp.size
    if name in module._modules:
        module._modules[name].register_forward_hook(lambda _m, _args, y: y / ranks)
        return

    # what is in __dict__ is found before what is in _parameters
    def show_part(module: nn.Module, _args) -> None:
        module.__dict__[name] = module._parameters[name] / ranks

    def show_all(module: nn.Module, _args, _output) -> None:
        module.__dict__.pop(name, None)

    module.register_forward_pre_hook(show_part)
    module.register_forward_hook(show_all, always_call=True)


def _check_nothing_forgotten(
    cut: _Model, path: str, inside: dict[str, Style], heads: Heads
) -> None:
    """Anything in an attention that is made for each head must be in the plan: left whole it would
    be wrong in silence, or fail late."""
    per_head = {heads.total, heads.kv_total, heads.total * heads.dim, heads.kv_total * heads.dim}
    for name, param in cut.module(path).named_parameters():
        full = f"{path}.{name}"
        known = hasattr(param, "tp_shard") or full in inside or _parent(full) in inside
        is_row_bias = isinstance(cut.module(_parent(full)), ParallelLinear)
        if known or is_row_bias or param.shape[0] not in per_head - {heads.dim}:
            continue
        raise ValueError(
            f"{full} of this {cut.name}, of shape {list(param.shape)}, looks as if it were made "
            f"for each of {heads.total} or {heads.kv_total} heads, but the plan does not say how "
            f"it is cut; {HOW_TO_ADD}"
        )


def _check_whole_beside_experts(cut: _Model, path: str, inside: dict[str, Style]) -> None:
    """What is whole and adds to the output of a block with experts would be added by each rank;
    and a norm of the output would see each rank's part of it."""
    for name, child in cut.module(path).named_children():
        linear = [p for p, m in child.named_modules() if isinstance(m, nn.Linear | Conv1D)]
        adds_bias = isinstance(child, nn.Linear) and child.bias is not None
        is_norm = "Norm" in type(child).__name__
        if f"{path}.{name}" not in inside and (any(linear) or adds_bias or is_norm):
            raise ValueError(
                f"{path}.{name} of this {cut.name} stands beside experts, but the plan does not "
                f"say how it is cut; {HOW_TO_ADD}"
            )


def _mark_partial(block: nn.Module) -> None:
    """Whole parameters inside blocks have partial gradients; the bias of an exit has not."""
    for module in block.modules():
        for name, param in module.named_parameters(recurse=False):
            is_exit_bias = isinstance(module, RowLinear) and module.exits and name == "bias"
            if not hasattr(param, "tp_shard") and not is_exit_bias:
                param.tp_partial = True

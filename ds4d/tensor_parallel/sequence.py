"""Sequence parallelism outside of blocks: which models allow it, and what must be told of it.

Letters: B sequences, S tokens, s = S / t of them on this rank, E hidden size, t ranks.

While ``tp.scattered`` the residual stream is [B, s, E]. Norms, dropout and additions take it as it
comes, and the blocks gather and scatter it (``blocks.py``). What is left: tables of positions,
which are looked up for all S tokens and cut here; and the gradients of all whole parameters outside
of blocks, which see s tokens only and so are partial.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from transformers import PreTrainedModel

from ds4d import attention, comm
from ds4d.models.derive import blueprint_of
from ds4d.tensor_parallel.layers import ParallelLinear
from ds4d.tensor_parallel.state import TensorParallel
from ds4d.tensor_parallel.vocab import ParallelHead


def install(model: PreTrainedModel, tp: TensorParallel) -> None:
    """Make the model ready for ``tp.scattered``, and let each forward pass begin without it."""
    for entrance in {model, model.base_model}:  # a pipeline's stages have no use for the head
        entrance.register_forward_pre_hook(partial(_begin, tp))
    last = blueprint_of(model.config.model_type).whole_after
    if last is not None:
        model.get_submodule(last).register_forward_hook(partial(_make_whole, tp))
    for table in _position_tables(model):
        table.register_forward_hook(partial(_cut_positions, tp))


@contextmanager
def scattered(tp: TensorParallel | None) -> Iterator[None]:
    """A forward pass that begins in here is sequence parallel if the model is to be, and so is its
    backward pass, wherever that is."""
    _asked.append(tp)
    try:
        yield
    finally:
        _asked.pop()


_asked: list[TensorParallel | None] = []  # inside ``scattered`` now


def _begin(tp: TensorParallel, _module: nn.Module, _args: tuple) -> None:
    tp.scattered = tp.sequence_parallel and bool(_asked) and _asked[-1] is tp


def why_not(model: PreTrainedModel, blocks: list[str]) -> str | None:
    """Why the residual stream of this model can't be cut along the sequence; None: it can.

    Only what is known to treat each token by itself may stand outside of blocks.
    """
    if reason := attention.supports(type(model), documents=False):
        return f"{reason}, so that masks are made of the tokens of one rank"
    if reason := blueprint_of(model.config.model_type).why_not_scattered:
        return reason
    embeddings = {id(model.get_input_embeddings()), *map(id, _position_tables(model))}
    inside = tuple(f"{block}." for block in blocks)
    for path, module in model.named_modules():
        if f"{path}.".startswith(inside) or id(module) in embeddings:
            continue
        if isinstance(module, ParallelLinear | ParallelHead):
            continue
        if list(module.parameters(recurse=False)) and not _is_norm(module):
            return f"{path} ({type(module).__name__}) is not known to treat each token by itself"
    return None


def mark_partial(model: PreTrainedModel) -> None:
    """Every whole parameter's gradient is partial: it sees a part of the tokens."""
    for param in model.parameters():
        if not hasattr(param, "tp_shard"):
            param.tp_partial = True


def _position_tables(model: PreTrainedModel) -> list[nn.Module]:
    """Learned positions: embeddings of the base model itself, not of its layers."""
    vocabulary = model.get_input_embeddings()
    return [
        module for owner in model.modules() if isinstance(owner, PreTrainedModel)
        for module in owner.children()
        if isinstance(module, nn.Embedding) and module is not vocabulary
    ]  # fmt: skip


def _is_norm(module: nn.Module) -> bool:
    one_dim = all(param.dim() == 1 for param in module.parameters(recurse=False))
    return one_dim and "Norm" in type(module).__name__


def _cut_positions(tp: TensorParallel, _module: nn.Module, _args, output: Tensor) -> Tensor:
    """[B, S, E] -> [B, s, E]"""
    if not tp.scattered:
        return output
    part = output.shape[-2] // tp.size
    return output.narrow(-2, tp.rank * part, part)


def _make_whole(tp: TensorParallel, _module: nn.Module, _args, output: Tensor) -> Tensor:
    """[B, s, E] -> [B, S, E]; its gradient is complete on every rank."""
    return comm.gather_complete(output, tp.group, purpose="block") if tp.scattered else output

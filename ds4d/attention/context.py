"""Attention of one rank's tokens over those of its whole cp group.

Letters: B sequences, H heads, K key/value heads, S tokens of a sequence, s of them on this rank, D
head dim.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from ds4d.attention import ulysses
from ds4d.attention.documents import Documents
from ds4d.attention.kernels import Call, attend, block_kernel, run_way
from ds4d.attention.mask import carry
from ds4d.attention.pairs import Seen
from ds4d.attention.ring import Gathered, Ring
from ds4d.attention.support import packs_by_positions
from ds4d.context_parallel import Cut

W = TypeVar("W", Ring, Gathered)


@dataclass(frozen=True)
class ContextParallel:
    """Attributes:
    ring, ulysses: this rank's groups: ring x ulysses = cp.
    exchange: of keys and values in the ring: "p2p" or "all_gather".
    packs_by_positions: the model takes another sequence to begin where positions jump.
    """

    ring: dist.ProcessGroup
    ulysses: dist.ProcessGroup
    exchange: str = "p2p"
    packs_by_positions: bool = True


@dataclass(frozen=True, eq=False)
class Context:
    """Goes through the model to every attention, as a keyword argument."""

    cut: Cut
    parallel: ContextParallel

    @property
    def documents(self) -> Documents | None:
        """Of the whole sequences."""
        return self.cut.packed if self.parallel.packs_by_positions else self.cut.documents

    def attend(self, call: Call) -> Tensor:
        """Args:
        call: of this rank's tokens; but what is ``visible`` is said of the whole sequence.

        Returns:
            [B, s, H, Dv].

        Collective: cp.
        """
        if call.bias is not None:
            raise ValueError(
                "ds4d.parallel.cp: this model adds a bias to the scores of every query and key, "
                "which is made from the tokens of one rank"
            )
        group = self.parallel.ulysses
        if group.size() == 1:
            return self._along_ring(call)
        query, key, value = ulysses.to_heads(call.query, call.key, call.value, group)
        sinks = None if call.sinks is None else ulysses.own_heads(call.sinks, -1, group)
        call = replace(call, query=query, key=key, value=value, sinks=sinks)
        out = self._along_ring(call)  # [B, u * s, H / u, Dv]
        return ulysses.to_tokens(out.transpose(1, 2), group).transpose(1, 2)

    def _along_ring(self, call: Call) -> Tensor:
        if self.cut.spans == (((0, self.cut.length),),):
            return attend(call)
        way = {"p2p": Ring, "all_gather": Gathered}[self.parallel.exchange]
        return run_way(call, partial(self.way, way, group=self.parallel.ring))

    def way(self, make: type[W], call: Call, *, group: dist.ProcessGroup) -> W:
        kernel, visible, documents = block_kernel(call), call.visible, call.visible.documents
        seen = Seen(
            *call.query.shape[:2],
            self.cut.length,
            causal=visible.causal,
            window=visible.window,
            lengths=() if documents is None else documents.lengths,
            general=visible.general is not None,
            split=kernel.holds_scores,
            cut_windows=not kernel.knows_windows,
        )
        return make(kernel, self.cut.spans, seen, group)


def install(model: PreTrainedModel, parallel: ContextParallel) -> None:
    """Make a model ready for parts of sequences. A ``Context`` enters it with the inputs
    (``loss.model_inputs``) and goes to attention, and to rotary scales that follow from the
    sequence's length, which transformers takes from the largest position."""
    parallel = replace(parallel, packs_by_positions=packs_by_positions(type(model)))
    for entrance in {model, model.base_model}:  # a pipeline's stages have no use for the head
        entrance.ds4d_cp = parallel
    forward = _ForwardPass()
    model.base_model.register_forward_pre_hook(forward.begin, with_kwargs=True)
    model.base_model.register_forward_hook(forward.end, always_call=True)
    for name, module in model.named_modules():
        if _follows_length(module):
            if any(part.isdigit() for part in name.split(".")):  # recomputed when that is gone
                raise ValueError(
                    f"the rotary scale of {name} follows from the length of a sequence, and is "
                    "made inside of a layer"
                )
            module.register_forward_pre_hook(forward.append, with_kwargs=True)
            module.register_forward_hook(forward.remove)


def _follows_length(module: nn.Module) -> bool:
    kind = getattr(module, "rope_type", None)  # of each kind of layer, in some models
    kinds = kind.values() if isinstance(kind, dict) else [kind]
    return any("dynamic" in str(each) or each == "longrope" for each in kinds)


class _ForwardPass:
    """Hooks. Rotary embeddings see one more token, at the sequence's largest position."""

    _context: Context | None = None

    def begin(self, _module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        self._context = kwargs.get("context")
        carry(self._context)

    def end(self, _module: nn.Module, args: tuple, output: Any) -> None:
        self._context = None
        carry(None)

    def append(self, _module: nn.Module, args: tuple, kwargs: dict[str, Any]):
        if self._context is None:
            return None
        if "position_ids" in kwargs:
            return args, kwargs | {"position_ids": self._longer(kwargs["position_ids"])}
        x, position_ids, *others = args
        return (x, self._longer(position_ids), *others), kwargs

    def _longer(self, position_ids: Tensor) -> Tensor:
        last = self._context.cut.last_position.expand(*position_ids.shape[:-1], 1)
        return torch.cat([position_ids, last], dim=-1)

    def remove(self, _module: nn.Module, _args: tuple, output: Tensor | tuple[Tensor, ...]):
        if self._context is None:
            return None
        if isinstance(output, Tensor):
            return output[..., :-1, :]
        return tuple(x[..., :-1, :] for x in output)

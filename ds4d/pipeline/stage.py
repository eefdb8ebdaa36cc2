"""One rank's part of a Hugging Face model: some of its layers, and its own forward to run them.

The model keeps its shape. Where a layer of another rank was stands a ``Passage``, which passes on
what it is given; where the embedding or the final norm was, an ``Absent``. Both hold no tensors, so
these take no memory and are never read from a file, and both show the attributes of what they
stand for, so that layer types and indices hold. A chunk runs by the base model's own forward, with
masks, positions and per-layer arguments as that makes them. Two passages are awake:

    the one before the chunk's first layer   puts the hidden state that came in the stream's place
    the one after its last layer             takes what goes on to the next stage

What the forward does before and after (scaling embeddings, adding learned positions, the final
norm) thus happens to the first and last chunk's stream only, in every family.

Letters: B sequences, S tokens, s = S / t of them under sequence parallelism, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ds4d.config.types import RunConfig
from ds4d.mesh import Mesh
from ds4d.pipeline.actions import Placement
from ds4d.pipeline.cache import cache_of, pass_over
from ds4d.pipeline.costs import model_costs
from ds4d.pipeline.partition import Split, make_split, split_of
from ds4d.pipeline.probe import Anatomy, hidden_of, probe

# DeepSpeed's mark of a parameter that its norms leave out (deepspeed/runtime/constants.py); its
# import alone takes seconds, and ``check`` uses this file
PIPE_REPLICATED = "ds_pipe_replicated"


ELSEWHERE = (
    "{name}: this {kind} is on another stage of the pipeline (ds4d.parallel.pp), and so is what is "
    "in it; save the model whole, or look at it with pp 1"
)


ALONE = (
    "this rank has a stage of the model (ds4d.parallel.pp), which can't be called alone: call the "
    "model that prepare() returned"
)


@dataclass
class _Stream:
    """What the passages of one model share: the chunk that runs, and the hidden state at its ends.

    Attributes:
        start, stop: its layers.
        given: what came from the stage before; None: the chunk begins with the embedding.
        taken: what goes to the next stage.
        rest: what the forward goes on with then: of the shape of all tokens, without memory.
        hides: between passes nobody may look into what is on other stages.
    """

    start: int = 0
    stop: int = 0
    given: Tensor | None = None
    taken: Tensor | None = None
    rest: Tensor | None = None
    hides: bool = False


class StandIn(nn.Module):
    """Shows the attributes of a module without holding it, as a submodule or otherwise."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["_stands_for"] = module

    def __getattr__(self, name: str) -> Any:
        if "_stands_for" not in self.__dict__:
            raise AttributeError(name)
        value = getattr(self.__dict__["_stands_for"], name)
        stream = self.__dict__.get("_stream")
        if stream is not None and stream.hides and stream.rest is None:
            if isinstance(value, (nn.Module, Tensor)):
                raise AttributeError(ELSEWHERE.format(name=name, kind=_kind(self)))
        return value


def _kind(stand_in: StandIn) -> str:
    return type(stand_in.__dict__["_stands_for"]).__name__


class Passage(StandIn):
    """In a layer's place, where the layer is not in the chunk.

    Args:
        outputs: how many things the layer returns, 0: no tuple.
    """

    def __init__(self, layer: nn.Module, index: int, outputs: int, stream: _Stream) -> None:
        super().__init__(layer)
        self.__dict__ |= {"_index": index, "_outputs": outputs, "_stream": stream}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden, stream = hidden_of(args, kwargs), self._stream
        if (cache := cache_of(args, kwargs)) is not None:
            pass_over(cache, self._index, stream.rest)
        if self._index == stream.start - 1:
            hidden = stream.given
        elif self._index == stream.stop:
            stream.taken = hidden
            hidden = stream.rest
        return (hidden, *[None] * (self._outputs - 1)) if self._outputs else hidden


class Absent(StandIn):
    """In the place of a module before or after the layers: passes on what it is given. A table, of
    learned positions, is added to something, and here has nothing to add."""

    def __init__(self, module: nn.Module, stream: _Stream) -> None:
        super().__init__(module)
        self.__dict__["_stream"] = stream

    def forward(self, x: Any, *_args: Any, **_kwargs: Any) -> Any:
        table = self.__dict__["_stands_for"]
        if not isinstance(table, nn.Embedding):
            return x
        nothing = self._stream.rest.new_zeros(())
        looks_up = isinstance(x, Tensor) and not x.is_floating_point()
        return nothing.expand(*x.shape, table.embedding_dim) if looks_up else nothing


@dataclass(frozen=True)
class Chunk:
    """Layers [start, stop), with the embedding if ``first``, and with norm, head and loss if
    ``last``.

    Attributes:
        modules: what the model has at these paths while the chunk runs.
    """

    start: int
    stop: int
    first: bool
    last: bool
    modules: dict[str, nn.Module]


class Stages:
    """A model on meta, cut in place to what one rank holds of it; the model has it as
    ``ds4d_stages``.

    A weight that the embedding and the head share is on the first and the last stage, once each,
    if these are on different ranks.

    Attributes:
        chunks: of this rank.
        tied: parameters here that are copies of one on another rank.
        shared_names: of these the name that the whole model has them under.

    Args:
        model: with all its layers; other axes have cut these already.
        anatomy: of the model.
        bounds: [start, stop) of the layers of all virtual stages, in the model's order.
        mine: this rank's virtual stages, by chunk.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        anatomy: Anatomy,
        bounds: Sequence[tuple[int, int]],
        mine: Sequence[int],
    ) -> None:
        self.model, self.anatomy = model, anatomy
        self._stream = _Stream()
        first_names = {param: name for name, param in model.named_parameters()}
        whole = model.get_submodule(anatomy.stack)
        passages = [
            Passage(layer, index, outputs, self._stream)
            for index, (layer, outputs) in enumerate(zip(whole, anatomy.outputs, strict=True))
        ]

        def part_of(ranges: Sequence[tuple[int, int]], first: bool, last: bool):
            layers = [
                layer if any(start <= index < stop for start, stop in ranges) else passages[index]
                for index, layer in enumerate(whole)
            ]
            found: dict[str, nn.Module] = {anatomy.stack: nn.ModuleList(layers)}
            for paths, held in ((anatomy.before, first), (anatomy.after, last)):
                for path in paths:
                    module = model.get_submodule(path)
                    found[path] = module if held else Absent(module, self._stream)
            return found

        self.chunks = []
        for stage in mine:
            first, last = stage == 0, stage == len(bounds) - 1
            parts = part_of([bounds[stage]], first, last)
            self.chunks.append(Chunk(*bounds[stage], first, last, parts))
        self._all = part_of(
            [bounds[stage] for stage in mine],
            any(chunk.first for chunk in self.chunks),
            any(chunk.last for chunk in self.chunks),
        )
        self._show(self._all)
        self.tied: list[nn.Parameter] = []
        self._find_tied(first_names)
        model.ds4d_stages = self

    def hide_others(self) -> None:
        """From now on only passes of the pipeline run the model, and a look into what is on other
        stages raises AttributeError, but for what the model's own forward looks at."""
        self._stream.hides = True
        self.model.register_forward_pre_hook(self._refuse_alone)

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Within, ``hide_others`` does not hold."""
        hides, self._stream.hides = self._stream.hides, False
        try:
            yield
        finally:
            self._stream.hides = hides

    def _refuse_alone(self, *_: Any) -> None:
        if self._stream.hides and self._stream.rest is None:
            raise RuntimeError(ALONE)

    def _find_tied(self, first_names: dict[nn.Parameter, str]) -> None:
        here = dict(self.model.named_parameters(remove_duplicate=False))
        for name, source in self.model.all_tied_weights_keys.items():
            if (name in here) == (source in here):
                continue
            param = here.get(name, here.get(source))
            self.tied.append(param)
            if name in here:
                setattr(param, PIPE_REPLICATED, True)  # DeepSpeed's norms count the other one
        self.shared_names = {param: first_names[param] for param in self.tied}

    def _show(self, modules: dict[str, nn.Module]) -> None:
        for path, module in modules.items():
            parent, _, name = path.rpartition(".")
            setattr(self.model.get_submodule(parent), name, module)

    @contextmanager
    def running(
        self, chunk: Chunk, tokens: Sequence[int], hidden: Tensor | None
    ) -> Iterator[_Stream]:
        """Within, the model's forward is that of a chunk; if it is not the first, given
        ``embeds``.

        Args:
            tokens: B, S.
            hidden: [B, s, E], what came from the stage before.

        Yields:
            where the chunk's output is afterwards, in ``taken``; the last one's is the forward's.
        """
        stream = self._stream
        stream.start, stream.stop, stream.given = chunk.start, chunk.stop, hidden
        stream.rest = self._nothing(tokens, self.anatomy.width)
        self._show(chunk.modules)
        try:
            yield stream
        finally:
            self._show(self._all)
            stream.given = stream.taken = stream.rest = None

    def embeds(self, tokens: Sequence[int]) -> Tensor:
        """What to give the model in the embedding's place, for its shape: [B, S, *]. Of its own,
        for some models scale it in place."""
        return self._nothing(tokens, self.model.get_input_embeddings().embedding_dim).clone()

    def new_hidden(self, tokens: Sequence[int]) -> Tensor:
        """[B, s, E], to be received into.

        Args:
            tokens: B, s.
        """
        device = next(self.model.parameters()).device
        return torch.empty((*tokens, self.anatomy.width), dtype=self.hidden_dtype, device=device)

    def _nothing(self, tokens: Sequence[int], width: int) -> Tensor:
        device = next(self.model.parameters()).device
        return torch.zeros((), dtype=self.hidden_dtype, device=device).expand(*tokens, width)

    @property
    def hidden_dtype(self) -> torch.dtype:
        """Of hidden states between layers."""
        return torch.float32 if self.anatomy.fp32_hidden else self.model.dtype


def stage_cutter(
    run: RunConfig, mesh: Mesh, config: PreTrainedConfig
) -> Callable[[PreTrainedModel], Stages] | None:
    """What ``build_model`` cuts this rank's stages with; None: there is no pipeline.

    Raises:
        ValueError: the model can't be cut so.
    """
    return None if run.parallel.pp == 1 else _cutter(split_of(run, config), mesh, config)


def inference_cutter(
    mesh: Mesh, config: PreTrainedConfig
) -> Callable[[PreTrainedModel], Stages] | None:
    """As ``stage_cutter``, where no file says how: one chunk a rank, of as many weights."""
    if mesh.parallel.pp == 1:
        return None
    costs = model_costs(config, seq_len=1)  # with one token, reading the weights is all that counts
    return _cutter(make_split(costs, Placement.loop(mesh.parallel.pp, 1)), mesh, config)


def _cutter(split: Split, mesh: Mesh, config: PreTrainedConfig):
    mine = tuple(split.placement.of_rank(mesh.coordinate.pp))
    return partial(Stages, anatomy=probe(config), bounds=split.bounds, mine=mine)

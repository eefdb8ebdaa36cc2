"""Which batch of which window a call of the model is about.

A script calls its model with tensors that its loader gave it, most often all of them. These are
recognised by identity, and with them the window: so the tokens of all its batches can be counted,
and a pipeline can run them all. What the script has made itself is taken as it is: a window of one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ds4d.accelerate.batch import IDS, TENSORS
from ds4d.accelerate.dealing import Share
from ds4d.accelerate.loader import Item, ScriptLoader, Window
from ds4d.data.batch import MicroBatch

Keys = tuple[tuple[str, Any], ...]  # argument of the model, key of the loader's batch


@dataclass(eq=False)
class Work:
    """What is done with the batches of a window, by one way of calling the model.

    Attributes:
        micro_batches: this rank's parts, on the CPU.
        counts: valid targets of each over all ranks; None: not counted yet.
        sums: of token losses of each over all ranks, of a pipeline; None: not computed yet.
        factors: what the script has multiplied these losses by.
    """

    micro_batches: list[MicroBatch]
    counts: Tensor | None = None
    sums: Tensor | None = None
    factors: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """Attributes:
    window: of the loader, or one of its own.
    index: of the batch in it.
    keys: from which of the loader's tensors the arguments are.
    own: the script has made some of its tensors itself.
    training: the model is in train mode.
    """

    window: Window
    index: int
    keys: Keys
    own: bool
    training: bool

    @property
    def last(self) -> bool:
        return self.index == len(self.window.items) - 1

    def tensors(self, index: int) -> dict[str, Tensor]:
        """On the CPU, those of a batch of the window."""
        host = self.window.items[index].host
        return {argument: host[key] for argument, key in self.keys}


def recognise(
    inputs: Mapping[str, Any], loaders: Iterable[ScriptLoader], *, training: bool
) -> Call:
    """Args:
    inputs: keyword arguments of the call.

    Raises:
        ValueError: no tokens are given.
    """
    given = {name: x for name in TENSORS if isinstance(x := inputs.get(name), Tensor)}
    if IDS not in given:
        raise ValueError("ds4d.accelerate: the model is called with input_ids [sequences, tokens]")
    for loader in loaders:
        if loader.current is None:
            continue
        for index, item in enumerate(loader.current.items):
            if (keys := _keys(given, item)) is not None:
                return Call(loader.current, index, keys, own=False, training=training)
    host = {name: x.detach().cpu() for name, x in given.items()}
    item = Item(host, None, Share(_real_rows(given[IDS], loaders), None))
    keys = tuple((name, name) for name in host)
    return Call(Window([item], last=False), 0, keys, own=True, training=training)


def _keys(given: Mapping[str, Tensor], item: Item) -> Keys | None:
    names = {id(x): key for key, (x, version) in item.given.items() if x._version == version}
    found = {argument: names.get(id(x)) for argument, x in given.items()}
    return None if None in found.values() else tuple(found.items())


def _real_rows(ids: Tensor, loaders: Iterable[ScriptLoader]) -> int:
    """Of tensors that the script has made of a batch with as many rows."""
    for loader in loaders:
        if loader.current is not None:
            for item in loader.current.items:
                if any(x is ids for x, _ in item.given.values()) and not item.share.real:
                    return 0
    return len(ids)

"""Random numbers of data, and of the model: two streams, for ranks draw differently of each.

Data: all ranks that read must draw the same order of samples, whether or not the script sets a
seed, and the one that one process would draw. So what reading draws comes from a stream of its own,
which begins as rank 0's random state and is taken over from rank 0 whenever a pass through the data
begins.

The model: dropout must be the same within a tp group and differ elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedConfig

from ds4d.resume import seed_everything

State = tuple[Any, Any, torch.Tensor]


def _state() -> State:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_state(state: State) -> None:
    python, numpy, cpu = state
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(cpu)


class DataRandomness:
    """The stream of data.

    Args:
        group: the world, on the CPU.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.state: State | None = None

    def agree(self, generators: list[torch.Generator]) -> None:
        """Go on from rank 0's state, and set generators that the script gave its loader to those
        of rank 0. Collective: the world."""
        state = _state() if self.state is None else self.state
        found = [state, [generator.get_state() for generator in generators]]
        if self._group.size() > 1:
            dist.broadcast_object_list(found, group=self._group, group_src=0)
        self.state, states = found
        for generator, theirs in zip(generators, states, strict=True):
            generator.set_state(theirs)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """What is drawn within, is drawn from this stream."""
        before = _state()
        _set_state(self.state)
        try:
            yield
        finally:
            self.state = _state()
            _set_state(before)

    def differ(self, rank: int) -> None:
        """Samples of another rank of dp have other random numbers, but for rank 0's, which has
        those of one process."""
        if rank:
            with self.drawing():
                seed_everything(int(torch.empty((), dtype=torch.int64).random_()) % 2**31, rank)


def same_seed(group: dist.ProcessGroup) -> int:
    """Rank 0's. Collective: the world, on the CPU."""
    found = [torch.initial_seed() % 2**31]
    if group.size() > 1:
        dist.broadcast_object_list(found, group=group, group_src=0)
    return found[0]


def has_dropout(model: nn.Module, config: PreTrainedConfig) -> bool:
    modules = any(isinstance(m, nn.Dropout) and m.p for m in model.modules())
    fields = ((k, v) for k, v in config.to_dict().items() if "drop" in k)
    return modules or any(isinstance(v, (int, float)) and v for _, v in fields)

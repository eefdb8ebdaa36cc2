"""Random numbers under tensor parallelism: the same where activations are the same on all ranks of
a tp group, and others where each rank has its own.

torch's own generators are seeded alike on the ranks of a tp group (differently over dp and cp), and
when the residual stream is cut along the sequence, differently there too. Left is dropout of what
is cut by heads while the rest is whole: attention weights. Its numbers come from a seed that is
drawn from the common CPU generator and goes on by rank; so a forward pass that is computed again
draws the same ones, for torch brings the common generators back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ds4d.tensor_parallel.state import TensorParallel

SEEDS = 2**62


@contextmanager
def own_dropout(tp: TensorParallel | None) -> Iterator[None]:
    """In here torch's generators are this rank's own. None: nothing changes."""
    if tp is None or tp.size == 1 or tp.scattered:
        yield
        return
    seed = int(torch.randint(SEEDS, ())) + tp.rank
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        yield


class OwnDropout(nn.Dropout):
    """Dropout of a tensor that is cut by heads."""

    def __init__(self, like: nn.Dropout, tp: TensorParallel) -> None:
        super().__init__(like.p)
        self.tp = tp
        self.train(like.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with own_dropout(self.tp if self.training and self.p else None):
            return super().forward(x)

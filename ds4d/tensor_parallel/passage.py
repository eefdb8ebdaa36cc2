"""Into a block of a Hugging Face model and, with experts, out of it (``blocks.py``), as hooks.

Letters: t ranks, B sequences, S tokens of the whole sequence, s = S / t, E hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ds4d.tensor_parallel.blocks import enter
from ds4d.tensor_parallel.layers import leave
from ds4d.tensor_parallel.state import TensorParallel


@dataclass
class Passage:
    """Attributes:
    early: see ``blocks.Entry``.
    shape: [B, S, E], between the two hooks.
    """

    tp: TensorParallel
    early: bool
    shape: torch.Size | None = None

    def enter(self, _module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        named = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs), "")
        x = args[0] if args else kwargs[named]
        whole = enter(x, self.tp, early=self.early)
        self.shape = whole.shape

        def entered(value: Any) -> Any:  # queries, keys and values may each be given
            return whole if value is x else value

        return tuple(map(entered, args)), {name: entered(v) for name, v in kwargs.items()}

    def leave(self, _module: nn.Module, _args: tuple, output):
        """Some blocks return their tokens in one row, [B * S, E]; they are put back into rows,
        for each rank has its stretch of every row."""
        y = output[0] if isinstance(output, tuple) else output
        out = leave(y.reshape(self.shape), self.tp)
        out = out if y.dim() == 3 else out.flatten(0, 1)
        return (out, *output[1:]) if isinstance(output, tuple) else out

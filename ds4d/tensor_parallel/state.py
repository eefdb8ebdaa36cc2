"""What all injected modules of one model share."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class NoGroup:
    """Stands for a process group as far as cutting a model asks it; nothing can be communicated."""

    ranks: int = 1
    place: int = 0

    def size(self) -> int:
        return self.ranks

    def rank(self) -> int:
        return self.place


@dataclass
class TensorParallel:
    """Attributes:
    group: tp; may have one rank.
    sequence_parallel: training and evaluation cut the residual stream along the sequence, each
        rank holding 1 / tp of the tokens.
    overlap: communicate beside matrix products, where the device gains by it.
    recompute: "none", "selective" or "full": how activations are kept.
    split_backward: a pipeline computes weight gradients apart (``ds4d/weight_gradients.py``).
    scattered: it is cut so in the present forward pass, and in its backward pass; not where text
        is generated. Set where a forward pass begins (``sequence.py``).
    """

    group: dist.ProcessGroup | NoGroup
    sequence_parallel: bool = False
    overlap: bool = True
    recompute: str = "none"
    split_backward: bool = False
    scattered: bool = False

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

"""What all injected modules of one model share."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass
class TensorParallel:
    """Attributes:
    group: tp; may have one rank.
    scattered: the residual stream of the present forward pass (and of its backward pass) is cut
        along the sequence, each rank holding 1 / tp of the tokens: sequence parallelism. Set
        where a forward pass begins; off while text is generated.
    recompute: "none", "selective" or "full": how activations are kept.
    """

    group: dist.ProcessGroup
    scattered: bool = False
    recompute: str = "none"

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def size(self) -> int:
        return self.group.size()

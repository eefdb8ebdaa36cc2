"""An RMS norm over all heads at once, whose heads are on several ranks (OLMo 2, 3; MiniMax).

Letters: B sequences, S tokens, W width over all heads, t ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ds4d import comm
from ds4d.tensor_parallel.state import TensorParallel


class NormOverHeads(nn.Module):
    """[B, S, W / t] -> [B, S, W / t], normalised by the mean square over W.

    Args:
        like: Hugging Face's norm, its weight cut already.
        width: W.

    Collective: tp; one number a token, forward and backward.
    """

    def __init__(self, like: nn.Module, tp: TensorParallel, width: int) -> None:
        super().__init__()
        self.tp, self.width = tp, width
        self.variance_epsilon = like.variance_epsilon
        self.register_parameter("weight", like.weight)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        squares = wide.square().sum(-1, keepdim=True)  # [B, S, 1]
        total = comm.sum_both_ways(squares, self.tp.group, purpose="norm over heads")
        normed = wide * torch.rsqrt(total / self.width + self.variance_epsilon)
        return (self.weight * normed).to(x.dtype)

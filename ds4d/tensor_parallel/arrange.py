"""What becomes of a column-parallel layer's output features before the attention sees them.

Letters: H heads, K key/value heads, D head dim, t ranks, h = H / t.

Where K does not divide by t, each rank owns an equal stretch of the rows of the key and value
weights, whatever heads they belong to; the outputs are gathered, and each rank takes the heads that
its queries look at. Every row of a weight so has one owner, and the gradients of a key that several
ranks look at are summed on their way back. (Megatron-LM does so for K < t.)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ds4d import comm
from ds4d.tensor_parallel.state import TensorParallel

GATHERED = "gathered outputs"


@dataclass(frozen=True)
class Heads:
    """Of one attention: H, K, D, and which of K this rank's queries look at.

    Attributes:
        own: indices into the K heads, in the order of this rank's queries: one for each stretch of
            queries that share it, or, where stretches differ in length, one for each query.
    """

    total: int
    kv_total: int
    dim: int
    own: tuple[int, ...]

    def gathered(self, tp: TensorParallel) -> bool:
        """Keys and values are put together, and each rank chooses from them."""
        return self.kv_total % tp.size != 0


def kv_heads_of(heads: int, kv_heads: int, rank: int, ranks: int) -> tuple[int, ...]:
    """Key/value heads that this rank's queries look at (``Heads.own``)."""
    local, group = heads // ranks, heads // kv_heads
    looked_at = [(rank * local + i) // group for i in range(local)]
    distinct = sorted(set(looked_at))
    share = local // len(distinct)
    uniform = [head for head in distinct for _ in range(share)] == looked_at
    return tuple(distinct if uniform else looked_at)


def choose(y: Tensor, tp: TensorParallel, heads: Heads) -> Tensor:
    """[B, S, K D / t] -> [B, S, len(own) D]. Collective: tp."""
    whole = comm.gather_last(y, tp.group, purpose="key/value heads")
    by_head = whole.unflatten(-1, (heads.kv_total, heads.dim))
    first, count = heads.own[0], len(heads.own)
    if heads.own == tuple(range(first, first + count)):
        return by_head.narrow(-2, first, count).flatten(-2)
    return by_head.index_select(-2, _index(heads.own, y.device)).flatten(-2)


@lru_cache(maxsize=None)
def _index(own: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(own, device=device)


def choose_packed(y: Tensor, tp: TensorParallel, heads: Heads) -> Tensor:
    """[q | k | v] with keys and values chosen. Collective: tp."""
    query = heads.total // tp.size * heads.dim
    part = heads.kv_total * heads.dim // tp.size
    q, k, v = y.split([query, part, part], dim=-1)
    return torch.cat([q, choose(k, tp, heads), choose(v, tp, heads)], dim=-1)


def gather(y: Tensor, tp: TensorParallel, features: int) -> Tensor:
    """All ``features`` output features on every rank, without padding. Collective: tp."""
    return _unpadded(comm.gather_last(y, tp.group, purpose=GATHERED), features)


def gather_complete(y: Tensor, tp: TensorParallel, features: int) -> Tensor:
    """The same outside of blocks, where gradients are complete on every rank. Collective: tp."""
    return _unpadded(comm.gather_last_complete(y, tp.group, purpose=GATHERED), features)


def _unpadded(y: Tensor, features: int) -> Tensor:
    return y if y.shape[-1] == features else y.narrow(-1, 0, features)

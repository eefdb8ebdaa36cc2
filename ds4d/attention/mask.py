"""The mask function that ds4d registers with transformers, and the lazy mask that it returns.

Letters: B sequences, q queries, k keys.

transformers hands over the mask as a function of (batch, head, query index, key index). It is kept
as that: most masks are never evaluated because their pattern is known (``pattern.py``), the others
block by block. An s x s mask is made only for a model that itself computes with its mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.utils._pytree import tree_map
from transformers.masking_utils import causal_mask_function

from ds4d.attention.documents import PADDING, Documents
from ds4d.attention.pattern import describe, of_whole
from ds4d.attention.visible import Visible
from ds4d.context_parallel import Cut


class LazyMask:
    """A mask [B, 1, q, k], True where the key is visible, that is computed where it is looked at.

    Models pass it around, put it in dicts and compare it with None; one that indexes it, or gives
    it to a torch function, gets the dense boolean mask that "sdpa" would have got.

    Args:
        function: transformers' mask function, at global indices.
        shape: (B, 1, q, k).
        q_offset: global index of the first query.
        kv_offset: global index of the first key.
        use_vmap: the function only takes single indices, not tensors that broadcast.
        device: where it is evaluated.

    Attributes:
        padding: bool [B, at least kv_offset + k], False at padding; None if nothing is padded.
        pattern: what is known about the function.
        context: see ``carry``.
    """

    dtype = torch.bool
    ndim = 4

    def __init__(
        self,
        function: Callable,
        shape: tuple[int, int, int, int],
        *,
        q_offset: int = 0,
        kv_offset: int = 0,
        use_vmap: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.function = function
        self.pattern = describe(function)
        self.shape = torch.Size(shape)
        self.q_offset, self.kv_offset = q_offset, kv_offset
        self.padding: torch.Tensor | None = None
        self.use_vmap = use_vmap
        self.device = torch.device(device)
        self.context = _carried[-1]
        self._visible: tuple[Documents | None, Visible] | None = None
        self._whole: LazyMask | None = None

    def of_whole_sequence(self, lengths: tuple[int, int]) -> "LazyMask":
        """The same mask for (q, k) queries and keys, when it was made for fewer. Made once."""
        if self._whole is None:
            whole = LazyMask(
                self.function,
                (*self.shape[:2], *lengths),
                use_vmap=self.use_vmap,
                device=self.device,
            )
            assert self.padding is None and not self.q_offset, "a shard with padding or a cache"
            self._whole = whole
        return self._whole

    def of_cut(self, cut: Cut) -> "LazyMask":
        """The same mask for a whole sequence, of which a rank has a part. Made once."""
        if self._whole is None:
            if self.padding is not None or self.q_offset or self.kv_offset:
                raise ValueError("ds4d.parallel.cp: a part of a sequence with padding or a cache")
            self._whole = LazyMask(
                of_whole(self.function, cut.positions),
                (*self.shape[:2], cut.length, cut.length),
                use_vmap=self.use_vmap,
                device=self.device,
            )
        return self._whole

    def block(
        self, rows: tuple[int, int], queries: tuple[int, int], keys: tuple[int, int]
    ) -> torch.Tensor:
        """Evaluates one block; ranges are local, [start, stop). Returns bool [rows, 1, q, k]."""
        batch = torch.arange(*rows, device=self.device)
        head = torch.zeros(1, dtype=torch.long, device=self.device)
        q = torch.arange(*queries, device=self.device) + self.q_offset
        k = torch.arange(*keys, device=self.device) + self.kv_offset
        evaluate = _by_vmap if self.use_vmap else _by_broadcast
        visible = evaluate(self.function, batch, head, q, k)
        if self.padding is not None:
            visible = visible & self.padding[batch[:, None, None, None], k]
        return visible.expand(len(batch), 1, len(q), len(k))

    def visible(self, documents: Documents | None) -> Visible:
        """What attention needs to know, with ``documents`` cut apart too. Once per forward pass."""
        if self._visible is None or self._visible[0] is not documents:
            self._visible = (documents, self._resolve(documents))
        return self._visible[1]

    def _resolve(self, documents: Documents | None) -> Visible:
        exact = self.pattern.exact
        if documents is not None and documents.covers_positions and self.padding is None:
            own = None  # known without a look at the device
        else:
            own = self._own_documents
            if self.padding is not None or self.pattern.segments is not None:
                exact = exact and own is not None
        if documents is not None and own is not None:
            documents = documents.intersect(own)
        return Visible(
            causal=self.pattern.causal,
            window=self.pattern.window,
            offset=self.q_offset - self.kv_offset,
            documents=own if documents is None else documents,
            general=None if exact else self.block,
        )

    @cached_property
    def _own_documents(self) -> Documents | None:
        """The mask's packed sequences or padding as documents, where that says the same.

        A row whose real tokens are not one stretch can't be said so. What padding itself sees does
        not matter. Reads the device, as transformers just did to find the packed sequences.
        """
        _, _, num_queries, num_keys = self.shape
        if num_queries != num_keys or self.q_offset or self.kv_offset:
            return None
        if self.pattern.segments is not None and self.padding is None:
            return Documents.from_ids(self.pattern.segments.cpu()).to(self.device)
        if self.padding is None or self.pattern.segments is not None:
            return None
        real = self.padding[:, :num_keys].cpu()
        stretches = real[:, :1].sum(-1) + (real[:, 1:] & ~real[:, :-1]).sum(-1)
        if stretches.max() > 1:
            return None
        return Documents.from_ids(torch.where(real, 0, PADDING)).to(self.device)

    def dense(self) -> torch.Tensor:
        """The whole mask, bool [B, 1, q, k]: quadratic, for models that compute with it."""
        batch, _, num_queries, num_keys = self.shape
        return self.block((0, batch), (0, num_queries), (0, num_keys))

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def __getitem__(self, index: object) -> torch.Tensor:
        return self.dense()[index]

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        args, kwargs = tree_map(
            lambda x: x.dense() if isinstance(x, LazyMask) else x, (args, kwargs or {})
        )
        return function(*args, **kwargs)


# Not all models hand keyword arguments down to attention; masks they do.
_carried: list[Any] = [None]


def carry(context: Any) -> None:
    """All masks made from here on, until it is called again, have this as their ``context``."""
    _carried[-1] = context


def _by_broadcast(function: Callable, batch, head, q, k) -> torch.Tensor:
    return function(
        batch[:, None, None, None], head[:, None, None], q[:, None], k[None, None, None, :]
    )


def _by_vmap(function: Callable, batch, head, q, k) -> torch.Tensor:
    for dim in (3, 2, 1, 0):
        function = torch.vmap(function, in_dims=tuple(0 if d == dim else None for d in range(4)))
    with TransformGetItemToIndex():  # lets a function index its tensors with the mapped indices
        return function(batch, head, q, k)


def lazy_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: object,
) -> LazyMask:
    """ds4d's entry in transformers' ``AttentionMaskInterface``.

    Args:
        attention_mask: bool [B, tokens seen so far], False at padding. Keys beyond it (a static
            cache not filled yet) are padding. Or a mask that ``generate`` had made before.
        kwargs: what other mask functions need to skip or shape a dense mask.
    """
    if isinstance(attention_mask, LazyMask):
        return attention_mask
    mask = LazyMask(
        mask_function,
        (batch_size, 1, q_length, kv_length),
        q_offset=int(q_offset),
        kv_offset=int(kv_offset),
        use_vmap=use_vmap,
        device=device,
    )
    if attention_mask is not None:
        end = mask.kv_offset + kv_length
        padding = F.pad(attention_mask, (0, max(0, end - attention_mask.shape[1])))
        if mask.pattern.causal:
            end = min(end, mask.q_offset + q_length)  # no query sees what comes later
        if not padding[:, mask.kv_offset : end].all():
            mask.padding = padding
    return mask

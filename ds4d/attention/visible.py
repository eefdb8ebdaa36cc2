"""Which keys each query may see, and the blocks that attention has to compute for it.

Letters: B sequences, s tokens a sequence, H heads, q queries, k keys. Everything here is Python
ints, so that no device is asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from ds4d.attention.documents import Documents

Range = tuple[int, int]  # [start, stop)
General = Callable[[Range, Range, Range], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Visible:
    """Attributes:
    causal: a key is visible only up to its query.
    window: only fewer than this many tokens before its query; None: no limit.
    offset: query i stands at key index i + offset (a cache makes keys start earlier).
    documents: only in the same run of tokens; None: the whole row.
    general: what else limits it, evaluated by block (rows, queries, keys) -> bool, or numbers to
        be added to the scores, [rows | 1, H | 1, q, k]; None: nothing.
    """

    causal: bool = False
    window: int | None = None
    offset: int = 0
    documents: Documents | None = None
    general: General | None = None
    _dense: dict = field(default_factory=dict)

    def simplified(self, num_queries: int, num_keys: int) -> "Visible":
        """Without the limits that limit nothing at these lengths."""
        causal, window, documents = self.causal, self.window, self.documents
        if causal and window is not None and window >= num_queries + self.offset:
            window = None
        if documents is not None and set(documents.lengths) == {num_queries}:
            documents = None
        if num_queries == 1 and self.offset == num_keys - 1:
            causal = False
        return replace(self, causal=causal, window=window, documents=documents)

    def dense(self, shape: tuple[int, int, int], dtype: torch.dtype, device) -> torch.Tensor:
        """Everything but the documents as numbers to add, [B, H | 1, q, k]; made once.

        Args:
            shape: (B, q, k).
        """
        if dtype not in self._dense:
            rows, queries, keys = ((0, size) for size in shape)
            block = Block(rows, queries, keys, self.causal, self.offset, self.window)
            block = replace(block, general=self.general is not None)
            mask = additive(block_mask(block, self.general, device), dtype)
            mask = mask if mask.ndim == 4 else mask[None, None]
            self._dense[dtype] = mask.expand(shape[0], -1, *shape[1:])
        return self._dense[dtype]


@dataclass(frozen=True)
class Block:
    """Queries x keys of some rows that are computed at once. Ranges are indices in the tensors.

    Attributes:
        shift: with ``causal``, query i sees key j if j <= i + shift, counted inside the block.
        window: with ``causal``, and only if j > i + shift - window.
        runs: lengths of the runs of a square block that must not see each other.
        general: the rest of the mask has to be evaluated.
        origin: of the tensors' queries and keys in the sequence, for that.
        first: no block before has these queries: its result is theirs, or is merged.
    """

    rows: Range
    queries: Range
    keys: Range
    causal: bool = False
    shift: int = 0
    window: int | None = None
    runs: tuple[int, ...] = ()
    general: bool = False
    origin: tuple[int, int] = (0, 0)
    first: bool = True

    @property
    def is_plain_causal(self) -> bool:
        """The lower triangle of a square: what kernels know by a flag."""
        is_plain = self.window is None and not self.runs and not self.general
        return is_plain and self.is_square

    @property
    def is_whole(self) -> bool:
        """Every query sees every key."""
        is_plain = self.window is None and not self.runs and not self.general
        return is_plain and not self.causal

    @property
    def is_square(self) -> bool:
        """On the diagonal: the first query is the first key's, and so on."""
        (q0, q1), (k0, k1) = self.queries, self.keys
        return self.causal and self.shift == 0 and q1 - q0 == k1 - k0


class Blocks(tuple[Block, ...]):
    """Made once and kept (``blocks``, ``pairs.pair``), so that what is made of them can be kept by
    who they are: that is known at once, where comparing them is not."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__
    __ne__ = object.__ne__


# A block of scores has at most about this many numbers over its rows and heads: memory stays
# linear in the sequence, and blocks are large enough that their launch doesn't count.
SCORES = 2**22
# Neighbouring short runs share a block of at most this many tokens: on a CPU a call costs as much
# as the scores that are then computed in vain.
GROUP_TOKENS = 64


@lru_cache(maxsize=64)  # all layers, forward and backward, want the same ones
def blocks(
    shape: tuple[int, int, int, int],
    *,
    causal: bool,
    window: int | None,
    offset: int,
    lengths: tuple[int, ...],
    general: bool,
    split: bool,
) -> Blocks:
    """The blocks that cover all that is visible; each query is in exactly one, or sees no key.

    Args:
        shape: (B, H, q, k).
        lengths: of the documents; empty: each row is one.
        split: cut long stretches of plain attention too (for a kernel that holds the scores of its
            block); otherwise only where a mask has to be evaluated.
    """
    batch, heads, num_queries, num_keys = shape
    spans = _groups(lengths, num_queries) if lengths else [((0, batch), (0, num_queries), ())]
    found: list[Block] = []
    for rows, queries, runs in spans:
        keys = queries if lengths else (0, num_keys)
        whole = Block(rows, queries, keys, causal, offset, window, runs, general)
        if window is not None and causal and window >= queries[1] - queries[0] + offset:
            whole = replace(whole, window=None)
        needs_mask = whole.window is not None or general
        found += cut_block(whole, heads) if split or needs_mask else [whole]
    return Blocks(found)


def _groups(lengths: tuple[int, ...], row_tokens: int) -> Iterator[tuple[Range, Range, tuple]]:
    """(row, tokens of it, lengths of the runs in them) of each run, short neighbours together."""
    start, group = 0, []  # in the flattened tokens
    for length in lengths:
        end = start + sum(group)
        if group and (end % row_tokens == 0 or end - start + length > GROUP_TOKENS):
            yield _group(start, group, row_tokens)
            start, group = end, []
        group.append(length)
    yield _group(start, group, row_tokens)


def _group(start: int, group: list[int], row_tokens: int) -> tuple[Range, Range, tuple[int, ...]]:
    row, first = divmod(start, row_tokens)
    runs = tuple(group) if len(group) > 1 else ()
    return (row, row + 1), (first, first + sum(group)), runs


def cut_block(block: Block, heads: int) -> Iterator[Block]:
    """Cuts a block by rows and queries to SCORES, and leaves out the keys that no query sees.

    A group of short runs is small enough and stays whole.
    """
    if block.runs:
        yield block
        return
    (row0, row1), (q0, q1), (k0, k1) = block.rows, block.queries, block.keys
    width = k1 - k0 if block.window is None else min(k1 - k0, 2 * block.window)
    rows = min(row1 - row0, max(1, SCORES // (heads * width * 64)))
    step = min(512, max(64, SCORES // (rows * heads * width)))
    if block.window is not None:
        step = min(step, max(64, block.window))  # at most half of the scores are in vain
    for r in range(row0, row1, rows):
        for q in range(q0, q1, step):
            stop = min(q + step, q1)
            first = q - q0 + block.shift  # the last key of the first query, counted from k0
            low, high = k0, k1
            if block.causal:
                high = min(k1, k0 + stop - q0 + block.shift)
            if block.window is not None:
                low = max(k0, k0 + first - block.window + 1)
            if low < high:
                yield replace(
                    block,
                    rows=(r, min(r + rows, row1)),
                    queries=(q, stop),
                    keys=(low, high),
                    shift=first - (low - k0),
                )


def positional_mask(block: Block, device: torch.device) -> torch.Tensor | None:
    """What causality, window and runs leave visible in a block: bool [q, k]; None: everything."""
    num_queries = block.queries[1] - block.queries[0]
    num_keys = block.keys[1] - block.keys[0]
    if block.runs:
        return _runs_mask(block.runs, block.causal, block.window, device)
    if block.window is None and (not block.causal or block.shift >= num_keys - 1):
        return None
    return _distance_mask(num_queries, num_keys, block.causal, block.shift, block.window, device)


@lru_cache(maxsize=256)  # small ones, the same in all layers
def _runs_mask(
    runs: tuple[int, ...], causal: bool, window: int | None, device: torch.device
) -> torch.Tensor:
    run = copied(torch.arange(len(runs)).repeat_interleave(torch.tensor(runs)), device)
    together = run[:, None] == run
    return together & _distance_mask(len(run), len(run), causal, 0, window, device)


def _distance_mask(
    num_queries: int,
    num_keys: int,
    causal: bool,
    shift: int,
    window: int | None,
    device: torch.device,
) -> torch.Tensor:
    key = torch.arange(num_keys, device=device)
    query = torch.arange(shift, shift + num_queries, device=device)[:, None]  # where it stands
    visible = key <= query if causal else torch.ones_like(key <= query)
    return visible if window is None else visible & (key > query - window)


def block_mask(block: Block, general: General | None, device: torch.device) -> torch.Tensor | None:
    """All that is visible in a block: bool, or numbers to add, that broadcast to [rows, H, q, k].

    None: everything.
    """
    if not block.general:
        return positional_mask(block, device)
    queries, keys = (
        (start + by, stop + by)
        for (start, stop), by in zip((block.queries, block.keys), block.origin)
    )
    mask = general(block.rows, queries, keys)
    if not block.runs:
        return mask  # it says what causality and window say
    together = positional_mask(block, device)
    return together & mask if mask.dtype == torch.bool else additive(together, mask.dtype) + mask


def cut_mask(mask: torch.Tensor, rows: Range, queries: Range, keys: Range) -> torch.Tensor:
    """A block of a mask [B | 1, H | 1, q, k]."""
    return mask[slice(*rows) if mask.shape[0] > 1 else slice(1), :, slice(*queries), slice(*keys)]


def additive(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as numbers to be added to the scores."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return zeros.masked_fill_(~mask, float("-inf"))


def copied(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """From the CPU to a device, without waiting for what the device has still to do."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)

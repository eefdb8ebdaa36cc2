"""Attention by blocks with flash attention for CUDA: all blocks of a kind in one launch.

Letters: B rows, n tokens of a row in a tensor, T tokens of a launch, H heads, K key/value heads, D
head dim.

A launch takes runs of queries and of keys. Squares on the diagonal, rectangles and bands differ
only in the window that a query has in its run, so that all squares of all documents are one launch,
however many they are. Their tokens are taken out of the tensors, and what is found for them is
merged with what was found before. All this is known from the blocks as Python ints. It is copied to
the device once for all layers, and nothing waits for that.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from ds4d.attention.blockwise import BlockKernel, merged
from ds4d.attention.flash_ops import Options, Runs, flash_ops
from ds4d.attention.visible import Block, Blocks, Range, copied


class CudaBlocks(BlockKernel):
    holds_scores = False
    knows_causal = True
    knows_windows = True
    equal_dims = True

    def __init__(self, call) -> None:
        super().__init__(call)
        self.ops = flash_ops()
        self.options = Options(call.scale, softcap=call.softcap)

    def add_forward(self, blocks: Blocks, query, key, value, bias, out, lse) -> None:
        for launch in _launches(blocks, query.shape[2], key.shape[2], query.device):
            q, k, v = launch.inputs(query, key, value)
            found_out, found_lse, _ = self.ops.forward(q, k, v, launch.runs, self.options)
            found, tokens = (found_out, found_lse.T), launch.queries
            if not launch.first:
                found = merged(tokens.take(out), tokens.take(lse), *found)
            for x, part in zip((out, lse), found):
                tokens.put(x, part)

    def add_backward(self, blocks: Blocks, inputs, output, grads) -> None:
        query, key, value, _ = inputs
        for launch in _launches(blocks, query.shape[2], key.shape[2], query.device):
            grad_out, out, lse = (launch.queries.take(x) for x in output)
            found = self.ops.backward(
                grad_out, *launch.inputs(query, key, value), out, lse.T.contiguous(), None,
                launch.runs, self.options,
            )  # fmt: skip
            for tokens, grad, part in zip((launch.queries, launch.keys, launch.keys), grads, found):
                tokens.add(grad.transpose(1, 2), part)


class _Tokens(NamedTuple):
    """Some of the tokens of [B, n, ...]: all in a box of rows x tokens, or by their index in
    [B * n, ...], int64 [T]."""

    box: tuple[slice, slice]
    index: Tensor | None

    def take(self, x: Tensor) -> Tensor:  # [B, n, ...] -> [T, ...]
        if self.index is None:
            return x[self.box].flatten(0, 1)
        return x.flatten(0, 1).index_select(0, self.index)

    def put(self, x: Tensor, part: Tensor) -> None:  # no token twice
        if self.index is None:
            x[self.box] = part.view_as(x[self.box])
        else:
            x.view(-1, *x.shape[2:]).index_copy_(0, self.index, part.to(x.dtype))

    def add(self, x: Tensor, part: Tensor) -> None:
        if self.index is None:
            x[self.box] += part.view_as(x[self.box])
        else:
            x.view(-1, *x.shape[2:]).index_add_(0, self.index, part.to(x.dtype))


class _Launch(NamedTuple):
    """Attributes:
    queries: none twice.
    first: no launch before has these queries, and no other pair.
    """

    queries: _Tokens
    keys: _Tokens
    runs: Runs
    first: bool

    def inputs(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, H | K, n, D] -> [T, H | K, D]"""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return self.queries.take(q), self.keys.take(k), self.keys.take(v)


class _Run(NamedTuple):  # in the order in which they are launched
    row: int
    queries: Range
    keys: Range


@lru_cache(maxsize=128)
def _launches(
    blocks: Blocks, num_queries: int, num_keys: int, device: torch.device
) -> tuple[_Launch, ...]:
    """Args:
    num_queries, num_keys: of a row in the tensors.
    """
    by_window: dict[tuple[int, int], list[Block]] = defaultdict(list)
    for block in blocks:
        by_window[_window(block)].append(block)
    found: list[_Launch] = []
    for window, alike in by_window.items():
        for runs in _without_repetition([run for block in alike for run in _runs(block)]):
            first = not found and all(block.first for block in alike)
            found.append(_launch(runs, window, first, num_queries, num_keys, device))
    return tuple(found)


def _window(block: Block) -> tuple[int, int]:
    """How many keys before and after its own place a query sees, -1: all; where flash attention
    takes it to stand, which has the last query and the last key at one place."""
    assert not block.general, "a mask that has to be evaluated"
    if not block.causal:
        return -1, -1
    num_queries = block.queries[1] - block.queries[0]
    after = block.shift - (block.keys[1] - block.keys[0] - num_queries)
    before = None if block.window is None else block.window - 1 - after
    assert after >= 0 and (before is None or before >= 0), "a query that sees nothing"
    # what hides nothing is no limit: such blocks are all of one kind
    return -1 if before is None else before, -1 if after >= num_queries - 1 > 0 else after


def _runs(block: Block) -> Iterator[_Run]:
    (q0, q1), (k0, k1) = block.queries, block.keys
    ends = list(accumulate(block.runs))
    parts = [((q0, q1), (k0, k1))]
    if block.runs:
        parts = [
            ((q0 + start, q0 + end), (k0 + start, k0 + end))
            for start, end in zip([0, *ends], ends)
        ]  # fmt: skip
    for row in range(*block.rows):
        for queries, keys in parts:
            yield _Run(row, queries, keys)


def _without_repetition(runs: list[_Run]) -> list[list[_Run]]:
    """As few launches as give no query two results at once."""
    launches: list[list[_Run]] = []
    for run in sorted(runs):
        for before in launches:
            last = before[-1]
            if (last.row, last.queries[1]) <= (run.row, run.queries[0]):
                before.append(run)
                break
        else:
            launches.append([run])
    return launches


def _launch(
    runs: list[_Run], window: tuple[int, int], first: bool, num_queries: int, num_keys: int, device
) -> _Launch:
    queries = [(run.row, run.queries) for run in runs]
    keys = [(run.row, run.keys) for run in runs]
    query_bounds, longest_query = _bounds(queries, device)
    if queries == keys:
        key_bounds, longest_key = query_bounds, longest_query
    else:
        key_bounds, longest_key = _bounds(keys, device)
    if window[0] >= 0:  # flash attention takes no limit after to be that of the longest keys
        longest_key = max(longest_key, longest_query)
    return _Launch(
        _tokens(queries, num_queries, device),
        _tokens(keys, num_keys, device),
        Runs(query_bounds, key_bounds, longest_query, longest_key, window),
        first,
    )


def _bounds(runs: list[tuple[int, Range]], device: torch.device) -> tuple[Tensor, int]:
    lengths = [stop - start for _, (start, stop) in runs]
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return copied(bounds, device), max(lengths)


def _tokens(runs: list[tuple[int, Range]], row_tokens: int, device: torch.device) -> _Tokens:
    joined: list[tuple[int, Range]] = []
    for row, (start, stop) in runs:
        if joined and joined[-1][0] == row and joined[-1][1][1] == start:
            start = joined.pop()[1][0]
        joined.append((row, (start, stop)))
    rows, ranges = zip(*joined)
    if len(set(ranges)) == 1 and rows == tuple(range(rows[0], rows[-1] + 1)):
        return _Tokens((slice(rows[0], rows[-1] + 1), slice(*ranges[0])), None)
    index = [
        torch.arange(row * row_tokens + start, row * row_tokens + stop)
        for row, (start, stop) in joined
    ]  # fmt: skip
    return _Tokens((slice(0), slice(0)), copied(torch.cat(index), device))

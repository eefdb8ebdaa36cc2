"""What the queries of one place in a ring have to compute with the keys of another.

Letters: B sequences, S tokens of a sequence, H heads. All of it is Python ints: ranges of the
sequence, [start, stop), cut at the borders of stretches and documents.

Between two stretches a piece is a rectangle, which causality leaves whole or not at all; where they
are the same it is a square on the diagonal. A window cuts a band out of both.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from ds4d.attention.visible import GROUP_TOKENS, Block, Blocks, Range, blocks, cut_block

Spans = tuple[Range, ...]


class Seen(NamedTuple):
    """What is the same for all pairs of one call of attention.

    Attributes:
        batch, heads, length: B, H, S.
        causal, window, lengths, general: as ``visible.blocks`` takes them.
        split: as there.
        cut_windows: bands are cut, for a kernel that needs a mask for them.
    """

    batch: int
    heads: int
    length: int
    causal: bool
    window: int | None
    lengths: tuple[int, ...]
    general: bool
    split: bool
    cut_windows: bool = True


@dataclass(frozen=True)
class Pair:
    """Attributes:
    keys: ranges of the keys, as they lie at their place, that any query sees. Of the whole
        sequence all, and of a place's own: there each is seen by itself at least.
    blocks: queries are counted as they lie at their place, keys in ``keys``, one after the other.
    """

    keys: Spans
    blocks: Blocks

    @property
    def num_keys(self) -> int:
        return sum(stop - start for start, stop in self.keys)


class _Piece(NamedTuple):
    rows: Range
    queries: Range  # of the sequence
    keys: Range
    query_at: int  # where the first one lies at its place
    key_at: int
    square: bool


@lru_cache(maxsize=512)  # all layers, forward and backward, ask for the same ones
def pair(queries: Spans, keys: Spans, seen: Seen) -> Pair:
    """Args:
    queries, keys: the stretches of the two places, in the order in which they lie there. They
        are disjoint or equal, or the keys are the whole sequence.

    Where they are disjoint the results are for merging (``Block.first``): a place begins with its
    own keys.
    """
    ascending = all(a[1] <= b[0] for a, b in zip(queries, queries[1:]))
    if queries == keys and ascending and seen.causal and seen.window is None and not seen.general:
        return _own(queries, seen)
    pieces = list(_pieces(queries, keys, seen))
    needed = keys
    if keys != ((0, seen.length),):
        needed = _union((p.key_at, p.key_at + p.keys[1] - p.keys[0]) for p in pieces)
    found = [_block(piece, needed, seen) for piece in pieces]
    if not seen.general:
        found = _joined(found)
    cut: list[Block] = []
    for block in found:
        needs_mask = block.general or (block.window is not None and seen.cut_windows)
        cut += cut_block(block, seen.heads) if seen.split or needs_mask else [block]
    overlap = any(_length(_common(a, b)) for a in queries for b in keys)
    return Pair(needed, Blocks(_marked(cut) if overlap else (replace(b, first=False) for b in cut)))


def _own(spans: Spans, seen: Seen) -> Pair:
    """A place with itself: what came before in the sequence lies before, so that documents are runs
    and causality is a triangle, as in a whole sequence."""
    size = sum(stop - start for start, stop in spans)
    lengths = [
        held for row in range(seen.batch) if seen.lengths for document in _documents(row, seen)
        if (held := sum(_length(_common(span, document)) for span in spans))
    ]  # fmt: skip
    found = blocks(
        (seen.batch, seen.heads, size, size),
        causal=True,
        window=None,
        offset=0,
        lengths=tuple(lengths),
        general=False,
        split=seen.split,
    )
    # its stretches have no one origin; this is one that no other pair's blocks have (for dropout)
    origin = (seen.length, seen.length)
    return Pair(((0, size),), Blocks(replace(block, origin=origin) for block in found))


def _pieces(queries: Spans, keys: Spans, seen: Seen) -> Iterator[_Piece]:
    rows = [(row, row + 1) for row in range(seen.batch)] if seen.lengths else [(0, seen.batch)]
    for row in rows:
        documents = _documents(row[0], seen)
        starts = [start for start, _ in documents]
        for query_at, span in _laid(queries):
            first = bisect_right(starts, span[0]) - 1
            for document in documents[first : bisect_right(starts, span[1] - 1)]:
                asked = _common(span, document)
                for key_at, held in _laid(keys):
                    yield from _between(row, query_at, span, asked, key_at, held, document, seen)


def _between(
    row: Range, query_at: int, span: Range, asked: Range, key_at: int, held: Range, document: Range,
    seen: Seen,
) -> Iterator[_Piece]:  # fmt: skip
    """Of one document, between one stretch of queries and one of keys."""
    start, stop = _common(held, document)
    if seen.causal:
        stop = min(stop, asked[1])
    if seen.window is not None:
        start = max(start, asked[0] - seen.window + 1)
    square_from = min(max(start, asked[0]), stop) if seen.causal else stop
    for (low, high), square in (((start, square_from), False), ((square_from, stop), True)):
        if low >= high:
            continue
        last = asked[1]
        if seen.window is not None and not square:  # the last ones see none of these keys
            last = min(last, high - 1 + seen.window)
        yield _Piece(
            row,
            (asked[0], last),
            (low, high),
            query_at + asked[0] - span[0],
            key_at + low - held[0],
            square,
        )


def _block(piece: _Piece, needed: Spans, seen: Seen) -> Block:
    (q0, q1), (k0, k1) = piece.queries, piece.keys
    before = 0  # needed keys that lie before this piece's
    for start, stop in needed:
        if start <= piece.key_at < stop:
            key_at = before + piece.key_at - start
            break
        before += stop - start
    window = seen.window
    if window is not None and q1 - 1 - k0 < window:
        window = None
    return Block(
        rows=piece.rows,
        queries=(piece.query_at, piece.query_at + q1 - q0),
        keys=(key_at, key_at + k1 - k0),
        causal=piece.square or window is not None,
        shift=q0 - k0,
        window=window,
        general=seen.general,
        origin=(q0 - piece.query_at, k0 - key_at),
    )


def _joined(found: list[Block]) -> list[Block]:
    """Fewer and larger ones: rectangles side by side; and neighbouring squares of short documents,
    which then have to be kept apart (``Block.runs``)."""
    for key in (lambda b: (b.rows, b.queries, b.keys), lambda b: (b.rows, b.keys, b.queries)):
        whole = sorted((b for b in found if b.is_whole), key=key)
        others = [b for b in found if not b.is_whole]
        joined: list[Block] = []
        for block in whole:
            before = joined[-1] if joined else None
            if before is not None and before.rows == block.rows:
                if before.queries == block.queries and before.keys[1] == block.keys[0]:
                    joined[-1] = replace(before, keys=(before.keys[0], block.keys[1]))
                    continue
                if before.keys == block.keys and before.queries[1] == block.queries[0]:
                    joined[-1] = replace(before, queries=(before.queries[0], block.queries[1]))
                    continue
            joined.append(block)
        found = joined + others
    rectangles = [b for b in found if not b.is_square]
    squares: list[Block] = []
    for block in sorted((b for b in found if b.is_square), key=lambda b: (b.rows, b.queries)):
        before = squares[-1] if squares else None
        if before is not None and _is_neighbour(before, block):
            runs = before.runs or (before.queries[1] - before.queries[0],)
            squares[-1] = replace(
                before,
                queries=(before.queries[0], block.queries[1]),
                keys=(before.keys[0], block.keys[1]),
                runs=(*runs, block.queries[1] - block.queries[0]),
            )
        else:
            squares.append(block)
    return squares + rectangles


def _is_neighbour(before: Block, block: Block) -> bool:
    return (
        before.rows == block.rows
        and before.queries[1] == block.queries[0]
        and before.keys[1] == block.keys[0]
        and before.window == block.window
        and block.queries[1] - before.queries[0] <= GROUP_TOKENS
    )


def _marked(found: list[Block]) -> list[Block]:
    """With ``first`` where it holds."""
    marked: list[Block] = []
    done: dict[int, Spans] = defaultdict(tuple)  # queries, by row
    for block in found:
        rows = range(*block.rows)
        is_first = not any(
            _length(_common(block.queries, span)) for row in rows for span in done[row]
        )
        for row in rows:
            done[row] = _union([*done[row], block.queries])
        marked.append(replace(block, first=is_first))
    return marked


def _documents(row: int, seen: Seen) -> list[Range]:
    return _by_row(seen.lengths, seen.length)[row] if seen.lengths else [(0, seen.length)]


@lru_cache(maxsize=64)
def _by_row(lengths: tuple[int, ...], row_tokens: int) -> dict[int, list[Range]]:
    found: dict[int, list[Range]] = {}
    for end, length in zip(accumulate(lengths), lengths):
        row, start = divmod(end - length, row_tokens)
        found.setdefault(row, []).append((start, start + length))
    return found


def _laid(spans: Spans) -> Iterator[tuple[int, Range]]:
    """Each stretch, and where its first token lies."""
    at = 0
    for start, stop in spans:
        yield at, (start, stop)
        at += stop - start


def _union(ranges: Iterable[Range]) -> Spans:
    union: list[Range] = []
    for start, stop in sorted(ranges):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(stop, union[-1][1]))
        else:
            union.append((start, stop))
    return tuple(union)


def _common(a: Range, b: Range) -> Range:
    return max(a[0], b[0]), min(a[1], b[1])


def _length(span: Range) -> int:
    return max(0, span[1] - span[0])

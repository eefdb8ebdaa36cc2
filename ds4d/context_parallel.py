"""How the tokens of a sequence are dealt to the ranks of a cp group.

A cp group is a ring of groups that exchange heads (``attention/ulysses.py``): ring x ulysses = cp,
ulysses inner. Each place in the ring holds some stretches of the sequence, which its ulysses ranks
share evenly, in order. So "ring" is ulysses 1, "ulysses" is ring 1, "hybrid" is anything else, and
there is one way through the code.

A batch is cut once, where it is made (``data/loader.py``): ids, targets that were shifted before,
positions. What attention has to know of the whole sequence goes along as a ``Cut``.

Letters: B sequences, S tokens of a sequence, s = S / cp of them on this rank, R places in the ring.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ds4d.attention.documents import Documents
from ds4d.config.layout import cut_multiple
from ds4d.data.batch import IGNORE, MicroBatch, real_tokens

Span = tuple[int, int]  # tokens [start, stop) of the sequence
Spans = tuple[Span, ...]

# Documents make a row's work uneven. If some rank has more than this over the mean, chunks are
# made smaller, down to so many tokens, and dealt by their work.
UNEVEN = 0.05
SMALLEST_CHUNK = 128


@dataclass(frozen=True, eq=False)
class Cut:
    """Of one micro-batch; the same on all ranks of its cp group.

    Attributes:
        length: S, padding included.
        spans: what each place in the ring holds, in the order in which it lies there.
        documents: of the whole rows; None: a row is one document.
        packed: the documents, cut where positions jump too.
        positions: int64 [B, S]; None: they count up in every row.
        last_position: the largest; int64 [].
        places: of this rank's tokens in their rows; int64 [s].
        imbalance: of the work (pairs of a query and a key that it sees), how much more than the
            mean the busiest place in the ring has.
    """

    length: int
    spans: tuple[Spans, ...]
    documents: Documents | None
    packed: Documents | None
    positions: Tensor | None
    last_position: Tensor
    places: Tensor
    imbalance: float

    def to(self, device: torch.device | str) -> "Cut":
        return self._each(lambda x: x.to(device, non_blocking=True))

    def pin_memory(self) -> "Cut":
        return self._each(lambda x: x.pin_memory())

    def _each(self, change: Callable[[Any], Any]) -> "Cut":
        names = ("documents", "packed", "positions", "last_position", "places")
        held = {name: value for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **{name: change(value) for name, value in held.items()})


@dataclass(frozen=True)
class Cutter:
    """Cuts micro-batches for one rank. Goes to the processes that read data.

    Attributes:
        rank: in the cp group.
        size: of the cp group.
        ulysses: ranks that exchange heads.
        parts: that each rank cuts its tokens into (over tp).
        smallest_chunk: in tokens, of those that are dealt by their work; None: ``SMALLEST_CHUNK``.
    """

    rank: int
    size: int
    ulysses: int = 1
    parts: int = 1
    smallest_chunk: int | None = None

    @property
    def ring(self) -> int:
        return self.size // self.ulysses

    def __call__(self, batch: MicroBatch) -> MicroBatch:
        """This rank's tokens of a whole micro-batch on the CPU.

        A length that does not divide is padded: what is added on the right is seen by nobody, for
        models here are causal, and is not counted. Its positions are the last token's, for which
        every table of positions has a place and which lengthens no rotary scale.
        """
        if self.size == 1:
            return batch
        documents, (packed, positions) = batch.documents, _by_positions(batch)
        extra = -batch.input_ids.shape[1] % cut_multiple(self.size, self.ulysses, self.parts)
        last = batch.position_ids[:, -1:].expand(-1, extra)
        padded = MicroBatch(
            F.pad(batch.input_ids, (0, extra)),
            F.pad(batch.targets, (0, extra), value=IGNORE),
            torch.cat([batch.position_ids, last], dim=1),
        )
        if extra:
            documents, packed = (x and x.padded(extra) for x in (documents, packed))
        length = padded.input_ids.shape[1]
        spans, imbalance = self._spans(length, packed)
        place, part = divmod(self.rank, self.ulysses)
        held = torch.cat([torch.arange(*span) for span in spans[place]])
        mine = held.chunk(self.ulysses)[part]
        return MicroBatch(
            padded.input_ids[:, mine],
            padded.targets[:, mine],
            padded.position_ids[:, mine],
            cut=Cut(
                length,
                spans,
                documents,
                packed,
                None if positions is None else padded.position_ids,
                batch.position_ids.max(),
                mine,
                imbalance,
            ),
            real=F.pad(real_tokens(batch), (0, extra))[:, mine],
        )

    def _spans(self, length: int, documents: Documents | None) -> tuple[tuple[Spans, ...], float]:
        """And how uneven the work is."""
        if self.ring == 1:
            return (((0, length),),), 0.0
        chunks = 2 * self.ring
        spans = zigzag(length, self.ring)
        if documents is None:
            return spans, 0.0
        work = _work_until(documents, length)
        best = imbalance = _imbalance(spans, work)
        while imbalance > UNEVEN and length % (2 * chunks) == 0:
            chunks *= 2
            if length // chunks < (self.smallest_chunk or SMALLEST_CHUNK):
                break
            dealt = _dealt(length, chunks, self.ring, work)
            imbalance = _imbalance(dealt, work)
            if imbalance < best:
                spans, best = dealt, imbalance
        return spans, best


WHOLE = Cutter(rank=0, size=1)


def zigzag(length: int, ring: int) -> tuple[Spans, ...]:
    """2 x ring chunks, to each place one from the front and its counterpart from the back: under
    a causal mask all have the same work (formulas.md 3, "CP")."""
    chunk = length // (2 * ring)
    pairs = ((place, 2 * ring - 1 - place) for place in range(ring))
    return tuple(_merged([(c * chunk, (c + 1) * chunk) for c in pair]) for pair in pairs)


def _dealt(length: int, chunks: int, ring: int, work: Tensor) -> tuple[Spans, ...]:
    """Equally many chunks to each place: the heaviest left to the place that has least."""
    size = length // chunks
    bounds = work[::size]
    weights = bounds.diff().tolist()
    held: list[list[Span]] = [[] for _ in range(ring)]
    loads = [0.0] * ring
    for chunk in sorted(range(chunks), key=lambda c: -weights[c]):
        free = [place for place in range(ring) if len(held[place]) < chunks // ring]
        place = min(free, key=lambda p: (loads[p], p))
        held[place].append((chunk * size, (chunk + 1) * size))
        loads[place] += weights[chunk]
    return tuple(_merged(sorted(spans)) for spans in held)


def _merged(spans: list[Span]) -> Spans:
    """Sorted ones, neighbours as one."""
    merged: list[Span] = []
    for start, stop in spans:
        if merged and merged[-1][1] == start:
            start = merged.pop()[0]
        merged.append((start, stop))
    return tuple(merged)


def _work_until(documents: Documents, length: int) -> Tensor:
    """int64 [S + 1]: pairs of a query before each token, in all rows, and a key that it sees."""
    lengths = torch.tensor(documents.lengths)
    starts = lengths.cumsum(0) - lengths
    seen = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths) + 1
    seen = seen.view(-1, length).sum(0)
    return F.pad(seen.cumsum(0), (1, 0))


def _imbalance(spans: tuple[Spans, ...], work: Tensor) -> float:
    loads = [sum(float(work[stop] - work[start]) for start, stop in held) for held in spans]
    return max(loads) * len(loads) / max(sum(loads), 1.0) - 1


def _by_positions(batch: MicroBatch) -> tuple[Documents | None, Tensor | None]:
    """The packed sequences, and the positions where those do not simply count up.

    Where positions jump transformers takes another packed sequence to begin, in most models. It
    would have to see the whole row for that, so it is done here.
    """
    jumps = batch.position_ids.diff() != 1
    if not jumps.any():
        return batch.documents, None
    runs = Documents.from_ids(F.pad(jumps.cumsum(1), (1, 0)))
    documents = runs if batch.documents is None else batch.documents.intersect(runs)
    return documents, batch.position_ids

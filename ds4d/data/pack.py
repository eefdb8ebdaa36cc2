"""How documents become samples of ``seq_len`` tokens.

The tokens of all documents lie one after another in one stream; a sample is a list of pieces of
it. Every packing cuts the same way: a piece ends at the sample's end, and its last token has the
first token of the next piece as its target, so a cut loses no target. A document's last token is
no piece of its own: it has no target, and it is one.

Letters: S tokens a sample (``seq_len``).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Callable, Iterator, NamedTuple, Protocol

# What stands behind a piece: nothing that it must predict, its last target; or it is padding.
ENDS, CONTINUES, PADDING = 0, 1, 2

Emit = Callable[[list["Piece"]], None]


class Piece(NamedTuple):
    """``length`` tokens of the stream from ``start``, a document of its own for attention."""

    start: int
    length: int
    kind: int = ENDS

    @property
    def num_targets(self) -> int:
        return {ENDS: self.length - 1, CONTINUES: self.length, PADDING: 0}[self.kind]


def cut(start: int, length: int, seq_len: int) -> Iterator[Piece]:
    """The pieces, of at most ``seq_len`` tokens, of ``length`` tokens from ``start``."""
    last = start + length - 1
    for at in range(start, max(last, start + 1), seq_len):
        size = min(seq_len, last + 1 - at)
        yield Piece(at, size, CONTINUES if at + size <= last else ENDS)


class Packer(Protocol):
    """``add`` each document, then ``finish``; samples go to ``emit`` as they fill."""

    def add(self, start: int, length: int) -> None: ...

    def finish(self) -> None: ...


class OneEach:
    """``"none"``: one piece a sample."""

    def __init__(self, seq_len: int, emit: Emit) -> None:
        self.seq_len, self.emit = seq_len, emit

    def add(self, start: int, length: int) -> None:
        for piece in cut(start, length, self.seq_len):
            self.emit([piece])

    def finish(self) -> None:
        pass


class Stream(OneEach):
    """``"concat"``: the stream, cut every S tokens without regard to documents."""

    def __init__(self, seq_len: int, emit: Emit) -> None:
        super().__init__(seq_len, emit)
        self.length = 0

    def add(self, start: int, length: int) -> None:
        self.length = start + length

    def finish(self) -> None:
        super().add(0, self.length)


class BestFit:
    """``"documents"``: a piece goes where it leaves the least room, among the last samples begun.

    At most ``OPEN_SAMPLES`` are open, so memory is flat and a sample holds documents that stood
    near each other. When there are more, the fullest is closed.
    """

    OPEN_SAMPLES = 1024

    def __init__(self, seq_len: int, emit: Emit) -> None:
        self.seq_len, self.emit = seq_len, emit
        self.open: list[tuple[int, int]] = []  # (room left, sample), sorted
        self.samples: dict[int, list[Piece]] = {}
        self.begun = 0

    def add(self, start: int, length: int) -> None:
        for piece in cut(start, length, self.seq_len):
            self._place(piece)

    def _place(self, piece: Piece) -> None:
        best = bisect_left(self.open, (piece.length, 0))
        if best < len(self.open):
            room, sample = self.open.pop(best)
        else:
            room, sample = self.seq_len, self.begun
            self.samples[sample] = []
            self.begun += 1
        self.samples[sample].append(piece)
        if room == piece.length:
            self.emit(self.samples.pop(sample))
        else:
            insort(self.open, (room - piece.length, sample))
        if len(self.open) > self.OPEN_SAMPLES:
            self.emit(self.samples.pop(self.open.pop(0)[1]))

    def finish(self) -> None:
        for pieces in self.samples.values():
            self.emit(pieces)
        self.samples.clear()
        self.open.clear()


PACKERS: dict[str, Callable[..., Packer]] = {
    "documents": BestFit,
    "concat": Stream,
    "none": OneEach,
}

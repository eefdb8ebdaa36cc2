"""Documents to token ids, in batches, with the tokenizer's own threads.

A document longer than ``SEGMENT_CHARS`` is encoded in segments, so that memory stays flat however
long it is. It is cut before a single space or behind a single line end: pre-tokenizers cut there
too, and the ids are those of the whole document.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Iterable, Iterator

import numpy as np
from transformers import PreTrainedTokenizerFast

from ds4d.data.errors import DataError
from ds4d.data.sources import Document

SEGMENT_CHARS = 1 << 17  # a text being encoded takes hundreds of bytes of memory a character
BATCH_CHARS = 1 << 21

_SAFE_CUT = re.compile(r"\S(?= \S)|\S\n(?=\S)")


@dataclass(frozen=True)
class Segment:
    """``part`` counts the segments of one document from 0."""

    where: str
    text: str
    part: int
    last: bool


@dataclass(frozen=True)
class Encoded:
    """The ids of a segment; of an empty document one ``last`` segment without ids."""

    where: str
    ids: np.ndarray
    last: bool


def segments(documents: Iterable[Document]) -> Iterator[Segment]:
    for document in documents:
        held, part = "", 0
        for block in document.blocks:
            held += block
            while len(held) > SEGMENT_CHARS:
                cut = _SAFE_CUT.search(held, SEGMENT_CHARS // 2)
                if cut is None and len(held) < 4 * SEGMENT_CHARS:
                    break  # a very long line: see whether it ends soon
                end = cut.end() if cut else SEGMENT_CHARS
                yield Segment(document.where, held[:end], part, last=False)
                held, part = held[end:], part + 1
        yield Segment(document.where, held, part, last=True)


def encode(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerFast, *, append_eos: bool
) -> Iterator[Encoded]:
    """The ids of each document, with what the tokenizer itself puts around a text (a BOS, say).

    Args:
        append_eos: end each document with the tokenizer's EOS, unless it already does.
    """
    before, after = _surroundings(tokenizer)
    if append_eos and tokenizer.eos_token_id is None:
        raise DataError(
            "ds4d.data.append_eos: the tokenizer has no eos token; set append_eos to false"
        )
    if append_eos and after[-1:] != [tokenizer.eos_token_id]:
        after = [*after, tokenizer.eos_token_id]
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    for batch in _batches(segments(documents)):
        texts = [segment.text for segment in batch]
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        for segment, encoding in zip(batch, encodings):
            ids = encoding.ids
            if ids or segment.part:  # an empty document stays without any
                ids = (before if segment.part == 0 else []) + ids + (after if segment.last else [])
            yield Encoded(segment.where, np.array(ids, dtype=np.int64), segment.last)


def _surroundings(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """The ids that the tokenizer puts before and behind every text."""
    backend = tokenizer.backend_tokenizer
    bare = backend.encode("a", add_special_tokens=False).ids
    dressed = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare:
            return dressed[:start], dressed[start + len(bare) :]
    raise DataError("ds4d.data.tokenizer: its post-processor changes more than the ends of a text")


def _batches(stream: Iterable[Segment]) -> Iterator[list[Segment]]:
    batch, chars = [], 0
    for segment in stream:
        batch.append(segment)
        chars += len(segment.text)
        if chars >= BATCH_CHARS or len(batch) >= 10_000:
            yield batch
            batch, chars = [], 0
    if batch:
        yield batch

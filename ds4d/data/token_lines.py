"""Samples that come as token ids: JSON lines, one line one sample, taken as they are.

``input_ids``; optionally ``labels`` (aligned with the ids, as everywhere in Hugging Face: they are
shifted here; -100 is not counted), ``position_ids`` and ``document_ids`` (a run of equal ids is a
document; -1 is padding). All lines have the same fields. A line shorter than ``seq_len`` is padded.

Letters: S tokens a sample (``seq_len``), n <= S tokens of a line.
"""

from __future__ import annotations

from contextlib import closing
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from ds4d.attention.documents import PADDING as PADDING_DOCUMENT
from ds4d.data.batch import IGNORE
from ds4d.data.corpus import Corpus
from ds4d.data.errors import DataError
from ds4d.data.pack import ENDS, PADDING, Piece
from ds4d.data.progress import Bar
from ds4d.data.store import StoreWriter, token_dtype

COLUMNS = {"input_ids": "tokens", "labels": "labels", "position_ids": "positions"}
FIELDS = [*COLUMNS, "document_ids"]


def build_token_store(
    folder: Path, corpus: Corpus, seq_len: int, *, vocab_size: int, bar: Bar
) -> None:
    """Write a store of the samples of ``corpus`` into ``folder``."""
    lines = corpus.source.objects(*corpus.bounds)
    first_where, first = next(lines)
    fields = _check_fields(first_where, first)
    dtypes = {"tokens": token_dtype(vocab_size), "labels": np.int32, "positions": np.int32}
    columns = {COLUMNS[name]: dtypes[COLUMNS[name]] for name in fields if name in COLUMNS}
    writer = StoreWriter(folder, seq_len, columns)
    documents = 0
    with closing(writer):
        for where, value in chain([(first_where, first)], lines):
            if _check_fields(where, value) != fields:
                raise DataError(
                    f"{where}: has the fields {_named(value)}, but the first line ({first_where}) "
                    f"has {fields}; all lines must have the same"
                )
            sample = _check_sample(where, value, seq_len, vocab_size)
            pieces = _pieces(where, sample, writer.num_tokens)
            num_targets = _count_targets(sample, pieces, writer.num_tokens)
            writer.append(**{COLUMNS[name]: sample[name] for name in fields if name in COLUMNS})
            writer.sample(pieces, num_targets)
            documents += sum(piece.kind == ENDS for piece in pieces)
            bar.update(writer.num_samples, f"{writer.num_tokens:,} tokens")
        tokens = writer.num_tokens
        counts = {"documents": documents, "tokens": tokens, "kept_tokens": tokens}
        writer.finish({**counts, "truncated_tokens": 0, "dropped_tokens": 0})


def _named(value: dict[str, Any]) -> list[str]:
    return [name for name in FIELDS if name in value]


def _check_fields(where: str, value: dict[str, Any]) -> list[str]:
    unknown = sorted(value.keys() - set(FIELDS))
    if unknown:
        raise DataError(f"{where}: unknown field '{unknown[0]}'; a line may have {FIELDS}")
    if "input_ids" not in value:
        raise DataError(f"{where}: has no field 'input_ids', only {sorted(value)}")
    return _named(value)


def _check_sample(
    where: str, value: dict[str, Any], seq_len: int, vocab_size: int
) -> dict[str, np.ndarray]:
    """The fields of a line as int64 [n]."""
    length = len(value["input_ids"]) if isinstance(value["input_ids"], list) else 0
    for name, numbers in value.items():
        if not isinstance(numbers, list) or set(map(type, numbers)) != {int}:
            raise DataError(f"{where}: {name} must be a list of whole numbers, and not empty")
        if len(numbers) != length:
            raise DataError(f"{where}: {length} input_ids, but {len(numbers)} {name}")
    if length > seq_len:
        raise DataError(
            f"{where}: {length:,} tokens are more than ds4d.data.seq_len, {seq_len:,}; samples of "
            f"type 'tokens' are never cut: raise it, or cut the line"
        )
    _check_range(where, "input_ids", value, 0, vocab_size, "the model's vocabulary")
    _check_range(where, "labels", value, 0, vocab_size, "the model's vocabulary", or_else=IGNORE)
    _check_range(where, "position_ids", value, 0, 1 << 31, "the positions there can be")
    _check_range(where, "document_ids", value, PADDING_DOCUMENT, 1 << 63, "the ids there can be")
    return {name: np.array(numbers, dtype=np.int64) for name, numbers in value.items()}


def _check_range(
    where: str, name: str, value: dict, low: int, stop: int, what: str, or_else: int | None = None
) -> None:
    numbers = value.get(name, ())
    if all(low <= number < stop or number == or_else for number in numbers):
        return
    at = next(i for i, n in enumerate(numbers) if not (low <= n < stop or n == or_else))
    also = f" or {or_else}" if or_else is not None else ""
    raise DataError(
        f"{where}: {name}[{at}] is {numbers[at]}, outside {what} ({low} to {stop - 1}{also})"
    )


def _pieces(where: str, sample: dict[str, np.ndarray], start: int) -> list[Piece]:
    """One piece a run of ``document_ids``; without them the line is one document."""
    length = len(sample["input_ids"])
    ids = sample.get("document_ids")
    if ids is None:
        return [Piece(start, length, ENDS)]
    firsts = [0, *(np.flatnonzero(np.diff(ids)) + 1).tolist()]
    seen: set[int] = set()
    pieces = []
    for first, end in zip(firsts, [*firsts[1:], length]):
        document = int(ids[first])
        if document in seen:
            raise DataError(
                f"{where}: document_ids[{first}] is {document} again, after other documents; the "
                f"tokens of a document must stand together"
            )
        if document != PADDING_DOCUMENT:
            seen.add(document)
        kind = PADDING if document == PADDING_DOCUMENT else ENDS
        pieces.append(Piece(start + first, end - first, kind))
    return pieces


def _count_targets(sample: dict[str, np.ndarray], pieces: list[Piece], start: int) -> int:
    labels = sample.get("labels", sample["input_ids"])
    ends = ((p.start - start + 1, p.start - start + p.length) for p in pieces if p.kind == ENDS)
    return sum(int((labels[first:end] != IGNORE).sum()) for first, end in ends)

"""Samples on disk, memory-mapped.

A store is a folder: ``tokens.bin`` (the stream of all tokens), ``pieces.bin`` (start, length, kind:
see ``pack.py``), ``samples.bin`` (where each sample's pieces end) and, for samples that came ready
made, ``labels.bin`` and ``positions.bin`` beside the tokens. ``store.json`` describes it and holds
the report. A sample is put together when it is asked for, so every packing has this one format,
and an epoch reads about 2 bytes a token.

Letters: S tokens a sample (``seq_len``).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Iterable, Mapping, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from ds4d.attention.documents import PADDING as PADDING_DOCUMENT
from ds4d.data.batch import IGNORE
from ds4d.data.errors import CacheError
from ds4d.data.pack import CONTINUES, PADDING, Piece

PIECE = np.dtype([("start", "<i8"), ("length", "<i4"), ("kind", "<i4")])
SAMPLE = np.dtype("<i8")
BUFFERED_SAMPLES = 1 << 14


class Sample(NamedTuple):
    """int64 [S] each. ``document_ids`` is None for one document (or stretch of text) that fills S.

    Padding, on the right, has the token id 0, positions of its own, the document id -1 and no
    target.
    """

    input_ids: torch.Tensor
    targets: torch.Tensor
    position_ids: torch.Tensor
    document_ids: torch.Tensor | None


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class StoreWriter:
    """Append tokens, say which pieces of them are samples, ``finish``; nothing is kept in memory.

    Args:
        columns: dtype of ``"tokens"`` and, where samples bring their own, ``"labels"`` and
            ``"positions"``.
    """

    def __init__(self, folder: Path, seq_len: int, columns: Mapping[str, np.dtype]) -> None:
        self.folder, self.seq_len = folder, seq_len
        self.columns = {name: np.dtype(dtype) for name, dtype in columns.items()}
        self.num_tokens = self.num_pieces = self.num_samples = 0
        self.sample_tokens = self.num_targets = self.samples_without_target = 0
        self._files = {
            name: open(folder / f"{name}.bin", "wb") for name in [*columns, "pieces", "samples"]
        }
        self._pieces: list[Piece] = []
        self._ends: list[int] = []

    def append(self, **values: np.ndarray) -> None:
        """Add tokens (and their labels, positions) to the stream."""
        for name, dtype in self.columns.items():
            self._files[name].write(values[name].astype(dtype).tobytes())
        self.num_tokens += len(values["tokens"])

    def rewind(self, num_tokens: int) -> None:
        """Forget all tokens from ``num_tokens`` on."""
        for name, dtype in self.columns.items():
            self._files[name].seek(num_tokens * dtype.itemsize)
            self._files[name].truncate()
        self.num_tokens = num_tokens

    def sample(self, pieces: Iterable[Piece], num_targets: int | None = None) -> None:
        """Add a sample. ``num_targets``: of its valid targets, where labels decide."""
        before = len(self._pieces)
        self._pieces.extend(pieces)
        added = self._pieces[before:]
        if num_targets is None:
            num_targets = sum(piece.num_targets for piece in added)
        self.num_pieces += len(added)
        self.num_samples += 1
        self.sample_tokens += sum(piece.length for piece in added if piece.kind != PADDING)
        self.num_targets += num_targets
        self.samples_without_target += num_targets == 0
        self._ends.append(self.num_pieces)
        if len(self._ends) >= BUFFERED_SAMPLES:
            self._write_samples()

    def _write_samples(self) -> None:
        self._files["pieces"].write(np.array(self._pieces, dtype=PIECE).tobytes())
        self._files["samples"].write(np.array(self._ends, dtype=SAMPLE).tobytes())
        self._pieces.clear()
        self._ends.clear()

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def finish(self, report: Mapping[str, Any]) -> None:
        """Write the rest and the description; ``report`` gets the counts of samples added."""
        self._write_samples()
        self.close()
        room = self.num_samples * self.seq_len
        counts = {
            "samples": self.num_samples,
            "target_tokens": self.num_targets,
            "samples_without_target": self.samples_without_target,
            "padding_tokens": room - self.sample_tokens,
            "padding_share": 1 - self.sample_tokens / room if room else 0.0,
        }
        description = {
            "seq_len": self.seq_len,
            "columns": {name: dtype.str for name, dtype in self.columns.items()},
            "num_tokens": self.num_tokens,
            "num_pieces": self.num_pieces,
            "num_samples": self.num_samples,
            "report": {**report, **counts},
        }
        (self.folder / "store.json").write_text(json.dumps(description, indent=2))


class SampleStore(Dataset):
    """``len(store)`` samples; ``store[i]`` is a ``Sample``. Travels to workers as its path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        description = json.loads((folder / "store.json").read_text())
        self.seq_len: int = description["seq_len"]
        self.report: dict[str, Any] = description["report"]
        num_tokens = description["num_tokens"]
        columns = {
            name: _map(folder, name, np.dtype(dtype), num_tokens)
            for name, dtype in description["columns"].items()
        }
        self._tokens = columns["tokens"]
        self._labels = columns.get("labels", self._tokens)
        self._positions = columns.get("positions")
        self._pieces = _map(folder, "pieces", PIECE, description["num_pieces"])
        self._ends = _map(folder, "samples", SAMPLE, description["num_samples"])

    def __reduce__(self) -> tuple:
        return SampleStore, (self.folder,)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Sample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first = self._ends[index - 1] if index else 0
        pieces = self._pieces[first : self._ends[index]].tolist()
        input_ids = np.zeros(self.seq_len, dtype=np.int64)
        targets = np.full(self.seq_len, IGNORE, dtype=np.int64)
        position_ids = np.zeros(self.seq_len, dtype=np.int64)
        document_ids = np.full(self.seq_len, PADDING_DOCUMENT, dtype=np.int64)
        at = 0
        for document, (start, length, kind) in enumerate(pieces):
            here = slice(at, at + length)
            input_ids[here] = self._tokens[start : start + length]
            position_ids[here] = (
                np.arange(length)
                if self._positions is None
                else self._positions[start : start + length]
            )
            if kind != PADDING:
                document_ids[here] = document
                following = self._labels[start + 1 : start + length + (kind == CONTINUES)]
                targets[at : at + len(following)] = following
            at += length
        # counting up: transformers takes every position that does not for a document of its own
        position_ids[at:] = np.arange(self.seq_len - at)
        alone = len(pieces) == 1 and at == self.seq_len and kind != PADDING
        return Sample(
            torch.from_numpy(input_ids),
            torch.from_numpy(targets),
            torch.from_numpy(position_ids),
            None if alone else torch.from_numpy(document_ids),
        )


def _map(folder: Path, name: str, dtype: np.dtype, length: int) -> np.ndarray:
    path = folder / f"{name}.bin"
    size = path.stat().st_size if path.exists() else 0
    if size != length * dtype.itemsize:
        raise CacheError(
            f"{path}: has {size} bytes, not {length * dtype.itemsize}; "
            f"delete {folder} and it will be made anew"
        )
    return np.memmap(path, dtype=dtype, mode="r", shape=(length,))

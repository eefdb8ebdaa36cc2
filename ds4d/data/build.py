"""From a corpus of text to a store of samples: tokenise, cut or drop what is too long, pack, count.

Nothing is lost without a count: ``tokens == kept_tokens + truncated_tokens + dropped_tokens``.

Letters: S tokens a sample (``seq_len``).
"""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from ds4d.config.types import DataConfig
from ds4d.data.corpus import Corpus
from ds4d.data.errors import DataError
from ds4d.data.pack import PACKERS
from ds4d.data.progress import Bar
from ds4d.data.store import StoreWriter, token_dtype
from ds4d.data.tokenise import Encoded, encode

KEPT_OF_LONG = {  # long_documents -> tokens kept of a document of more than S tokens
    "split": lambda length, seq_len: length,
    "truncate": lambda length, seq_len: seq_len,
    "drop": lambda length, seq_len: 0,
}


def build_text_store(
    folder: Path,
    corpus: Corpus,
    data: DataConfig,
    tokenizer: PreTrainedTokenizerFast,
    *,
    vocab_size: int,
    bar: Bar,
) -> None:
    """Write a store of ``corpus`` into ``folder``, holding one batch of text at a time."""
    writer = StoreWriter(folder, data.seq_len, {"tokens": token_dtype(vocab_size)})
    packer = PACKERS[data.packing](data.seq_len, writer.sample)
    counts = Counter(
        documents=0, empty_documents=0, long_documents=0,
        tokens=0, kept_tokens=0, truncated_tokens=0, dropped_tokens=0,
    )  # fmt: skip
    start = 0
    with closing(writer):
        for part in encode(corpus.documents(), tokenizer, append_eos=data.append_eos):
            _check_ids(part, vocab_size)
            writer.append(tokens=part.ids)
            if not part.last:
                continue
            length = writer.num_tokens - start
            kept = _kept(part.where, length, data)
            writer.rewind(start + kept) if kept < length else None
            if kept:
                packer.add(start, kept)
            start += kept
            counts["documents"] += 1
            counts["empty_documents"] += not length
            counts["long_documents"] += length > data.seq_len
            counts["tokens"] += length
            counts["kept_tokens"] += kept
            counts["truncated_tokens" if kept else "dropped_tokens"] += length - kept
            bar.update(counts["documents"], f"{counts['tokens']:,} tokens")
        packer.finish()
        if not writer.num_samples:
            raise DataError(_nothing_left(corpus, counts))
        writer.finish(counts)


def _kept(where: str, length: int, data: DataConfig) -> int:
    """How many tokens of a document are kept."""
    if length <= data.seq_len or data.packing == "concat":
        return length
    if data.long_documents == "error":
        raise DataError(
            f"{where}: {length:,} tokens are more than ds4d.data.seq_len, {data.seq_len:,}; "
            f"set ds4d.data.long_documents to 'split', 'truncate' or 'drop'"
        )
    return KEPT_OF_LONG[data.long_documents](length, data.seq_len)


def _check_ids(part: Encoded, vocab_size: int) -> None:
    if len(part.ids) and part.ids.max() >= vocab_size:
        raise DataError(
            f"{part.where}: the tokenizer gives the id {part.ids.max()}, outside the model's "
            f"vocabulary of {vocab_size}"
        )


def _nothing_left(corpus: Corpus, counts: Counter) -> str:
    if counts["empty_documents"] == counts["documents"]:
        named = ", ".join(str(path) for path in corpus.source.files[:3])
        return f"{corpus.key}: is empty: no text in {counts['documents']} documents ({named})"
    return (
        f"{corpus.key}: nothing is left: all {counts['long_documents']} documents that are not "
        f"empty are longer than ds4d.data.seq_len, and ds4d.data.long_documents is 'drop'"
    )

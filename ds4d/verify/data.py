"""What is trained on: the first samples of the file's own data, made short, or random tokens; as
JSON lines that ds4d reads like any ``tokens`` and the plain process reads by itself.

A line has ``input_ids``, ``labels`` (as Hugging Face has them: not shifted), ``position_ids`` and
``document_ids``. Ids are taken modulo the small vocabulary.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ds4d.attention.documents import PADDING
from ds4d.config.types import DataConfig, ModelConfig, RunConfig
from ds4d.data.batch import IGNORE
from ds4d.data.files import find_files
from ds4d.data.prepare import prepare
from ds4d.data.store import Sample

MOST_BYTES = 1 << 24  # of files that are read, and a tokenizer trained on, without a long wait
STDLIB_SLICE = ":40"
DOCUMENTS = 4  # of a packed random row, at most
KEY = "ds4d.data.train"

Line = dict[str, list[int]]


def write_samples(
    run: RunConfig, file: Path, *, length: int, count: int, vocabulary: int, packed: bool
) -> str:
    """Args:
        run: of the file; its batch is the small one, for which there must be samples.
        length: tokens of a sample, at most.
        count: of samples.
        packed: random rows hold several documents.

    Returns:
        what they are, for people.
    """
    reason = _why_not_own(run.data, run.model)
    if reason is None:
        lines = list(_own(run, length, count, vocabulary))
        source = f"samples of {KEY} ({run.data.train.type}), {length} tokens each"
    else:
        lines = list(_random(run, length, count, vocabulary, packed))
        source = f"random tokens: {reason}"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return source


def _why_not_own(data: DataConfig, model: ModelConfig) -> str | None:
    """Why the file's own data are not used; None: they are here, and soon read."""
    source = data.train
    if source.type == "hf":
        return f"{KEY} is a data set that may be large or elsewhere"
    if source.type == "python_stdlib":
        size = 0
    else:
        size = sum(path.stat().st_size for path in find_files(f"{KEY}.path", source.path))
    if size > MOST_BYTES:
        return f"{KEY} has {size / 2**20:,.0f} MiB, which would take long to read"
    tokenizer = data.tokenizer.path or (None if data.tokenizer.vocab_size else model.path)
    if source.type != "tokens" and tokenizer and not Path(tokenizer).expanduser().is_dir():
        return f"the tokenizer {tokenizer} is not on this machine"
    return None


def _own(run: RunConfig, length: int, count: int, vocabulary: int) -> Iterator[Line]:
    """Text is packed to the short length; samples of tokens, which are never packed, are cut."""
    source = run.data.train
    if source.type == "python_stdlib":
        source = replace(source, slice=STDLIB_SLICE)
    tokens = source.type == "tokens"
    with tempfile.TemporaryDirectory(prefix="ds4d-data-") as cache:
        data = replace(
            run.data,
            train=source,
            seq_len=run.data.seq_len if tokens else length,
            long_documents="split",
            cache_dir=cache,
        )
        store = prepare(run.replace(data=data), sources=("train",), progress=False).train
        for index in range(count):
            yield _line(store[index % len(store)], length, vocabulary)


def _line(sample: Sample, length: int, vocabulary: int) -> Line:
    ids, targets, positions = (x[:length].tolist() for x in sample[:3])
    documents = [0] * length if sample.document_ids is None else sample.document_ids.tolist()
    labels = [
        target % vocabulary
        if i and target != IGNORE and documents[i] == documents[i - 1]
        else IGNORE
        for i, target in enumerate([IGNORE, *targets[: len(ids) - 1]])
    ]
    return _without_padding(
        input_ids=[token % vocabulary for token in ids],
        labels=labels,
        position_ids=positions,
        document_ids=documents[: len(ids)],
    )


def _without_padding(**columns: list[int]) -> Line:
    stop = len(columns["document_ids"])
    while stop > 1 and columns["document_ids"][stop - 1] == PADDING:
        stop -= 1
    return {name: values[:stop] for name, values in columns.items()}


def _random(
    run: RunConfig, length: int, count: int, vocabulary: int, packed: bool
) -> Iterator[Line]:
    """With lengths that differ, where those of the file's samples would."""
    draw = random.Random(run.training.seed)
    for _ in range(count):
        lengths = [length]
        if packed:
            ends = draw.sample(range(1, length), min(draw.randrange(DOCUMENTS), length - 1))
            bounds = [0, *sorted(ends), length]
            lengths = [stop - start for start, stop in zip(bounds, bounds[1:])]
        elif run.data.packing != "concat":
            lengths = [draw.randint(max(2, length // 4), length)]
        ids = [draw.randrange(vocabulary) for _ in range(sum(lengths))]
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        yield {
            "input_ids": ids,
            "labels": [IGNORE if i in starts else token for i, token in enumerate(ids)],
            "position_ids": [i for n in lengths for i in range(n)],
            "document_ids": [d for d, n in enumerate(lengths) for _ in range(n)],
        }

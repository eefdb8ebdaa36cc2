"""What the data tests share: small configs and stores."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Sequence

from ds4d.config.types import (
    BatchSizes,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    SourceConfig,
    TokenizerConfig,
)
from ds4d.data.prepare import PreparedData, prepare
from ds4d.data.store import SampleStore

VOCAB = 300


def run_config(
    cache: Path,
    train: SourceConfig,
    *,
    seq_len: int = 32,
    batch: int = 1,
    vocab: int | str = "auto",
    bpe: int | None = VOCAB,
    **data: Any,
) -> RunConfig:
    return RunConfig(
        model=ModelConfig(config={"model_type": "llama", "vocab_size": vocab}),
        data=DataConfig(
            seq_len=seq_len,
            train=train,
            tokenizer=TokenizerConfig(vocab_size=bpe),
            cache_dir=str(cache),
            **data,
        ),
        parallel=ParallelConfig(),
        batch=BatchSizes(train=batch, micro=batch, accumulation=1),
        deepspeed={},
    )


def write_lines(path: Path, lines: Sequence[dict]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def prepare_tokens(
    tmp_path: Path, lines: Sequence[dict], *, seq_len: int = 8, vocab: int = 64, batch: int = 1
) -> PreparedData:
    path = write_lines(tmp_path / "tokens.jsonl", lines)
    source = SourceConfig(type="tokens", path=str(path))
    config = run_config(
        tmp_path / "cache", source, seq_len=seq_len, vocab=vocab, bpe=None, batch=batch
    )
    return prepare(config, progress=False)


def numbered_store(tmp_path: Path, count: int) -> SampleStore:
    """``count`` samples of 4 tokens; sample i has the ids 4i, 4i + 1, ..."""
    lines = [{"input_ids": list(range(4 * i, 4 * i + 4))} for i in range(count)]
    return prepare_tokens(tmp_path, lines, seq_len=4, vocab=4 * count).train


def prose(words: int, seed: int) -> str:
    chosen = random.Random(seed)
    some = ["the", "model", "reads", "a", "line", "of", "text", "and\n", "then", "forgets", "42;"]
    return " ".join(chosen.choice(some) for _ in range(words))

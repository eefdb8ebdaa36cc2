"""The frozen dataclasses that the rest of ds4d sees: the ``"ds4d"`` block and what follows from it.

Every field here has a twin in ``schema.json`` (type, default, description for editors); a unit
test compares the two. ``load.py`` makes these from a file, ``checks.py`` judges them. Nothing
after ``load`` reads the JSON or the environment.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Mapping


@dataclass(frozen=True)
class ModelConfig:
    """Which model. Exactly one of ``path`` (weights are loaded) and ``config`` (from scratch)."""

    path: str | None = None
    config: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class SourceConfig:
    """Where documents come from.

    ``path`` is a file, a glob or a list of them (text, jsonl, parquet, tokens), or a folder or
    hub id (hf). ``slice`` takes a part of the documents, as ``"95%:"`` or ``"100:200"``.
    """

    type: Literal["text", "jsonl", "parquet", "hf", "tokens", "python_stdlib"]
    path: str | tuple[str, ...] | None = None
    field: str = "text"
    name: str | None = None
    split: str = "train"
    slice: str | None = None


@dataclass(frozen=True)
class TokenizerConfig:
    """``path``: a tokenizer folder or hub id (None: the model's). ``vocab_size``: train a
    byte-level BPE of that size once, on the training source, instead."""

    path: str | None = None
    vocab_size: int | None = None


@dataclass(frozen=True)
class DataConfig:
    seq_len: int
    train: SourceConfig
    eval: SourceConfig | None = None
    packing: Literal["documents", "concat", "none"] = "documents"
    long_documents: Literal["split", "truncate", "drop", "error"] = "split"
    append_eos: bool = True
    shuffle: bool = True
    tokenizer: TokenizerConfig = TokenizerConfig()
    cache_dir: str | None = None
    num_workers: int = 0


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of the four axes, all resolved: ``pp * dp * cp * tp`` is the world size."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1
    sequence_parallel: bool = False

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp


@dataclass(frozen=True)
class PipelineConfig:
    schedule: Literal["gpipe", "1f1b", "interleaved", "dualpipev", "zb-h1"] = "1f1b"
    chunks: int = 1
    split: tuple[int | str, ...] | None = None


@dataclass(frozen=True)
class ContextConfig:
    method: Literal["ring", "ulysses", "hybrid"] = "ring"
    ulysses_size: int | None = None


@dataclass(frozen=True)
class TrainingConfig:
    """``steps`` optimizer steps, or ``epochs`` passes over the data when ``steps`` is None."""

    steps: int | None = None
    epochs: float | None = None
    seed: int = 42
    decay_all: bool = False
    eval_every: int | None = None
    max_skipped_steps: int = 10
    on_sigterm: Literal["save", "stop"] = "save"
    process_group_timeout_seconds: float = 1800.0


@dataclass(frozen=True)
class CheckpointConfig:
    """``every`` None: no checkpoint but the last one (``final``)."""

    every: int | None = None
    keep: int | None = None
    final: bool = True


@dataclass(frozen=True)
class MonitorConfig:
    plot: bool = True
    peak_tflops: float | None = None


@dataclass(frozen=True)
class BatchSizes:
    """In sequences. ``train == micro * accumulation * dp``; tp, pp and cp do not multiply it."""

    train: int
    micro: int
    accumulation: int


@dataclass(frozen=True)
class PrecisionConfig:
    """Resolved from DeepSpeed's ``bf16``/``fp16``/``data_types`` keys."""

    param_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    grad_accum_dtype: Literal["fp32", "bf16", "fp16"] = "fp32"


@dataclass(frozen=True)
class RunConfig:
    """A whole file, checked and resolved.

    Attributes:
        deepspeed: the DeepSpeed keys of the file as resolved (no ``"auto"`` left, no ``"ds4d"``);
            ``deepspeed_json.to_deepspeed`` makes from it the dict that DeepSpeed gets.
        batch: resolved batch words.
        zero_stage: ``zero_optimization.stage``, 0 when absent.
        recompute: activation checkpointing.
        path: the file it came from, None for a dict.
        notes: things the user should hear once (options without effect, and the like).
    """

    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig
    batch: BatchSizes
    deepspeed: Mapping[str, Any]
    pipeline: PipelineConfig = PipelineConfig()
    context: ContextConfig = ContextConfig()
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    monitor: MonitorConfig = MonitorConfig()
    precision: PrecisionConfig = PrecisionConfig()
    recompute: Literal["none", "selective", "full"] = "none"
    zero_stage: int = 0
    path: Path | None = field(default=None, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    def replace(self, **changes: Any) -> "RunConfig":
        return dataclasses.replace(self, **changes)

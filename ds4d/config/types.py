"""The frozen dataclasses that the rest of ds4d sees: the ``"ds4d"`` block and what follows from it.

``schema.json`` is made from these classes (name, type, default, and the text under each field,
which editors show): after a change here run ``python -m ds4d.config.make_schema``. ``load.py``
makes the objects from a file, ``checks.py`` judges the file. Nothing after ``load`` reads the JSON
or the environment.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Mapping

# A pair is a JSON Schema word and its value, merged into the field's schema.
Count = Annotated[int, ("minimum", 1)]
NonNegative = Annotated[int, ("minimum", 0)]
Positive = Annotated[float, ("exclusiveMinimum", 0)]
_BOUND = r"\s*(-?\d+|\d+(\.\d+)?\s*%)?\s*"
Slice = Annotated[str, ("pattern", f"^{_BOUND}:{_BOUND}$"), ("examples", ("95%:", "100:200"))]


def key_of(field: str) -> str:
    """The key in the file: ``async_`` stands for ``async``, which Python keeps for itself."""
    return field.removesuffix("_")


@dataclass(frozen=True)
class ModelConfig:
    """Which model. Exactly one of ``path`` (weights are loaded) and ``config`` (from scratch)."""

    path: str | None = None
    """Folder or hub id of a Hugging Face causal language model, or a checkpoint or run folder of
    ds4d (its newest checkpoint); its weights are loaded."""

    config: Mapping[str, Any] | None = None
    """Hugging Face config fields, with ``model_type``; the weights start from scratch.
    ``vocab_size`` may be "auto": the size of the tokenizer."""


@dataclass(frozen=True)
class SourceConfig:
    """Where documents come from."""

    type: Literal["text", "jsonl", "parquet", "hf", "tokens", "python_stdlib"]
    """Kind of source. "text": each file is a document. "jsonl", "parquet", "hf": each row is a
    document. "tokens": JSON lines with ``input_ids``, taken as they are, one line = one sample.
    "python_stdlib": the sources of the running Python's standard library."""

    path: str | tuple[str, ...] | None = None
    """A file, a glob or a list of them (text, jsonl, parquet, tokens); a folder or hub id (hf)."""

    field: str = "text"
    """Which field of a row holds the text (jsonl, parquet, hf)."""

    name: str | None = None
    """Configuration name of a data set on the hub (hf)."""

    split: str = "train"
    """Split of a data set on the hub (hf)."""

    slice: Slice | None = None
    """A part of the documents, in Python's slice form; numbers count documents, or per cent."""


@dataclass(frozen=True)
class TokenizerConfig:
    """Which tokenizer; absent: the model's own."""

    path: str | None = None
    """Tokenizer folder or hub id."""

    vocab_size: Annotated[int, ("minimum", 258)] | None = None
    """Train a byte-level BPE of this size, once, on the training source. At least the 256 bytes and
    an end-of-text token."""


@dataclass(frozen=True)
class DataConfig:
    """What the model reads, and how it is cut into samples."""

    seq_len: Annotated[int, ("minimum", 2)]
    """Tokens in one sample."""

    train: SourceConfig
    """The training source."""

    eval: SourceConfig | None = None
    """A held-out source, evaluated every ``training.eval_every`` steps."""

    packing: Literal["documents", "concat", "none"] = "documents"
    """"documents": several documents in a sample, positions restart, no attention across. "concat":
    one stream of tokens, cut every ``seq_len``. "none": one document a sample, padded."""

    long_documents: Literal["split", "truncate", "drop", "error"] = "split"
    """What happens to a document longer than ``seq_len``; "split" loses no text."""

    append_eos: bool = True
    """End each document with the tokenizer's end-of-text token."""

    shuffle: bool = True
    """Visit the samples in an order drawn from seed and epoch; false: in the source's order."""

    tokenizer: TokenizerConfig = TokenizerConfig()
    """Which tokenizer; absent: the model's own."""

    cache_dir: str | None = None
    """Where tokenised data is kept; absent: ``~/.cache/ds4d``."""

    num_workers: NonNegative = 0
    """Processes that prepare batches beside the training; 0: none."""


@dataclass(frozen=True)
class ParallelConfig:
    """Degrees of the four axes, all resolved: ``pp * dp * cp * tp`` is the world size. "auto" for
    tp, pp or cp: the ranks that are left are dealt to these axes (then to dp) as evenly as the
    model and the batch allow, so that one file runs on any number of devices. What is best on a
    given cluster it does not know."""

    tp: Count = 1
    """Tensor parallel: ranks that share each layer's matrices; "auto": see ``parallel``."""

    pp: Count = 1
    """Pipeline parallel: ranks that hold consecutive layers, and pass micro-batches on; "auto": see
    ``parallel``. See ``pipeline``."""

    cp: Count = 1
    """Context parallel: ranks that share one sequence; "auto": see ``parallel``."""

    dp: Count = 1
    """Data parallel: ranks that read different samples. "auto": all ranks that are left."""

    sequence_parallel: bool = False
    """Megatron's: norms and residuals are split along the sequence over the tp ranks. "auto": where
    tp is more than 1 and the model allows it."""

    tp_overlap: bool = True
    """Let what tp sends travel while matrix products are computed. The numbers are the same
    without."""

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp


@dataclass(frozen=True)
class PipelineConfig:
    """How a pipeline (``parallel.pp`` > 1) runs."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "dualpipev", "zb-h1", "zbv"] = "1f1b"
    """Order of the forward and backward passes of the micro-batches. "gpipe": all forwards, then
    all backwards. "1f1b": in turn, so that few activations are held. "interleaved": 1f1b with
    several chunks on each rank; shorter idle times, more messages. "zb-h1": 1f1b that computes the
    gradients of weights while others wait. "dualpipev": two chunks on each rank, filled from both
    ends; needs 2 x pp micro-batches. "zbv": two such chunks, and gradients of weights while others
    wait; the shortest idle times."""

    chunks: Count = 1
    """Virtual stages on each rank: 2 or more for "interleaved" (chunk j of rank r is stage j x pp +
    r of the model), always 2 for "dualpipev" and "zbv" (r and 2 x pp - 1 - r), 1 for the others."""

    split: tuple[int | str, ...] | None = None
    """Layers of each of the pp x chunks stages, in the order of the model: numbers of layers, as in
    [7, 8, 8, 7], or the names of the layers at which the second stage and all later ones begin, as
    in ["model.layers.7", "model.layers.15"]. Absent: cut so that the most expensive stage costs as
    little as can be, embedding and head included."""


@dataclass(frozen=True)
class ContextConfig:
    """How a sequence is shared (``parallel.cp`` > 1)."""

    method: Literal["ring", "ulysses", "hybrid"] = "ring"
    """"ring": keys and values travel. "ulysses": all-to-all over heads. "hybrid": both."""

    ulysses_size: Count | None = None
    """Ranks of the all-to-all inside the ring ("hybrid"): those of one host, or fewer. Absent: all
    that divide ``parallel.cp`` and share the attention heads evenly, but for a ring of two."""

    exchange: Literal["p2p", "all_gather"] = "p2p"
    """How keys and values travel in the ring. "p2p": each to those who need them, beside the
    computation. "all_gather": all at once. "auto": all at once where a rank has few tokens."""


@dataclass(frozen=True)
class TrainingConfig:
    """How long and how. Exactly one of ``steps`` and ``epochs``."""

    steps: Count | None = None
    """Optimizer steps."""

    epochs: Positive | None = None
    """Passes over the training data."""

    seed: Annotated[int, ("minimum", 0), ("maximum", 2**32 - 1)] = 42
    """Initial weights, data order and dropout follow from it, whatever the layout."""

    label_smoothing: Annotated[float, ("minimum", 0), ("exclusiveMaximum", 1)] = 0.0
    """Probability that the training loss spreads evenly over the vocabulary. The reported ``loss``
    includes it, ``eval_loss`` does not."""

    z_loss: Annotated[float, ("minimum", 0)] = 0.0
    """Coefficient of the squared log-sum-exp of each token's logits, added to the training loss
    (1e-4 is common): keeps logits from drifting. The reported ``loss`` includes it, ``eval_loss``
    does not."""

    decay_all: bool = False
    """Apply weight decay to norms and biases too."""

    eval_every: Count | None = None
    """Steps between evaluations on ``data.eval``."""

    max_skipped_steps: Count = 10
    """Stop after so many steps in a row with a non-finite loss or gradient."""

    on_sigterm: Literal["save", "stop"] = "save"
    """On SIGTERM save a checkpoint and leave with 0, or just stop."""

    process_group_timeout_seconds: Positive = 1800.0
    """A collective that waits longer than this fails."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When checkpoints are written, and how many are kept."""

    every: Count | None = None
    """Steps between checkpoints; absent: only the last one (``final``)."""

    keep: Count | None = None
    """Keep the newest so many; absent: all."""

    final: bool = True
    """Write one after the last step."""

    async_: bool = False
    """Train on while a checkpoint is written: training waits only until each rank has copied its
    share of it to host memory, which stays taken (pinned, with GPUs): the size of a checkpoint
    divided by the number of ranks. The next save waits for the last, and so does the end."""


@dataclass(frozen=True)
class MonitorConfig:
    """What is shown, beside ``metrics.jsonl`` and DeepSpeed's own monitors."""

    plot: bool = True
    """Draw the loss curve as a PNG in the run folder (needs matplotlib)."""

    peak_tflops: Positive | None = None
    """Peak TFLOP/s of one device, for MFU; absent: known for common GPUs."""

    timeline_step: Count | None = None
    """A step, counted from 1, in which a pipeline (``parallel.pp`` > 1) is timed: ``timeline.svg``
    and ``timeline.json`` (for chrome://tracing and Perfetto) in the run folder show when each pass
    ran on each rank. Not the first, which warms up. Absent: none."""


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
        recompute: activation checkpointing.
        zero_stage: ``zero_optimization.stage``, 0 when absent.
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


# The sections of the "ds4d" block, in the order in which files show them.
SECTIONS: Mapping[str, type] = {
    "model": ModelConfig,
    "data": DataConfig,
    "parallel": ParallelConfig,
    "pipeline": PipelineConfig,
    "context": ContextConfig,
    "training": TrainingConfig,
    "checkpoint": CheckpointConfig,
    "monitor": MonitorConfig,
}

"""From a run to the small one that stands for it: a file, a Hugging Face folder and samples."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds4d import attention
from ds4d.config.batch import ACCUMULATION, MICRO, TRAIN
from ds4d.config.layout import ulysses_size
from ds4d.config.load import load
from ds4d.config.resolve import resolved
from ds4d.config.types import BatchSizes, RunConfig
from ds4d.model.build import DTYPES
from ds4d.model.config import hf_config
from ds4d.verify import layout
from ds4d.verify.data import write_samples
from ds4d.verify.model import save_random, small_model, without_noise

SAMPLES, MODEL, FILE = "samples.jsonl", "model", "small.json"
SOME_VOCABULARY = 2**16 + 1  # of "auto", which is known when the tokenizer is
# Of DeepSpeed's keys these say nothing about numbers; schedules begin with almost no learning rate.
LEFT_OUT = (
    "tensorboard", "wandb", "csv_monitor", "comet", "comms_logger", "flops_profiler",
    "wall_clock_breakdown", "memory_breakdown", "dump_state", "scheduler", ACCUMULATION,
)  # fmt: skip
AUTOCAST = {"bfloat16": "bf16", "float16": "fp16"}
LEAST_EPS = 1e-5  # of Adam and its kin: else they would make steps of gradients that are rounding
LOSS_SCALE_POWER = 8  # from where fp16 need not come down first


def computes_in(run: RunConfig) -> str:
    """The dtype of matrix products."""
    autocast = run.deepspeed.get("torch_autocast", {})
    if run.precision.param_dtype == "fp32" and autocast.get("enabled"):
        return AUTOCAST[autocast.get("dtype") or "bfloat16"]
    return run.precision.param_dtype


@dataclass(frozen=True)
class Small:
    """Attributes:
    folder: has ``FILE``, ``MODEL`` and ``SAMPLES``.
    samples: what they are.
    notes: what is not as in the file.
    """

    folder: Path
    samples: str
    notes: tuple[str, ...]

    def run(self, *overrides: str) -> RunConfig:
        """Checked like any file. A layout with fewer ranks has the same global batch."""
        return load(self.folder / FILE, overrides=overrides)


def make_small(
    run: RunConfig, folder: Path, *, steps: int, max_ranks: int, full: bool = False
) -> Small:
    """Args:
        folder: where everything is written.
        full: the model and the length of sequences stay as they are.

    Raises:
        ConfigError: it takes more than ``max_ranks`` ranks, or can't be made small in this layout.
        ValueError, DataError: the model's config or the data cannot be had.
    """
    parallel, notes = layout.fewer_ranks(run.parallel, max_ranks)
    context, more = layout.smaller_context(run.context, parallel)
    notes += more
    vocabulary = run.data.tokenizer.vocab_size or SOME_VOCABULARY
    config, noise = without_noise(hf_config(run.model, vocab_size=vocabulary))
    if noise:
        notes.append(f"{', '.join(noise)}: 0 here; each layout draws its own")
    split = run.pipeline.split if full else layout.small_split(run, parallel)
    length = run.data.seq_len
    if not full:
        layers = sum(split) if split else layout.num_stages(run, parallel)
        config = small_model(
            config,
            parallel,
            layers=layers if parallel.pp > 1 else None,
            ulysses=ulysses_size(parallel.cp, context),
        )
        length = layout.small_length(run, parallel, context)
    text = config.get_text_config(decoder=True)
    if parallel.pp != run.parallel.pp or split and sum(split) != text.num_hidden_layers:
        split = None
    save_random(config, folder / MODEL, dtype=DTYPES[run.precision.param_dtype])
    batch = layout.small_batch(run, parallel)
    samples = write_samples(
        run.replace(batch=batch),
        folder / SAMPLES,
        length=length,
        count=steps * batch.train,
        vocabulary=text.vocab_size,
        packed=run.data.packing == "documents" and not attention.supports(config, documents=True),
    )
    small = run.replace(parallel=parallel, context=context)
    content = _file(small, folder, batch, length=length, split=split, steps=steps, notes=notes)
    (folder / FILE).write_text(json.dumps(content, indent=2))
    made = Small(folder, samples, tuple(notes))
    made.run()
    return made


def _file(
    run: RunConfig,
    folder: Path,
    batch: BatchSizes,
    *,
    length: int,
    split: tuple[int, ...] | None,
    steps: int,
    notes: list[str],
) -> dict[str, Any]:
    content = {name: value for name, value in resolved(run).items() if name not in LEFT_OUT}
    if "scheduler" in run.deepspeed:
        notes.append("the learning rate stays that of the optimizer: there is no scheduler")
    _of_small_numbers(content, notes)
    given = content.pop("ds4d")
    training = {name: given["training"][name] for name in ("seed", "label_smoothing", "z_loss")}
    block = {
        "model": {"path": str(folder / MODEL)},
        "data": {
            "seq_len": length,
            "shuffle": run.data.shuffle,
            "train": {"type": "tokens", "path": str(folder / SAMPLES)},
            "cache_dir": str(folder / "cache"),
        },
        "parallel": given["parallel"],
        "pipeline": {**given["pipeline"], "split": split and list(split)},
        "context": given["context"],
        "training": {**training, "decay_all": run.training.decay_all, "steps": steps},
        "recompute": run.recompute,
    }
    return {**content, TRAIN: batch.train, MICRO: batch.micro, "ds4d": block}


def _of_small_numbers(content: dict[str, Any], notes: list[str]) -> None:
    """What a small model would not show, in place."""
    params = content["optimizer"].get("params", {})
    if params.get("eps", LEAST_EPS) < LEAST_EPS:
        notes.append(f"optimizer.params.eps: {LEAST_EPS} here, not {params['eps']}")
        params["eps"] = LEAST_EPS
    zero = content.get("zero_optimization", {})
    if zero.get("stage") == 3:  # DeepSpeed leaves small parameters whole
        zero["stage3_param_persistence_threshold"] = 0
    fp16 = content.get("fp16", {})
    if fp16.get("enabled") and not fp16.get("loss_scale"):
        fp16["initial_scale_power"] = LOSS_SCALE_POWER

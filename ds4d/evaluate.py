"""The exact loss of a held-out set: the mean over all its valid targets, the same number for every
layout and batch size."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ds4d.checkpoint.find import locate
from ds4d.checkpoint.load import read_extra
from ds4d.config.errors import ConfigError, Problem
from ds4d.config.load import load
from ds4d.config.types import ModelConfig, PipelineConfig, RunConfig, TokenizerConfig
from ds4d.data.loader import eval_batches
from ds4d.data.prepare import prepare
from ds4d.loss import eval_sums
from ds4d.mesh import Mesh
from ds4d.model.config import hf_config
from ds4d.pipeline.engine import Pipeline
from ds4d.saved_model import find_model, load_model, load_tokenizer

NO_DATA = "missing: say what to evaluate on, with --source or a --config that has it"


def mean_loss(
    sums: Iterable[tuple[Tensor, Tensor]],
    *,
    device: torch.device | str,
    group: dist.ProcessGroup | None = None,
) -> tuple[float, int]:
    """Token-weighted mean loss.

    Args:
        sums: (loss sum, valid targets) of each of this rank's micro-batches, float64 scalars
            (``Engine.eval_sums``).
        group: the ranks over which the set, and the stages that know its losses, are spread;
            None: it is all here.

    Returns:
        (mean, valid targets), equal on all ranks; NaN for a set without a valid target.

    Collective: ``group`` (the world under ZeRO-3).
    """
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for pair in sums:
        total += torch.stack(pair)
    if group is not None:
        dist.all_reduce(total, group=group)
    loss_sum, tokens = total.tolist()
    return (loss_sum / tokens if tokens else math.nan), int(tokens)


def evaluate(
    path: Path,
    *,
    config: Path | None = None,
    source: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    device: torch.device | str = "cpu",
    progress: bool = True,
    mesh: Mesh | None = None,
) -> dict[str, float | int]:
    """Loss of a trained model on a source, in one process or on the ranks of a mesh.

    Args:
        path: a Hugging Face folder, a ds4d checkpoint, or a run folder (its newest checkpoint).
        config: a JSON file whose ``ds4d.data`` is used; default: the one that the checkpoint was
            trained with.
        source: instead of ``ds4d.data.eval``.
        overrides: ``dotted.key=value`` each.
        mesh: whose pp and tp ranks hold the model together; each sees all of the set. None: this
            process holds it.

    Returns:
        ``loss``, ``perplexity``, ``tokens`` (valid targets) and ``samples``; the same on all ranks.

    Raises:
        ConfigError, DataError: nothing to evaluate on, or data that cannot be read.
        ValueError: no model at ``path``, or text to be judged and no tokenizer there.

    Collective: pp, tp.
    """
    find_model(path)  # what is wrong with the path is said first
    run = _run_for(path, config, source, overrides)
    model = load_model(path, device=device, mesh=mesh)
    rank = 0 if mesh is None else mesh.rank
    store = prepare(run, sources=("eval",), local_rank=rank, progress=progress).eval
    batches = eval_batches(store, run.batch.micro, dp_rank=0, dp_size=1)
    stages = None
    if mesh is None or mesh.parallel.pp == 1:
        sums = eval_sums(model, batches, device=device)
    else:
        stages = mesh.group("pp")
        pipeline = Pipeline(model.ds4d_stages, mesh, PipelineConfig(), device=device)
        sums = pipeline.evaluate(batches)
    loss, tokens = mean_loss(sums, device=device, group=stages)
    perplexity = math.exp(min(loss, 700.0))
    return {"loss": loss, "perplexity": perplexity, "tokens": tokens, "samples": len(store)}


def _run_for(
    path: Path,
    config: Path | None,
    source: Mapping[str, Any] | None,
    overrides: Sequence[str],
) -> RunConfig:
    """The run that has the set as ``ds4d.data.eval``, with the model's own tokenizer for text."""
    given: Path | dict[str, Any] = config or _trained_with(path) or _bare(path)
    extra = [f"ds4d.data.eval={json.dumps(source)}"] if source is not None else []
    run = load(given, overrides=[*overrides, *extra])
    if run.data.eval is None:
        raise ConfigError([Problem("ds4d.data.eval", NO_DATA)], name=str(config or path))
    if run.data.eval.type == "tokens":
        return run
    tokenizer = TokenizerConfig(path=load_tokenizer(path).name_or_path)
    return run.replace(data=dataclasses.replace(run.data, tokenizer=tokenizer))


def _trained_with(path: Path) -> dict[str, Any] | None:
    """The configuration in a checkpoint; a Hugging Face folder has none."""
    if (path / "config.json").is_file():
        return None
    config = read_extra(locate(path))["config"]
    config["ds4d"]["parallel"] = {}  # one process, whatever the layout was
    return {**config, "train_batch_size": config["train_micro_batch_size_per_gpu"],
            "gradient_accumulation_steps": 1}  # fmt: skip


def _bare(path: Path) -> dict[str, Any]:
    """What a Hugging Face folder is evaluated with when no file says more."""
    positions = getattr(hf_config(ModelConfig(path=str(path))), "max_position_embeddings", None)
    placeholder = {"type": "python_stdlib"}  # of the training data, which is not read
    return {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW"},
        "ds4d": {
            "model": {"path": str(path)},
            "data": {"seq_len": min(positions or 1024, 1024), "train": placeholder},
            "training": {"steps": 1},
        },
    }

"""What ``ds4d check`` could not know of a run: what is in its folder and in its data, and whether a
model that was still on the hub, or whose vocabulary was not known, can be trained so.

All ranks see the same, and so fail alike.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedConfig

from ds4d import attention
from ds4d.attention.trial import why_not_shared
from ds4d.checkpoint.find import list_checkpoints
from ds4d.config.errors import ConfigError, Problem
from ds4d.config.types import RunConfig
from ds4d.data.errors import DataError
from ds4d.data.prepare import PreparedData
from ds4d.pipeline.check import why_not_staged
from ds4d.pipeline.partition import split_of
from ds4d.router_trial import why_not_balanced


def refuse_occupied(output: Path, resume: str | None) -> None:
    """Beginning anew in the folder of another run would mix the two."""
    if resume is None and list_checkpoints(output):
        text = "this run folder has checkpoints; continue with --resume auto, or give another one"
        raise ConfigError([Problem("--output", f"{output}: {text}")])


def check_hosts_agree(data: PreparedData) -> None:
    """Hosts without a shared file system each prepared their own data: it must be the same."""
    mine = {name: report["key"] for name, report in data.report.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    other = next((rank for rank, keys in enumerate(everyone) if keys != everyone[0]), None)
    if other is not None:
        raise DataError(
            f"rank {other} has other data than rank 0 (keys {everyone[other]} and {everyone[0]}): "
            f"the files, the tokenizer or the installed versions differ between their hosts"
        )


def judge_model(run: RunConfig, data: PreparedData, config: PreTrainedConfig) -> RunConfig:
    """The run with its layers split, now that the model's config is there.

    Raises:
        ConfigError: it can't be trained so.
    """
    _check_documents(run, data, config)
    _check_context(run, config)
    _check_routers(config)
    return _with_split(run, config)


def judge_script(run: RunConfig, config: PreTrainedConfig) -> RunConfig:
    """``judge_model`` for a model and data that are a script's."""
    _check_context(run, config)
    return _with_split(run, config)


def _check_documents(run: RunConfig, data: PreparedData, config: PreTrainedConfig) -> None:
    """``check`` cannot see into token files, nor into a model that is still on the hub."""
    for name, report in data.report.items():
        source = getattr(run.data, name)
        packed = run.data.packing == "documents"
        if source.type == "tokens":
            packed = report["documents"] > report["samples"]
        if packed and (reason := attention.supports(config, documents=True)):
            text = f"several documents in a sample, but {reason}"
            raise ConfigError([Problem(f"ds4d.data.{name}", text)])


def _check_context(run: RunConfig, config: PreTrainedConfig) -> None:
    """``check`` cannot try a model that is still on the hub."""
    if run.parallel.cp > 1 and (reason := why_not_shared(config)):
        raise ConfigError([Problem("ds4d.parallel.cp", reason)])


def _check_routers(config: PreTrainedConfig) -> None:
    """``check`` cannot try a model that is still on the hub."""
    if reason := why_not_balanced(config):
        raise ConfigError([Problem("ds4d.model", reason)])


def _with_split(run: RunConfig, config: PreTrainedConfig) -> RunConfig:
    """``check`` cannot cut a model that is still on the hub, or whose vocabulary is not known."""
    if run.parallel.pp == 1:
        return run
    if reason := why_not_staged(config):
        raise ConfigError([Problem("ds4d.parallel.pp", reason)])
    try:
        split = split_of(run, config)
    except ValueError as error:
        raise ConfigError([Problem("ds4d.pipeline.split", str(error))]) from None
    return run.replace(pipeline=replace(run.pipeline, split=split.counts))

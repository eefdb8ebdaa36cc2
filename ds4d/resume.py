"""What a resumed run must have in common with the one that wrote the checkpoint, and the random
state that goes with it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from ds4d.config.errors import ConfigError, Problem, show
from ds4d.config.load import resolved
from ds4d.config.types import RunConfig
from ds4d.data.prepare import PreparedData

T = TypeVar("T")

# A checkpoint's position is a number of samples in this order, its moments are of this optimizer.
KEPT = (
    "optimizer.type",
    "ds4d.training.seed",
    "ds4d.training.decay_all",
    "ds4d.data.shuffle",
)
# What a rank draws its random numbers for follows from these.
PLACES = ("tp", "pp", "cp", "dp", "sequence_parallel")
# Fields of a Hugging Face config that say nothing about what the model computes.
NOT_THE_MODEL = ("transformers_version", "_name_or_path", "dtype", "architectures", "use_cache")


def facts(run: RunConfig, data: PreparedData, hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """What ``check_continues`` compares later, as JSON for the checkpoint."""
    return {
        "config": resolved(run),
        "data_key": data.report["train"]["key"],
        "hf_config": json.loads(json.dumps(hf_config)),  # as the checkpoint gives it back
    }


def check_continues(folder: Path, saved: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse what would silently be another run: other data or order, model or optimizer.

    Layout, batch sizes, precision, learning rate, schedule and length may change.

    Args:
        saved, now: ``facts`` of the checkpoint and of this run.

    Raises:
        ConfigError: all differences.
    """
    problems = list(_differences(saved, now))
    if problems:
        raise ConfigError(problems, name=f"--resume: {folder} is of another run")


def has_same_places(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Every rank stands where the rank of its number stood, and may go on with its random state:
    elsewhere ranks that must draw the same would not, or the other way round.

    Args:
        saved, now: ``facts`` of the checkpoint and of this run.
    """
    before, after = _at(saved["config"], "ds4d.parallel"), _at(now["config"], "ds4d.parallel")
    return all(before.get(name) == after[name] for name in PLACES)


def _differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Problem]:
    for path in KEPT:
        before, after = _at(saved["config"], path), _at(now["config"], path)
        if before != after:
            text = f"was {show(before)}, is {show(after)}; set it back"
            yield Problem(path, f"{text}, or train on from an export of the checkpoint")
    if saved["data_key"] != now["data_key"]:
        text = "the samples are not those that the checkpoint has its position in"
        advice = "give the same data, or train on from an export (ds4d.model.path)"
        yield Problem("ds4d.data", f"{text}: files, tokenizer or packing changed; {advice}")
    before, after = saved["hf_config"], now["hf_config"]
    for name in sorted(before.keys() | after.keys()):
        if name not in NOT_THE_MODEL and before.get(name) != after.get(name):
            text = f"{name} was {show(before.get(name))}, is {show(after.get(name))}"
            yield Problem("ds4d.model", f"{text}; set it back")


def _at(content: Mapping[str, Any], path: str) -> Any:
    value: Any = content
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def from_rank_0(make: Callable[[], T]) -> T:
    """What rank 0 finds in the file system holds for all; so does its error. Collective: the
    world."""
    answer: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            answer[0] = make()
        except Exception as error:
            answer[1] = error
    dist.broadcast_object_list(answer)
    if answer[1] is not None:
        raise answer[1]
    return answer[0]


def seed_everything(seed: int, rank: int) -> None:
    """Args:
    rank: differs between ranks that see other tokens, agrees within a tp group.
    """
    seed = seed * 1_000_003 + rank
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def random_state(device: torch.device) -> dict[str, Any]:
    """Of this rank, in tensors and plain values."""
    name, keys, *rest = np.random.get_state()
    state = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(np.int64)), *rest),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Go on from where ``random_state`` was taken."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)

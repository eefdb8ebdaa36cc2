"""From a file without problems to a ``RunConfig``: every "auto" and every default is filled in."""

from __future__ import annotations

import copy
import dataclasses
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds4d.config import batch
from ds4d.config.autos import AUTO_BUCKETS, AUTO_OPTIMIZER, MAX_GRAD_NORM, WARMUP_STEPS
from ds4d.config.draft import AUTO, Draft
from ds4d.config.notes import find_notes
from ds4d.config.types import SECTIONS, PrecisionConfig, RunConfig, key_of
from ds4d.config.validate import params_schema


def resolve(draft: Draft, path: Path | None) -> RunConfig:
    """The file as the rest of ds4d sees it."""
    content = {**deepspeed_keys(draft), "ds4d": _ds4d_block(draft)}
    filled = Draft(content, draft.world_size, draft.hosts)
    notes = list(find_notes(filled))
    if draft.world_size is None and draft.degree("dp") == AUTO:
        notes.append('ds4d.parallel.dp: "auto" is 1 here, because no world size was given')
    asked = draft.get("ds4d.parallel.sequence_parallel")
    if asked == AUTO and draft.degree("tp") > 1 and not draft.sequence_parallel:
        reason = draft.why_not_sequence_parallel
        notes.append(f'ds4d.parallel.sequence_parallel: "auto" is false here: {reason}')
    block = content.pop("ds4d")
    return RunConfig(
        **{name: build(cls, block[name]) for name, cls in SECTIONS.items()},
        batch=draft.batch,
        deepspeed=content,
        recompute=block["recompute"],
        precision=PrecisionConfig(draft.param_dtype, draft.grad_accum_dtype),
        zero_stage=draft.zero_stage,
        path=path,
        notes=tuple(notes),
    )


def _ds4d_block(draft: Draft) -> dict[str, Any]:
    block = {name: dict(draft.given(f"ds4d.{name}") or {}) for name in SECTIONS}
    block["parallel"]["dp"] = draft.dp
    block["parallel"]["sequence_parallel"] = draft.sequence_parallel
    block["recompute"] = draft.recompute
    block["context"]["exchange"] = draft.exchange
    if draft.get("ds4d.context.method") == "hybrid" and draft.degree("cp") > 1:
        block["context"]["ulysses_size"] = draft.ulysses_size
    if draft.degree("pp") > 1:
        block["pipeline"]["chunks"] = draft.placement.chunks
        if draft.split is not None:
            block["pipeline"]["split"] = list(draft.split.counts)
    return block


def deepspeed_keys(draft: Draft) -> dict[str, Any]:
    """The DeepSpeed keys of the file, nothing left open."""
    keys = copy.deepcopy({k: v for k, v in draft.content.items() if k not in ("$schema", "ds4d")})
    sizes = draft.batch
    keys |= {batch.TRAIN: sizes.train, batch.MICRO: sizes.micro}
    keys[batch.ACCUMULATION] = sizes.accumulation
    clipping = keys.get("gradient_clipping", 0.0)
    keys["gradient_clipping"] = MAX_GRAD_NORM if clipping == AUTO else clipping
    _fill_params(keys, "optimizer", AUTO_OPTIMIZER)
    if "scheduler" in keys:
        _fill_scheduler(draft, keys)
    for name in ("bf16", "fp16"):
        if name in keys:
            keys[name]["enabled"] = draft.param_dtype == name
    if draft.param_dtype != "fp32":
        keys.setdefault("data_types", {})["grad_accum_dtype"] = draft.grad_accum_dtype
        keys.setdefault("communication_data_type", "fp32")
    _fill_zero(draft, keys.get("zero_optimization", {}))
    return keys


def _fill_params(keys: dict[str, Any], block: str, autos: Mapping[str, Any]) -> None:
    params = keys[block].setdefault("params", {})
    for name, schema in params_schema(block, keys[block]["type"]).items():
        if params.get(name) == AUTO:
            params[name] = copy.copy(autos[name])
        elif name not in params and "default" in schema:
            params[name] = copy.copy(schema["default"])


def _fill_scheduler(draft: Draft, keys: dict[str, Any]) -> None:
    steps = draft.given("ds4d.training.steps")
    autos = {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": keys["optimizer"]["params"]["lr"],
        "warmup_num_steps": WARMUP_STEPS,
        "total_num_steps": steps,
        "total_steps": steps,
    }
    params = keys["scheduler"].setdefault("params", {})
    if "total_steps" in params_schema("scheduler", keys["scheduler"]["type"]):
        params.setdefault("total_steps", AUTO)
        if steps is None and params["total_steps"] == AUTO:
            del params["total_steps"]  # known when the samples are counted
    _fill_params(keys, "scheduler", autos)


def _fill_zero(draft: Draft, zero: dict[str, Any]) -> None:
    """Bucket sizes that are read in this stage; any other "auto" is DeepSpeed's default."""
    for name in [name for name, value in zero.items() if value == AUTO]:
        del zero[name]
        if name in AUTO_BUCKETS and (draft.zero_stage == 3 or not name.startswith("stage3_")):
            zero[name] = AUTO_BUCKETS[name](draft.model.get("hidden_size"))
    for value in zero.values():
        if isinstance(value, dict) and value.get("device") == AUTO:
            del value["device"]


def build(cls: type, values: Mapping[str, Any]) -> Any:
    """A dataclass of ``types.py`` from its part of the file."""
    hints = typing.get_type_hints(cls)
    names = {field.name: key_of(field.name) for field in dataclasses.fields(cls)}
    given = {name: values[key] for name, key in names.items() if key in values}
    return cls(**{name: _convert(hints[name], value) for name, value in given.items()})


def _convert(hint: Any, value: Any) -> Any:
    classes = [c for c in (hint, *typing.get_args(hint)) if dataclasses.is_dataclass(c)]
    if classes and isinstance(value, Mapping):
        return build(classes[0], value)
    return tuple(value) if isinstance(value, list) else value


def resolved(run: RunConfig) -> dict[str, Any]:
    """The whole file with nothing left open; it loads again to an equal ``RunConfig``."""
    block = {name: _section(getattr(run, name)) for name in SECTIONS}
    return {**_plain(run.deepspeed), "ds4d": {**block, "recompute": run.recompute}}


def _section(section: Any) -> dict[str, Any]:
    values = dataclasses.asdict(section)
    return {key_of(name): _plain(value) for name, value in values.items()}


def _plain(value: Any) -> Any:
    """The same in JSON's own types."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, (list, tuple)) else value

"""Schemas of the ``optimizer`` and ``scheduler`` blocks, from the signatures of the classes.

Part of the tool ``make_schema``: imports DeepSpeed and torch. Which optimizers there are, and how
they are built, is in ``ds4d/optim.py``; a unit test compares the names.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from deepspeed.ops.lion import FusedLion
from deepspeed.runtime import lr_schedules

from ds4d.config.reflect import block

Schema = dict[str, Any]
AllowAuto = Callable[[Schema], Schema]

FLAG = {"type": "boolean"}
NUMBER = {"type": "number"}

# Parameters that take "auto": Hugging Face's Trainer fills them in.
AUTO_OPTIMIZER = ("lr", "betas", "eps", "weight_decay")
AUTO_SCHEDULER = (
    "warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps", "total_steps"
)  # fmt: skip

# name in the file -> the class whose signature names its parameters
OPTIMIZERS = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "Lion": FusedLion,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "RMSprop": torch.optim.RMSprop,
    "Adadelta": torch.optim.Adadelta,
}
# how a kernel runs, not what it computes: ds4d's choice
IMPLEMENTATION = {
    "self", "params", "foreach", "fused", "capturable", "differentiable", "maximize",
    "set_grad_none",
}  # fmt: skip
# DeepSpeed's own words for Adam
_BOTH = {
    "torch_adam": {**FLAG, "description": "Has no effect: ds4d always takes torch's kernel."},
    "bias_correction": {"enum": [True], "description": "Always on."},
}
_MODE = {**FLAG, "default": True, "description": "As AdamW; false: weight decay of classic Adam."}
ADAM_WORDS = {"Adam": {**_BOTH, "adam_w_mode": _MODE}, "AdamW": _BOTH}

RATIO = {"type": "number", "minimum": 0, "maximum": 1}
WITH_WARMUP = {
    "warmup_steps": {
        "type": "integer", "minimum": 0,
        "description": "Optimizer steps of linear warm-up from 0; or give warmup_ratio."},
    "warmup_ratio": {**RATIO, "description": "Warm-up as a part of total_steps."},
    "min_lr_ratio": {**RATIO, "default": 0.0, "description": "Last lr as a part of lr."},
    "total_steps": {
        "type": "integer", "minimum": 1,
        "description": "Steps of the whole schedule; absent: of the run."},
}  # fmt: skip


def _signature(cls: type, skip: set[str]) -> tuple[dict[str, Schema], list[str]]:
    """(properties, required) from the parameters of a constructor."""
    properties: dict[str, Schema] = {}
    required = []
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if name in skip:
            continue
        default = parameter.default
        if name == "weight_decay":
            default = 0.0  # torch's AdamW has 0.01, DeepSpeed's 0
        properties[name] = schema = dict(_parameter(name, default))
        if default is inspect.Parameter.empty:
            required.append(name)
        elif default is not None:
            schema["default"] = list(default) if isinstance(default, tuple) else default
    return properties, required


def _parameter(name: str, default: Any) -> Schema:
    if name == "warmup_type":
        return {"enum": [lr_schedules.WARMUP_LOG_RATE, lr_schedules.WARMUP_LINEAR_RATE]}
    if isinstance(default, bool):
        return FLAG
    if isinstance(default, tuple):
        return {"type": "array", "items": NUMBER, "minItems": 2, "maxItems": 2}
    if name.endswith(("_steps", "_step_size", "_stair_count")):
        return {"type": "integer", "minimum": 0 if default == 0 else 1}
    return {"type": "number", "minimum": 0} if name in ("lr", "eps", "weight_decay") else NUMBER


def _by_type(description: str, kinds: dict[str, tuple[dict[str, Schema], list[str]]]) -> Schema:
    """``{"type": name, "params": {...}}`` where the name decides about the parameters."""
    choices = [
        {
            "if": {"properties": {"type": {"const": name}}, "required": ["type"]},
            "then": {
                "properties": {
                    "params": {**block(f"Parameters of {name}.", params), "required": required}
                },
                **({"required": ["params"]} if required else {}),
            },
        }
        for name, (params, required) in kinds.items()
    ]
    names = {"enum": list(kinds), "description": "Name."}
    outer = block(description, {"type": names, "params": {"type": "object"}})
    return {**outer, "required": ["type"], "allOf": choices}


def optimizer_schema(allow_auto: AllowAuto) -> Schema:
    kinds = {}
    for name, cls in OPTIMIZERS.items():
        params, required = _signature(cls, IMPLEMENTATION)
        params |= ADAM_WORDS.get(name, {})
        kinds[name] = (_auto(params, AUTO_OPTIMIZER, allow_auto), required)
    for name in ADAM_WORDS:
        kinds[name][0].pop("decoupled_weight_decay", None)  # adam_w_mode says it
    return _by_type("The optimizer, by DeepSpeed's or torch's name.", kinds)


def scheduler_schema(allow_auto: AllowAuto) -> Schema:
    skip = {"self", "optimizer", "last_batch_iteration"}
    kinds = {
        name: _signature(getattr(lr_schedules, name), skip)
        for name in lr_schedules.VALID_LR_SCHEDULES
    }
    kinds |= {name: (dict(WITH_WARMUP), []) for name in ("cosine", "linear")}
    return _by_type(
        "How the learning rate moves, by DeepSpeed's name, or cosine or linear. It counts "
        "optimizer steps. Absent: constant.",
        {
            name: (_auto(params, AUTO_SCHEDULER, allow_auto), required)
            for name, (params, required) in kinds.items()
        },
    )


def _auto(params: dict[str, Schema], names: tuple[str, ...], allow_auto: AllowAuto):
    return {k: allow_auto(v) if k in names else v for k, v in params.items()}

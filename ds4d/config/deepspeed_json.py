"""The only writer of the dict that DeepSpeed gets."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ds4d.config.batch import TRAIN
from ds4d.config.errors import ConfigError, Problem
from ds4d.config.types import RunConfig

# ds4d builds these itself and hands DeepSpeed the objects; and DeepSpeed's data axis is dp x cp, so
# it must work out a train_batch_size of its own.
KEPT_BACK = ("ds4d", "optimizer", "scheduler", TRAIN)

NEVER = 10**9  # steps between DeepSpeed's own progress lines

# What DeepSpeed would compile an extension for on CPU: dotted key -> the values.
COMPILED = {
    "zero_optimization.offload_param.device": ("nvme",),
    "zero_optimization.offload_optimizer.device": ("nvme",),
    "zero_optimization.zero_quantized_weights": (True,),
    "zero_optimization.zero_quantized_nontrainable_weights": (True,),
    "zero_optimization.zero_quantized_gradients": (True,),
}


def to_deepspeed(run: RunConfig, *, on_cpu: bool) -> dict[str, Any]:
    """The run in DeepSpeed's words.

    Raises:
        ConfigError: on CPU, a key for which DeepSpeed would start a compiler.
    """
    if on_cpu:
        _refuse_compiled(run)
    config = {k: copy.deepcopy(v) for k, v in run.deepspeed.items() if k not in KEPT_BACK}
    config.setdefault("gradient_clipping", 0.0)  # DeepSpeed's own default is 1.0
    config["data_types"] = {
        **config.get("data_types", {}), "grad_accum_dtype": run.precision.grad_accum_dtype
    }  # fmt: skip
    config.setdefault("communication_data_type", "fp32")
    config["steps_per_print"] = NEVER
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    return config


def _refuse_compiled(run: RunConfig) -> None:
    problems = []
    for path, values in COMPILED.items():
        value: Any = run.deepspeed
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value in values:
            message = "needs an extension that DeepSpeed would compile, not done on CPU"
            problems.append(Problem(path, f"{value}: {message}; leave it out"))
    if problems:
        raise ConfigError(problems, name=str(run.path or "the config"))

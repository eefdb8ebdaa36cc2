"""The only writer of the dict that DeepSpeed gets."""

from __future__ import annotations

import copy
from typing import Any

from ds4d.config.batch import TRAIN
from ds4d.config.errors import ConfigError, Problem
from ds4d.config.types import RunConfig

# ds4d builds these itself and hands DeepSpeed the objects; and DeepSpeed's data axis is dp x cp, so
# it must work out a train_batch_size of its own.
KEPT_BACK = ("ds4d", "optimizer", "scheduler", TRAIN)

NEVER = 10**9  # steps between DeepSpeed's own progress lines

# What DeepSpeed would compile an extension for on CPU.
COMPILED = (
    "zero_quantized_weights",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_gradients",
)


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
    if run.zero_stage == 0 and run.precision.param_dtype != "fp32":
        # Stage 0 accumulates in half precision and does not scale the loss for fp16 (DeepSpeed
        # 0.19.8, engine.py); stage 1 does both right and computes the same otherwise.
        config["zero_optimization"] = {**config.get("zero_optimization", {}), "stage": 1}
    if run.recompute == "selective" and run.zero_stage == 3:
        # DeepSpeed's linear adds the bias in place, to the product that selective recomputation
        # keeps: it would be added twice. What it saves memory with, recomputation does anyway.
        config["zero_optimization"]["memory_efficient_linear"] = False
    if run.parallel.pp > 1 and "zero_optimization" in config:
        # It would reduce in each backward pass; the last of a chunk is not the last of the step.
        config["zero_optimization"]["overlap_comm"] = False
    config["steps_per_print"] = NEVER
    config["zero_allow_untested_optimizer"] = True
    config["zero_force_ds_cpu_optimizer"] = False
    return config


def _refuse_compiled(run: RunConfig) -> None:
    zero = run.deepspeed.get("zero_optimization", {})
    message = "true: needs an extension that DeepSpeed would compile, not done on CPU; leave it out"
    problems = [Problem(f"zero_optimization.{k}", message) for k in COMPILED if zero.get(k)]
    if problems:
        raise ConfigError(problems, name=str(run.path or "the config"))

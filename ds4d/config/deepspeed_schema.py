"""The DeepSpeed part of the schema, asked from DeepSpeed's own models, classes and constants.

Part of the tool ``make_schema``: imports DeepSpeed and torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.monitor import config as monitor
from deepspeed.profiling import constants as profiler
from deepspeed.runtime import constants as c
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT
from deepspeed.runtime.config import (
    _REMOVED_TOP_LEVEL_CONFIG_KEYS,
    _REMOVED_ZERO_CONFIG_KEYS,
)
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

from ds4d.config.descriptions import DESCRIPTIONS
from ds4d.config.optimizer_schema import optimizer_schema, scheduler_schema
from ds4d.config.reflect import block, class_schema
from ds4d.config.words import NOT_IN_DS4D

Schema = dict[str, Any]

DTYPES = ["fp32", "bf16", "fp16"]
COUNT = {"type": "integer", "minimum": 1}
FLAG = {"type": "boolean"}
NUMBER = {"type": "number"}

# name -> (schema, default, description)
SCALARS: dict[str, tuple[Schema, Any, str]] = {
    c.TRAIN_BATCH_SIZE: (
        COUNT, None, "Sequences in one optimizer step: micro-batch x accumulation x dp."),
    c.TRAIN_MICRO_BATCH_SIZE_PER_GPU: (
        COUNT, None, "Sequences in one forward pass of a data-parallel rank."),
    c.GRADIENT_ACCUMULATION_STEPS: (
        COUNT, None, "Micro-batches of a data-parallel rank in one optimizer step."),
    c.GRADIENT_CLIPPING: (
        {"type": "number", "minimum": 0}, None,
        "Largest gradient norm; 0, or the key absent: no clipping (DeepSpeed alone would clip at "
        f"{c.GRADIENT_CLIPPING_DEFAULT})."),
    c.COMMUNICATION_DATA_TYPE: (
        {"enum": DTYPES}, None, "Type in which gradients are reduced; absent: fp32."),
    c.SEQ_PARALLEL_COMMUNICATION_DATA_TYPE: (
        {"enum": DTYPES}, c.SEQ_PARALLEL_COMMUNICATION_DATA_TYPE_DEFAULT,
        "Of DeepSpeed's own sequence parallelism, which ds4d does not use."),
    c.PRESCALE_GRADIENTS: (
        FLAG, c.PRESCALE_GRADIENTS_DEFAULT, "Divide gradients before they are reduced."),
    c.GRADIENT_PREDIVIDE_FACTOR: (
        {"type": "number", "exclusiveMinimum": 0}, c.GRADIENT_PREDIVIDE_FACTOR_DEFAULT,
        "Part of the division that prescale_gradients does first."),
    c.GRADIENT_ALLREDUCE_OP: (
        {"enum": [c.GRADIENT_ALLREDUCE_OP_MEAN]}, c.GRADIENT_ALLREDUCE_OP_DEFAULT,
        "How gradients are reduced; ds4d's loss counts on the mean."),
    c.MANAGED_GRADIENT_ACCUMULATION: (
        {"enum": [True]}, c.MANAGED_GRADIENT_ACCUMULATION_DEFAULT,
        "DeepSpeed counts the micro-batches; ds4d counts on that."),
    c.ZERO_ALLOW_UNTESTED_OPTIMIZER: (FLAG, None, "Set by ds4d itself."),
    c.ZERO_FORCE_DS_CPU_OPTIMIZER: (FLAG, None, "Set by ds4d itself."),
    c.STEPS_PER_PRINT: (COUNT, None, "DeepSpeed's own progress line; ds4d prints every step."),
    c.WALL_CLOCK_BREAKDOWN: (
        FLAG, c.WALL_CLOCK_BREAKDOWN_DEFAULT, "Time forward, backward and step (into logs/)."),
    c.MEMORY_BREAKDOWN: (FLAG, c.MEMORY_BREAKDOWN_DEFAULT, "Log memory (into logs/)."),
    c.DUMP_STATE: (FLAG, c.DUMP_STATE_DEFAULT, "Print DeepSpeed's configuration (into logs/)."),
    c.DISABLE_ALLGATHER: (FLAG, c.DISABLE_ALLGATHER_DEFAULT, "Broadcast instead of all-gather."),
    c.DISABLE_PYTHON_GC: (
        FLAG, c.DISABLE_PYTHON_GC_DEFAULT, "Collect Python's garbage at step ends only."),
    c.DATALOADER_DROP_LAST: (
        FLAG, c.DATALOADER_DROP_LAST_DEFAULT, "Of DeepSpeed's data loader, which is not used."),
    c.VOCABULARY_SIZE: (COUNT, None, "DeepSpeed only warns when 8 does not divide it."),
    c.LOG_LEVEL: ({"type": ["string", "null"]}, c.LOG_LEVEL_DEFAULT, "DeepSpeed's log level."),
}  # fmt: skip

# DeepSpeed's blocks: a pydantic model, or a description and {key: (schema, default)}.
MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    c.BFLOAT16: DeepSpeedBF16Config,
    c.FP16: DeepSpeedFP16Config,
    "tensorboard": monitor.TensorBoardConfig,
    "wandb": monitor.WandbConfig,
    "csv_monitor": monitor.CSVConfig,
    "comet": monitor.CometConfig,
    "comms_logger": CommsLoggerConfig,
    "compile": CompileConfig,
}

PLAIN_TYPES = {bool: "boolean", int: "integer", float: "number"}

# Keys that take "auto" because Hugging Face's Trainer or Accelerate fills them in.
AUTO = (
    c.TRAIN_BATCH_SIZE,
    c.TRAIN_MICRO_BATCH_SIZE_PER_GPU,
    c.GRADIENT_ACCUMULATION_STEPS,
    c.GRADIENT_CLIPPING,
    "bf16.enabled",
    "fp16.enabled",
    "zero_optimization.reduce_bucket_size",
    "zero_optimization.stage3_prefetch_bucket_size",
    "zero_optimization.stage3_param_persistence_threshold",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save",
    "zero_optimization.offload_param.device",
    "zero_optimization.offload_optimizer.device",
)

def deepspeed_properties(allow_auto: Callable[[Schema], Schema]) -> dict[str, Schema]:
    """Top-level key -> schema: everything that DeepSpeed reads, removed and refused keys too."""
    properties = {
        name: _with_default({**schema, "description": text}, default)
        for name, (schema, default, text) in SCALARS.items()
    }
    properties |= {name: class_schema(model) for name, model in MODELS.items()}
    properties |= _plain_blocks()
    zero = properties["zero_optimization"]["properties"]
    zero |= {name: _refused(text) for name, text in _REMOVED_ZERO_CONFIG_KEYS.items()}
    for path in AUTO:
        *parents, last = path.split(".")
        holder = properties
        for name in parents:
            holder = holder[name]["properties"]
        holder[last] = allow_auto(holder[last])
    removed = {**_REMOVED_TOP_LEVEL_CONFIG_KEYS, **NOT_IN_DS4D}
    properties = {
        c.OPTIMIZER: optimizer_schema(allow_auto),
        c.SCHEDULER: scheduler_schema(allow_auto),
        **properties,
        **{name: _refused(text) for name, text in removed.items()},
    }
    _describe(properties, "")
    return properties


def _describe(properties: dict[str, Schema], block_name: str) -> None:
    """Fill in the texts that DeepSpeed has not."""
    for name, schema in properties.items():
        if "description" not in schema:
            special = DESCRIPTIONS.get(f"{block_name}.{name}")
            schema["description"] = special or DESCRIPTIONS[name]
        _describe(schema.get("properties", {}), name)
        for choice in schema.get("allOf", []):
            _describe(choice["then"]["properties"], name)


def _refused(text: str) -> Schema:
    return {"not": {}, "description": text}


def _with_default(schema: Schema, default: Any) -> Schema:
    return schema if default is None else {**schema, "default": default}


def _typed(defaults: dict[str, Any], **special: Schema) -> dict[str, Schema]:
    """Properties from a dict of defaults."""
    return {
        name: special.get(name) or {"type": PLAIN_TYPES[type(default)], "default": default}
        for name, default in defaults.items()
    }


def _plain_blocks() -> dict[str, Schema]:
    """The blocks that DeepSpeed reads without a model."""
    flops = {
        profiler.FLOPS_PROFILER_ENABLED: profiler.FLOPS_PROFILER_ENABLED_DEFAULT,
        profiler.FLOPS_PROFILER_RECOMPUTE_FWD_FACTOR: 0.0,
        profiler.FLOPS_PROFILER_PROFILE_STEP: profiler.FLOPS_PROFILER_PROFILE_STEP_DEFAULT,
        profiler.FLOPS_PROFILER_MODULE_DEPTH: profiler.FLOPS_PROFILER_MODULE_DEPTH_DEFAULT,
        profiler.FLOPS_PROFILER_TOP_MODULES: profiler.FLOPS_PROFILER_TOP_MODULES_DEFAULT,
        profiler.FLOPS_PROFILER_DETAILED: profiler.FLOPS_PROFILER_DETAILED_DEFAULT,
        profiler.FLOPS_PROFILER_OUTPUT_FILE: None,
    }
    return {
        "activation_checkpointing": block(
            "Recompute activations in the backward pass: with this block present, every layer "
            'is (see ds4d.recompute for "selective").',
            _typed(ACT_CHKPT_DEFAULT, number_checkpoints={"type": ["integer", "null"]}),
        ),
        "flops_profiler": block(
            "DeepSpeed's profiler of floating-point operations.",
            _typed(flops, output_file={"type": ["string", "null"]}),
        ),
        "aio": block("Reading and writing for NVMe offload.", _typed(AIO_DEFAULT_DICT)),
        "timers": block(
            "DeepSpeed's timers.", {"throughput": class_schema(DeepSpeedThroughputTimerConfig)}
        ),
        c.DATA_TYPES: block("Types of gradients, parameters and buffers.", _data_types()),
        c.TORCH_AUTOCAST: block(
            "torch.autocast instead of bf16/fp16 parameters.",
            {
                "enabled": {**FLAG, "default": False},
                "dtype": {"enum": ["bfloat16", "float16"]},
                "lower_precision_safe_modules": {"type": "array", "items": {"type": "string"}},
            },
        ),
    }


def _data_types() -> dict[str, Schema]:
    return {
        c.GRAD_ACCUM_DTYPE: {
            "enum": DTYPES,
            "description": "Type in which gradients are accumulated; absent: fp32.",
        },
        c.PARAM_DTYPE: {"enum": DTYPES, "description": "Must agree with bf16/fp16."},
        c.BUFFER_DTYPE: {"enum": DTYPES, "description": "Absent: as the model has them."},
        c.KEEP_IN_FP32_MODULES: {
            "anyOf": [{"type": "array", "items": {"type": "string"}}, {"const": "auto"}],
            "description": "Buffers kept in fp32: name patterns; auto: what transformers says.",
            "default": c.KEEP_IN_FP32_MODULES_DEFAULT,
        },
    }



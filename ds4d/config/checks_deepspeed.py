"""What is wrong with the DeepSpeed keys: what DeepSpeed itself would refuse late, or get wrong."""

from __future__ import annotations

from importlib.util import find_spec

from ds4d.config.autos import AUTO_BUCKETS
from ds4d.config.draft import AUTO, Draft
from ds4d.config.errors import Problem, show
from ds4d.config.rules import Problems, rule

ZERO = "zero_optimization"
GRAD_ACCUM = "data_types.grad_accum_dtype"
CPU_ADAM = "needs DeepSpeed's CPU Adam, and ds4d builds the optimizer itself"


@rule("bf16.enabled", "fp16.enabled")
def one_precision(draft: Draft) -> Problems:
    if draft.get("bf16.enabled") is True and draft.get("fp16.enabled") is True:
        yield Problem("fp16.enabled", "true, and bf16.enabled is true too; switch one of them off")


@rule("bf16.enabled", "fp16.enabled", "data_types")
def types_fit_the_precision(draft: Draft) -> Problems:
    param_dtype = draft.param_dtype
    if draft.given("data_types.param_dtype") not in (None, param_dtype):
        yield Problem(
            "data_types.param_dtype",
            f"{show(draft.given('data_types.param_dtype'))}, but by bf16 and fp16 the parameters "
            f"are {param_dtype}; leave it out",
        )
    accumulated = draft.grad_accum_dtype
    if accumulated not in ("fp32", param_dtype):
        yield Problem(
            GRAD_ACCUM, f"{show(accumulated)}: {param_dtype} parameters need fp32 or {param_dtype}"
        )


@rule("torch_autocast", "zero_optimization.stage")
def autocast_can_scale(draft: Draft) -> Problems:
    if draft.get("torch_autocast.enabled") and draft.given("torch_autocast.dtype") == "float16":
        if draft.zero_stage == 0:
            yield Problem(
                "torch_autocast.dtype",
                '"float16" needs loss scaling, which DeepSpeed does here only with '
                "zero_optimization.stage 1 or more; raise it, or use bfloat16",
            )


@rule("zero_optimization")
def offload_fits_the_stage(draft: Draft) -> Problems:
    stage = draft.zero_stage
    for name, lowest in (("offload_param", 3), ("offload_optimizer", 1)):
        device = draft.number(f"{ZERO}.{name}.device") or "none"
        if device != "none" and stage < lowest:
            yield Problem(
                f"{ZERO}.{name}",
                f"needs {ZERO}.stage {lowest}{' or more' if lowest < 3 else ''}, has {stage}",
            )
        if device == "nvme":
            yield Problem(
                f"{ZERO}.{name}.device",
                '"nvme": ds4d\'s checkpoints read weights and moments from memory; use "cpu"',
            )
    ratio = draft.get(f"{ZERO}.offload_optimizer.ratio")
    if ratio < 1:
        yield Problem(f"{ZERO}.offload_optimizer.ratio", f"{ratio}: below 1 {CPU_ADAM}")


@rule("zero_optimization.stage", "optimizer.type")
def adagrad_keeps_its_groups(draft: Draft) -> Problems:
    """DeepSpeed 0.19.8 builds Adagrad anew from its defaults (stage_1_and_2.py, stage3.py)."""
    if draft.given("optimizer.type") == "Adagrad" and draft.zero_stage > 0:
        yield Problem(
            "optimizer.type",
            f'"Adagrad" with {ZERO}.stage {draft.zero_stage}: DeepSpeed would forget its parameter '
            "groups and its schedule; use stage 0, or another optimizer",
        )


@rule("zero_optimization", "ds4d.model")
def auto_sizes_are_known(draft: Draft) -> Problems:
    for name in AUTO_BUCKETS:
        if draft.given(f"{ZERO}.{name}") == AUTO and draft.model.get("hidden_size") is None:
            yield Problem(
                f"{ZERO}.{name}",
                '"auto" follows from the model\'s hidden_size, which is not known here; '
                "give a number",
            )


@rule("zero_optimization", "prescale_gradients", "gradient_predivide_factor")
def reduction_fits_the_stage(draft: Draft) -> Problems:
    if draft.zero_stage >= 2 and draft.get(f"{ZERO}.reduce_scatter"):
        for key, plain in (("prescale_gradients", False), ("gradient_predivide_factor", 1.0)):
            if draft.get(key) != plain:
                yield Problem(
                    key,
                    f"{show(draft.get(key))}: with {ZERO}.stage {draft.zero_stage} it needs "
                    f"{ZERO}.reduce_scatter false",
                )


# Settings that ds4d cannot honour: key -> (the value refused, why).
REFUSED_VALUES = {
    f"{ZERO}.offload_optimizer.super_offload": (True, CPU_ADAM),
    f"{ZERO}.legacy_stage1": (True, "DeepSpeed no longer has it"),
    f"{ZERO}.compute_grad_norm": (False, "ds4d reports the gradient norm of every step"),
    "fp16.fp16_master_weights_and_grads": (True, CPU_ADAM),
}


@rule("zero_optimization", "fp16")
def settings_can_be_honoured(draft: Draft) -> Problems:
    for key, (value, why) in REFUSED_VALUES.items():
        if draft.given(key) is value:
            yield Problem(key, f"{show(value)}: {why}; leave it out")
    if draft.given(f"{ZERO}.zenflow") is not None:
        yield Problem(f"{ZERO}.zenflow", f"{CPU_ADAM}; leave it out")


# DeepSpeed's writers: block -> the package that it imports when training starts
WRITERS = {"tensorboard": "tensorboard", "wandb": "wandb", "comet": "comet_ml"}


@rule(*WRITERS)
def writers_are_installed(draft: Draft) -> Problems:
    for block, package in WRITERS.items():
        if draft.get(f"{block}.enabled") and find_spec(package) is None:
            yield Problem(
                f"{block}.enabled", f"true, and {package} is not installed: pip install {package}"
            )


@rule("bf16", "zero_optimization.stage")
def bf16_masters_fit(draft: Draft) -> Problems:
    """DeepSpeed asserts all this, after the model is built."""
    masters = draft.get("bf16.bf16_master_weights_and_grads")
    states = draft.get("bf16.bf16_optimizer_states")
    if masters != states:
        yield Problem(
            "bf16",
            "bf16_master_weights_and_grads and bf16_optimizer_states go together; set both (no "
            "fp32 copy of anything) or none",
        )
    elif masters and draft.zero_stage == 0:
        yield Problem(
            "bf16.bf16_master_weights_and_grads", f"needs {ZERO}.stage 1 or more, has 0"
        )

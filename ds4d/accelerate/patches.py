"""All that is changed in transformers and accelerate, for the Trainer, which makes its
``Accelerator`` and its state itself. Nothing else in ds4d patches them.

It is done when ``ds4d.accelerate`` is imported, and has no effect on a Trainer without a DeepSpeed
file. Each change names what it stands in for; versions that have been tried are listed, and others
are refused, for the Trainer's inside has no stable interface.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import torch
import transformers.trainer
from accelerate import PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DeepSpeedPlugin, operations
from transformers import TrainingArguments
from transformers.integrations import deepspeed as hf_deepspeed

from ds4d.accelerate import tensors
from ds4d.accelerate.accelerator import Accelerator, skip_first_batches
from ds4d.accelerate.model import ScriptModel
from ds4d.accelerate.optimizer import PreparedOptimizer
from ds4d.accelerate.processes import begin, processes
from ds4d.accelerate.settings import ScriptFile
from ds4d.checkpoint.find import list_checkpoints

KNOWN = {"transformers": ("5.24",), "accelerate": ("1.15",)}


class UnknownVersion(ImportError):
    """ds4d.accelerate was not tried with an installed library."""


def check_versions() -> None:
    """Raises: UnknownVersion."""
    for package, known in KNOWN.items():
        installed = version(package)
        if not installed.startswith(tuple(f"{prefix}." for prefix in known)):
            raise UnknownVersion(
                f"ds4d.accelerate knows {package} {' and '.join(known)}, installed is {installed}: "
                f"install one that it knows (pip install '{package}=={known[-1]}.*')"
            )


def apply() -> None:
    """Once, at import."""
    check_versions()
    for name, ours in OVER_DP.items():
        _wrap(operations, name, _over_dp(ours))
        setattr(accelerate.utils, name, getattr(operations, name))
    _wrap(PartialState, "split_between_processes", _split_among_dp)
    _wrap(torch.nn.utils.clip_grad, "clip_grad_norm_", _refuse_ours)
    torch.nn.utils.clip_grad_norm_ = torch.nn.utils.clip_grad.clip_grad_norm_
    trainer = transformers.trainer
    _wrap(hf_deepspeed.HfTrainerDeepSpeedConfig, "__init__", _config_without_scripts_part)
    _wrap(TrainingArguments, "__post_init__", _prepared_arguments)
    TrainingArguments._setup_devices = _devices(TrainingArguments.__dict__["_setup_devices"])
    trainer.Accelerator = _make_accelerator
    trainer.skip_first_batches = skip_first_batches
    _wrap(trainer, "deepspeed_init", _init_with_ours)
    _wrap(trainer, "deepspeed_load_checkpoint", _load_ours)
    _wrap(trainer.Trainer, "save_model", _save_ours)
    _wrap(trainer.Trainer, "_wrap_model", _wrapped_as_prepared)


def _wrap(owner: Any, name: str, around: Any) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, wrapped)


# -- torch ---------------------------------------------------------------------------------------


def _refuse_ours(original: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
    """Gradients are the engine's, and ``grad`` of a parameter is empty or in part."""
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if any(getattr(p, "ds4d_owned", False) for p in parameters):
        raise ValueError(
            "ds4d.accelerate: torch's clip_grad_norm_ does not see the gradients of all ranks; "
            "call accelerator.clip_grad_norm_(parameters, max_norm)"
        )
    return original(parameters, *args, **kwargs)


# -- accelerate's functions ------------------------------------------------------------------------

# What accelerate.utils has beside the Accelerator's methods, for scripts that call it there.
OVER_DP: dict[str, Callable[..., Any]] = {
    "gather": lambda x, group: tensors.gather(
        x, group, uneven=GradientState().end_of_dataloader
    ),
    "gather_object": tensors.gather_objects,
    "reduce": lambda x, group, reduction="mean", scale=1.0: tensors.reduce(x, group, reduction),
    "pad_across_processes": lambda x, group, dim=0, pad_index=0, pad_first=False: tensors.pad(
        x, group, dim=dim, value=pad_index, first=pad_first
    ),
}


def _over_dp(ours: Callable[..., Any]) -> Callable[..., Any]:
    def call(original: Any, data: Any, *args: Any, **kwargs: Any) -> Any:
        these = processes()
        if these is None:
            return original(data, *args, **kwargs)
        return ours(data, these.mesh.group("dp"), *args, **kwargs)

    return call


def _split_among_dp(original: Any, self: PartialState, *args: Any, **kwargs: Any) -> Any:
    """By the place on dp: ``process_index`` is the rank in the world."""
    these = processes()
    if these is None:
        return original(self, *args, **kwargs)
    place = SimpleNamespace(
        num_processes=these.mesh.parallel.dp,
        process_index=these.mesh.coordinate.dp,
        device=these.device,
    )
    return original(place, *args, **kwargs)


# -- TrainingArguments ----------------------------------------------------------------------------


def _config_without_scripts_part(original: Any, self: Any, config: Any) -> None:
    """What the Trainer fills and compares has batch words to be filled, and no ds4d comments."""
    original(self, ScriptFile.find(config).content_for_accelerate)


def _prepared_arguments(original: Any, self: TrainingArguments) -> None:
    """Process groups are made by the file's layout before transformers makes some of its own."""
    named = self.deepspeed
    if not named and os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true":
        named = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        self.deepspeed = named
    if not named:
        original(self)
        return
    begin(ScriptFile.find(named), timeout_seconds=float(self.ddp_timeout))
    self.use_cpu = processes().device.type == "cpu"
    original(self)
    hf_deepspeed.unset_hf_deepspeed_config()  # or from_pretrained would cut models over the world


def _devices(original: Any) -> functools.cached_property:
    """``TrainingArguments._setup_devices``, which would begin with a state of its own."""

    def setup(self: TrainingArguments) -> torch.device:
        if not self.deepspeed:
            return original.func(self)
        AcceleratorState._reset_state(reset_partial_state=True)  # as transformers does
        these = begin(ScriptFile.find(self.deepspeed))
        self.accelerator_config.pop("use_configured_state", None)
        self.distributed_state, self._n_gpu = PartialState(), 1
        return these.device

    found = functools.cached_property(setup)
    found.__set_name__(TrainingArguments, "_setup_devices")
    return found


# -- Trainer --------------------------------------------------------------------------------------


def _make_accelerator(**kwargs: Any) -> Any:
    if isinstance(kwargs.get("deepspeed_plugin"), DeepSpeedPlugin):
        return Accelerator(**kwargs)
    return accelerate.Accelerator(**kwargs)


def _init_with_ours(
    original: Any, trainer: Any, *args: Any, inference: bool = False, **kw: Any
) -> Any:
    """transformers evaluates under DeepSpeed with ZeRO-3 alone, and forgets the optimizer that the
    user has given the Trainer."""
    if not isinstance(trainer.accelerator, Accelerator):
        return original(trainer, *args, inference=inference, **kw)
    if inference:
        return None, None
    given, schedule = trainer.optimizer, trainer.lr_scheduler
    if given is None or isinstance(given, PreparedOptimizer):
        return original(trainer, *args, **kw)
    if "optimizer" in trainer.accelerator._file.content:
        raise ValueError(
            "ds4d.accelerate: the Trainer was given an optimizer, and the file has one: take one "
            "of them away"
        )
    original(trainer, *args, **kw)
    return given, schedule


def _load_ours(original: Any, engine: Any, path: str, load_module_strict: bool = True) -> None:
    if not isinstance(engine, ScriptModel):
        original(engine, path, load_module_strict=load_module_strict)
    elif not list_checkpoints(Path(path)):
        raise ValueError(f"no ds4d checkpoint in {path}, so training can't go on from there")
    else:
        engine.load_checkpoint(path)


def _save_ours(
    original: Any, self: Any, output_dir: str | None = None, _internal_call: bool = False
) -> None:
    """transformers' own asks a DeepSpeed engine for its configuration."""
    if not isinstance(self.accelerator, Accelerator):
        original(self, output_dir, _internal_call=_internal_call)
        return
    state = self.accelerator.get_state_dict(self.model_wrapped)
    self._save(self.args.output_dir if output_dir is None else output_dir, state_dict=state)
    if self.args.push_to_hub and not _internal_call:
        self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)


def _wrapped_as_prepared(original: Any, self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """transformers evaluates with the bare model, of which DeepSpeed's ranks have the whole."""
    if isinstance(self.accelerator, Accelerator):
        for prepared in self.accelerator._models:
            if prepared.module is model:
                return prepared
        if isinstance(model, ScriptModel) and model not in self.accelerator._models:
            return model.module  # of an evaluation; it is prepared anew
    return original(self, model, *args, **kwargs)

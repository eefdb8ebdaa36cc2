"""Optimizers and learning-rate schedules, by DeepSpeed's names.

ds4d builds both itself and hands DeepSpeed the objects: so nothing is compiled (torch's own fused
kernels serve CPU and CUDA alike), weight decay keeps off norms and biases, and the schedule
counts optimizer steps only. Optimizers must be elementwise: under ZeRO each rank updates a flat
slice, and a rule that looks at whole matrices or at the number of ranks would change the training
curve with the layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Iterable, Mapping, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from ds4d.config.types import RunConfig


class Lion(Optimizer):
    """Sign of an interpolated momentum. Source: Chen et al. 2023, arXiv 2302.06675, algorithm 2."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                momentum = state["exp_avg"]
                update = torch.lerp(p.grad, momentum, beta1).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - beta2)


def _adam(groups, *, adam_w_mode: bool = True, torch_adam: bool = True, **params) -> Optimizer:
    """DeepSpeed's "Adam" decouples weight decay unless ``adam_w_mode`` is false."""
    params.pop("bias_correction", None)
    return (torch.optim.AdamW if adam_w_mode else torch.optim.Adam)(groups, fused=True, **params)


# lower-case name -> maker(param_groups, **params)
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": _adam,
    "adamw": _adam,
    "sgd": partial(torch.optim.SGD, fused=True),
    "adagrad": torch.optim.Adagrad,
    "lion": Lion,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "adamax": torch.optim.Adamax,
    "rmsprop": torch.optim.RMSprop,
    "adadelta": torch.optim.Adadelta,
}


def param_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], *, weight_decay: float, decay_all: bool
) -> list[dict[str, Any]]:
    """Trainable parameters in a group with weight decay and one without; either may be empty.

    Vectors (norms, biases) are not decayed unless ``decay_all``. Under ZeRO-3 a parameter is a
    flat shard, its own shape is in ``ds_shape``.
    """
    groups: dict[str, list[nn.Parameter]] = {"decay": [], "no_decay": []}
    for _, p in named_parameters:
        if p.requires_grad:
            is_vector = len(getattr(p, "ds_shape", p.shape)) < 2
            groups["no_decay" if is_vector and not decay_all else "decay"].append(p)
    decay = {"decay": weight_decay, "no_decay": 0.0}
    return [
        {"params": params, "weight_decay": decay[name], "name": name}
        for name, params in groups.items()
    ]


class OptimizerMaker(Protocol):
    """How an engine comes to its optimizer, when it has the parameters of this rank."""

    def groups(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> list[dict[str, Any]]:
        """Of the parameters, the same number on every rank; some may be empty. Each has a
        ``name`` of its own."""

    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        """Args:
        groups: some of these, none of them empty.
        """


@dataclass(frozen=True)
class FileOptimizer:
    """DeepSpeed's ``optimizer`` block: ``{"type": ..., "params": {...}}``."""

    config: Mapping[str, Any]
    decay_all: bool

    def groups(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]]
    ) -> list[dict[str, Any]]:
        decay = self.config.get("params", {}).get("weight_decay", 0.0)
        return param_groups(named_parameters, weight_decay=decay, decay_all=self.decay_all)

    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        params = dict(self.config.get("params", {}))
        if "betas" in params:
            params["betas"] = tuple(params["betas"])
        try:
            return OPTIMIZERS[self.config["type"].lower()](groups, **params)
        except (TypeError, ValueError) as error:
            raise ValueError(f"optimizer.params: {self.config['type']}: {error}") from error


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    config: Mapping[str, Any],
    *,
    decay_all: bool,
) -> Optimizer:
    """Of all of a model's parameters, from DeepSpeed's ``optimizer`` block."""
    maker = FileOptimizer(config, decay_all)
    return maker.make([group for group in maker.groups(named_parameters) if group["params"]])


def _after_warmup(shape: Callable[[float], float], step: int, warmup: int, total: int) -> float:
    """Linear warm-up from 0 to 1, then ``shape`` of the rest, 0..1: Hugging Face's convention."""
    if step < warmup:
        return step / warmup
    return shape(min(1.0, (step - warmup) / max(1, total - warmup)))


DECAYS: dict[str, Callable[[float, float], float]] = {
    "cosine": lambda floor, x: floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * x)),
    "linear": lambda floor, x: floor + (1 - floor) * (1 - x),
}


def build_scheduler(optimizer: Optimizer, config: Mapping[str, Any] | None, *, total_steps: int):
    """From DeepSpeed's ``scheduler`` block, or None: DeepSpeed's own schedules by their names, and
    ``cosine`` and ``linear`` (``warmup_steps`` or ``warmup_ratio``, ``min_lr_ratio``,
    ``total_steps``). All count optimizer steps, whatever the layout."""
    if config is None:
        return None
    name, params = config["type"], dict(config.get("params", {}))
    if name.lower() in DECAYS:
        total = params.get("total_steps", total_steps)
        ratio_steps = math.ceil(params.get("warmup_ratio", 0.0) * total)
        warmup = params.get("warmup_steps", ratio_steps)
        shape = partial(DECAYS[name.lower()], params.get("min_lr_ratio", 0.0))
        return LambdaLR(optimizer, lambda step: _after_warmup(shape, step, warmup, total))
    from deepspeed.runtime import lr_schedules

    return getattr(lr_schedules, name)(optimizer, **params)


def of_run(run: RunConfig, *, total_steps: int) -> dict[str, Any]:
    """For ``Engine.create``: what the file says of optimizer and schedule.

    Args:
        total_steps: optimizer steps of the whole run.
    """
    schedule = run.deepspeed.get("scheduler")
    return {
        "optimizer": FileOptimizer(run.deepspeed["optimizer"], run.training.decay_all),
        "scheduler": partial(build_scheduler, config=schedule, total_steps=total_steps),
    }

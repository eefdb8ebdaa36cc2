"""Where ZeRO-3's gathering of parameters meets what ds4d does with modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ds4d.mesh import DeepSpeedMpu

Partition = Callable[[nn.Module], None]


def partition_for(config: dict[str, Any], mpu: DeepSpeedMpu) -> Partition:
    """ZeRO-3's conversion of the parameters that a module itself owns."""
    context = deepspeed.zero.Init(
        module=nn.Identity(),
        data_parallel_group=mpu.get_data_parallel_group(),
        config_dict_or_path=config,
        mpu=mpu,
    )

    def partition(module: nn.Module) -> None:
        context._convert_to_zero_parameters(module.parameters(recurse=False))

    return partition


def hide_gathering(engine: DeepSpeedEngine) -> None:
    """From selective recomputation, which records what a layer computes and wants to find the same
    again. What is gathered in a layer's forward pass is another thing each time: parameters are
    gathered ahead, or kept from the pass before."""
    offload = engine.optimizer.parameter_offload
    for name in ("pre_sub_module_forward_function", "post_sub_module_forward_function"):
        setattr(offload, name, _hidden(getattr(offload, name)))


def _hidden(function: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    @wraps(function)
    def hidden(module: nn.Module) -> None:
        with _disable_current_modes():
            function(module)

    return hidden


@contextmanager
def forward_alone(engine: DeepSpeedEngine) -> Iterator[None]:
    """Forward passes within have no backward passes. Where nothing was traced before, DeepSpeed
    would take them for the order of a whole step, and gather ahead by it."""
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    untraced = coordinator.is_invalid_trace()
    yield
    if untraced and not coordinator.is_invalid_trace():
        coordinator._invalidate_trace()

"""Gradients between the backward passes and the optimizer's step: where DeepSpeed keeps them in
each ZeRO stage, and what is summed over ranks that it does not know of.

A pipeline's backward passes are not DeepSpeed's. After each of them ``accumulate`` is called; after
the last one what the stages share is summed, and DeepSpeed averages over dp x cp. Gradients of
which each tp rank has computed a part are summed after that, of what the step will use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn

from ds4d.comm import all_reduce
from ds4d.optimizer_state import of_wrapper

# -- of a pipeline ---------------------------------------------------------------------------------


def take_over_accumulation(engine: DeepSpeedEngine) -> None:
    """From here on backward passes are made without DeepSpeed: each is followed by
    ``accumulate``, and all those of a step by ``engine.allreduce_gradients`` and ``step``."""
    for hook in getattr(engine.optimizer, "_grad_acc_hooks", ()):
        hook.remove()
    engine.set_gradient_accumulation_boundary(True)
    engine.pipeline_parallelism = True  # ZeRO-1 and stage 0 reduce by what the parameters hold


def accumulate(engine: DeepSpeedEngine) -> None:
    """Add what backward passes have left in ``grad`` to where it is accumulated, in the dtype that
    was asked for."""
    optimizer = engine.optimizer
    if isinstance(optimizer, BF16_Optimizer):
        for group, params in enumerate(optimizer.bf16_groups):
            for index, param in enumerate(params):
                if param.grad is not None:
                    optimizer._update_hp_grad(param, group, index, clear_lp_grads=False)
                    param.grad = None
    elif getattr(optimizer, "use_grad_accum_attribute", False):
        optimizer.fill_grad_accum_attribute()


@torch.no_grad()
def sum_over_stages(
    engine: DeepSpeedEngine,
    params: list[nn.Parameter],
    ends: dist.ProcessGroup,
    data: dist.ProcessGroup,
) -> None:
    """Sum the accumulated gradients of a tied weight, of which the first and the last stage have
    a copy each, before they are averaged over dp x cp.

    More than two ranks' are averaged here already: DeepSpeed adds them up in an order that hangs on
    what else a stage has, and so the copies would drift apart, by rounding. What it then averages
    is the same on all of them.

    Collective: ``ends``, then ``data``, which is dp x cp.
    """
    optimizer = engine.optimizer
    for param in params:
        if isinstance(optimizer, BF16_Optimizer):
            gradient = param._hp_grad
        elif isinstance(optimizer, DeepSpeedZeroOptimizer):
            gradient = optimizer.get_gradient_for_reduction(param)
        else:
            gradient = param.grad
        all_reduce(gradient, ends, purpose="tied weights")
        if data.size() > 2:
            all_reduce(gradient, data, purpose="tied weights").div_(data.size())


# -- between the last backward pass and the step ---------------------------------------------------

Gradients = Iterator[tuple[nn.Parameter, Tensor]]


def _plain_gradients(engine: DeepSpeedEngine) -> Gradients:
    return ((p, p.grad) for p in engine.module.parameters() if p.grad is not None)


def _bf16_gradients(engine: DeepSpeedEngine) -> Gradients:
    """Whole on every rank: the norm and the clipping are of these, the step of a part."""
    optimizer = engine.optimizer
    for params, gradients in zip(optimizer.bf16_groups, optimizer.fp32_groups_gradients):
        yield from zip(params, gradients)


def _zero12_gradients(engine: DeepSpeedEngine) -> Gradients:
    """Of each parameter that this rank has a part of, that part."""
    optimizer = engine.optimizer
    if optimizer.cpu_offload:
        optimizer._wait_for_offload_copies()
    for index, params in enumerate(optimizer.params_in_partition):
        if optimizer.cpu_offload:
            flat = optimizer.single_partition_of_fp32_groups[index].grad
            gradients = [_placed(flat, optimizer, param) for param in params]
        else:
            held = optimizer.averaged_gradients[index]
            gradients = [g for g in held if not getattr(g, "_zero_padding", False)]
        yield from zip(params, gradients)


def _zero3_gradients(engine: DeepSpeedEngine) -> Gradients:
    """Of each parameter this rank's part, with the padding that makes parts equal."""
    optimizer = engine.optimizer
    for index, params in enumerate(optimizer.fp16_groups):
        if optimizer.offload_optimizer:
            flat = optimizer.fp32_partitioned_groups_flat[index].grad
            gradients = [_placed(flat, optimizer, param) for param in params]
        else:
            gradients = optimizer.averaged_gradients[index]
        yield from zip(params, gradients)


def _placed(flat: Tensor, optimizer: Any, param: nn.Parameter) -> Tensor:
    """Where DeepSpeed has copied a gradient to, with offload."""
    *_, offset, count = optimizer.grad_position[optimizer.get_param_id(param)]
    return flat.view(-1).narrow(0, offset, count)


_GRADIENTS: Mapping[type, Callable[[DeepSpeedEngine], Gradients]] = {
    BF16_Optimizer: _bf16_gradients,
    DeepSpeedZeroOptimizer_Stage3: _zero3_gradients,
    DeepSpeedZeroOptimizer: _zero12_gradients,
    torch.optim.Optimizer: _plain_gradients,
}


@torch.no_grad()
def multiply(engine: DeepSpeedEngine, factor: float) -> None:
    """What the step will use. Not with offload, whose norms are taken already."""
    for _, gradient in of_wrapper(engine, _GRADIENTS)(engine):
        gradient.mul_(factor)


# -- of which tp ranks have parts ------------------------------------------------------------------


def _partial(engine: DeepSpeedEngine) -> Gradients:
    return (x for x in of_wrapper(engine, _GRADIENTS)(engine) if getattr(x[0], "tp_partial", False))


def partial_gradients(engine: DeepSpeedEngine) -> list[Tensor]:
    """What this rank holds of the accumulated gradients, averaged over dp x cp, of parameters that
    carry ``tp_partial``: views on what the step will use.

    Only between the last backward pass and the step. On all ranks of a tp group, which hold equal
    shapes of every parameter, the lists have equal shapes.
    """
    return [gradient for _, gradient in _partial(engine)]


@torch.no_grad()
def sum_partial_gradients(engine: DeepSpeedEngine, group: dist.ProcessGroup) -> None:
    """Sum them over tp, in one flat buffer a dtype. Once a step, see ``partial_gradients``.

    Collective: ``group``, tp; nothing is sent where no parameter is partial.
    """
    found = list(_partial(engine)) if group.size() > 1 else []
    for dtype in dict.fromkeys(gradient.dtype for _, gradient in found):
        gradients = [gradient for _, gradient in found if gradient.dtype == dtype]
        flat = torch.cat([gradient.reshape(-1).to(engine.device) for gradient in gradients])
        all_reduce(flat, group, purpose="replicated gradients")
        for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients])):
            gradient.copy_(total.view_as(gradient))
    norms = getattr(engine.optimizer, "norm_for_param_grads", None)
    if norms is not None:  # with offload: DeepSpeed took them when it copied the gradients
        norms.update((engine.optimizer.get_param_id(p), g.double().norm()) for p, g in found)

"""Where a loss or a gradient stopped being finite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ds4d.data.batch import MicroBatch
from ds4d.engine import Engine
from ds4d.loss import count_targets
from ds4d.pipeline.stage import StandIn


def find_nonfinite(engine: Engine, micro_batches: Sequence[MicroBatch]) -> str | None:
    """Repeat a step that was not finite, without an update, and name the first bad tensor.

    Collective over the world. Gradients are left behind: the caller ends the run.

    Returns:
        one line with rank, pass, module and tensor.
    """
    pipeline = engine._pipeline
    stages = {} if pipeline is None else pipeline.stage_of_modules()
    names = {module: name or "the model" for name, module in engine.module.named_modules()}
    # this rank's first of either pass, with what orders them over all ranks: what is bad spreads
    # from forward to backward passes, and from stage to stage
    found: dict[bool, tuple[bool, int, int, str]] = {}

    def watch(what: str, *, backward: bool = False):
        def hook(module: nn.Module, inputs: Any, outputs: Any) -> None:  # or gradients of these
            made = inputs if backward else outputs
            for tensor in made if isinstance(made, (tuple, list)) else [made]:
                if isinstance(tensor, Tensor) and tensor.is_floating_point():
                    if backward not in found and not torch.isfinite(tensor).all():
                        stage = stages.get(module, 0)
                        place = (backward, -stage if backward else stage, dist.get_rank())
                        found[backward] = (*place, f"{what} of {names[module]}")

        return hook

    # what stands in for the parts of other stages passes on what was made there
    leaves = [
        module for module in names
        if not list(module.children()) and not isinstance(module, StandIn)
    ]  # fmt: skip
    handles = [module.register_forward_hook(watch("the output")) for module in leaves]
    watch_gradient = watch("the gradient at the input", backward=True)
    handles += [module.register_full_backward_hook(watch_gradient) for module in leaves]
    # a mean, as in training: fp16 would overflow elsewhere with the sum
    tokens = sum(count_targets(batch.targets) for batch in micro_batches).to(engine.device)
    scale = 1 / tokens.clamp(min=1)
    if pipeline is None:
        engine._pass_after_pass(micro_batches, scale)
    else:
        engine.run_schedule(micro_batches, scale)
    for handle in handles:
        handle.remove()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, min(found.values(), default=None))
    *_, rank, what = min(filter(None, everyone), default=(None, None))
    return what and f"rank {rank}: {what}"

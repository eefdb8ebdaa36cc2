"""DeepSpeed's optimizers, read as logical tensors: the one place that knows how each ZeRO stage
lays weights and moments out in memory.

Whatever the stage, the trainable state is a list of *flats*: tensors that the wrapped torch
optimizer steps on, each a row of segments that belong to named parameters:

    stage 0       a flat is a parameter, whole (half precision runs stage 1, see deepspeed_json)
    stages 1, 2   a flat is this rank's equal part of a parameter group
    stage 3       a flat is a sub-group; each parameter in it is split over the ranks

``Segment`` says which elements of which parameter lie where; from it follow the boxes of the
logical tensors, as views, for the weights and for every optimizer state of the same length.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Iterator

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ds4d.checkpoint.logical import LogicalTensor, Piece, boxes_of_range


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of parameter ``name`` lie at ``offset`` of a flat."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class Flat:
    """``key`` is what the torch optimizer's ``state`` is indexed by; ``data`` its elements."""

    key: Tensor
    data: Tensor
    group: int
    segments: tuple[Segment, ...]


def _plain_flats(engine: DeepSpeedEngine) -> Iterator[Flat]:
    for index, group in enumerate(engine.optimizer.param_groups):
        for param in group["params"]:
            name, shape = engine.param_names[param], tuple(param.shape)
            segment = Segment(name, shape, 0, param.numel(), 0)
            yield Flat(param, param.detach().view(-1), index, (segment,))


def _partition_flats(
    engine: DeepSpeedEngine, groups, offsets, partitions: list[Tensor]
) -> Iterator[Flat]:
    """A group's parameters stand in a row, cut into equal parts, one a rank."""
    rank = dist.get_rank(engine.optimizer.dp_process_group)
    for index, (params, starts, data) in enumerate(zip(groups, offsets, partitions)):
        left = rank * data.numel()
        right = left + data.numel()
        segments = []
        for param, first in zip(params, starts):
            start, stop = max(first, left), min(first + param.numel(), right)
            if start < stop:
                segments.append(
                    Segment(
                        engine.param_names[param],
                        tuple(param.shape),
                        start - first,
                        stop - first,
                        start - left,
                    )
                )
        yield Flat(data, data.detach(), index, tuple(segments))


def _bf16_flats(engine: DeepSpeedEngine) -> Iterator[Flat]:
    groups = engine.optimizer.bf16_groups
    offsets = []
    for params in groups:
        sizes = [param.numel() for param in params]
        offsets.append([sum(sizes[:i]) for i in range(len(sizes))])
    return _partition_flats(engine, groups, offsets, engine.optimizer.fp32_groups_flat_partition)


def _zero12_flats(engine: DeepSpeedEngine) -> Iterator[Flat]:
    optimizer = engine.optimizer
    return _partition_flats(
        engine,
        optimizer.round_robin_bit16_groups,
        optimizer.round_robin_bit16_offsets,
        optimizer.single_partition_of_fp32_groups,
    )


def _zero3_flats(engine: DeepSpeedEngine) -> Iterator[Flat]:
    optimizer = engine.optimizer
    for index, params in enumerate(optimizer.fp16_groups):
        data = optimizer.fp32_partitioned_groups_flat[index]
        segments, offset = [], 0
        for param in params:
            segment = _zero3_segment(engine.param_names[param], param, offset)
            if segment is not None:
                segments.append(segment)
            offset += param.ds_tensor.ds_numel
        yield Flat(data, data.detach(), optimizer.sub_group_to_group_id[index], tuple(segments))


def _zero3_segment(name: str, param: nn.Parameter, offset: int) -> Segment | None:
    """This rank's equal part of a parameter; None where only padding is left for it."""
    part = param.ds_tensor.ds_numel
    start = dist.get_rank(param.ds_process_group) * part
    stop = min(start + part, param.ds_numel)
    return Segment(name, tuple(param.ds_shape), start, stop, offset) if start < stop else None


def _flats(engine: DeepSpeedEngine) -> Iterator[Flat]:
    for kind, flats in (
        (BF16_Optimizer, _bf16_flats),
        (DeepSpeedZeroOptimizer_Stage3, _zero3_flats),
        (DeepSpeedZeroOptimizer, _zero12_flats),
        (torch.optim.Optimizer, _plain_flats),
    ):
        if isinstance(engine.optimizer, kind):
            return flats(engine)
    raise TypeError(f"{type(engine.optimizer).__name__}: an optimizer of DeepSpeed unknown here")


def _inner(engine: DeepSpeedEngine) -> torch.optim.Optimizer:
    """The torch optimizer inside DeepSpeed's wrapper, or the optimizer itself."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def logical_state(engine: DeepSpeedEngine) -> dict[str, LogicalTensor]:
    """Everything that a checkpoint holds, as views on the live storage of this rank."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    pieces: dict[str, list[Piece]] = {}
    state = _inner(engine).state
    trainable = {engine.param_names[p]: p for p in engine.module.parameters() if p.requires_grad}
    kinds = _state_kinds(engine)
    for name, param in trainable.items():
        shape = tuple(getattr(param, "ds_shape", param.shape))
        for kind in ("weight", *kinds):
            shapes[f"{kind}/{name}"] = (shape, torch.float32)
    for flat in _flats(engine):
        tensors = {"weight": flat.data} | {kind: state[flat.key][kind].view(-1) for kind in kinds}
        for segment in flat.segments:
            for kind, tensor in tensors.items():
                key = f"{kind}/{segment.name}"
                pieces.setdefault(key, []).extend(_pieces(tensor, segment))
                shapes[key] = (segment.shape, tensor.dtype)
    for key, shape, dtype, parts in _untrained(engine):
        shapes[key], pieces[key] = (shape, dtype), parts
    return {
        key: LogicalTensor(shape, dtype, tuple(pieces.get(key, ())))
        for key, (shape, dtype) in shapes.items()
    }


def _pieces(flat: Tensor, segment: Segment) -> Iterator[Piece]:
    offset = segment.offset
    for offsets, sizes in boxes_of_range(segment.shape, segment.start, segment.stop):
        count = math.prod(sizes)
        yield Piece(offsets, flat[offset : offset + count].view(sizes))
        offset += count


def _untrained(
    engine: DeepSpeedEngine,
) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, list[Piece]]]:
    """Frozen parameters, in parts under ZeRO-3, and persistent buffers, whole on every rank."""
    module: nn.Module = engine.module
    for name, param in module.named_parameters():
        if param.requires_grad:
            continue
        if hasattr(param, "ds_tensor"):
            segment = _zero3_segment(name, param, offset=0)
            pieces = [] if segment is None else list(_pieces(param.ds_tensor.data, segment))
            yield f"weight/{name}", tuple(param.ds_shape), param.dtype, pieces
        else:
            yield f"weight/{name}", tuple(param.shape), param.dtype, [_whole(param.data)]
    persistent = set(module.state_dict(keep_vars=True)) - {n for n, _ in module.named_parameters()}
    for name, buffer in module.named_buffers():
        if name in persistent:
            yield f"buffer/{name}", tuple(buffer.shape), buffer.dtype, [_whole(buffer)]


def _whole(tensor: Tensor) -> Piece:
    return Piece((0,) * tensor.dim(), tensor)


def _state_kinds(engine: DeepSpeedEngine) -> tuple[str, ...]:
    """The words of the optimizer's per-element state, empty before the first step."""
    for flat in _flats(engine):
        entry = _inner(engine).state.get(flat.key, {})
        return tuple(
            kind
            for kind, value in entry.items()
            if isinstance(value, Tensor) and value.dim() and value.numel() == flat.data.numel()
        )
    return ()


def _is_scalar(value: Any) -> bool:
    return isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.dim() == 0)


def scalars(engine: DeepSpeedEngine) -> dict[str, Any]:
    """The state that is not per element: step counts by group name, the loss scale. The same on
    every rank and for every layout."""
    inner = _inner(engine)
    groups: dict[str, dict[str, Any]] = {}
    for flat in _flats(engine):
        group = inner.param_groups[flat.group]
        entry = inner.state.get(flat.key, {})
        groups[group["name"]] = {k: float(v) for k, v in entry.items() if _is_scalar(v)}
    return {
        "kinds": list(_state_kinds(engine)),
        "groups": groups,
        "loss_scale": _loss_scale(engine),
        "skipped_steps": engine.skipped_steps,
    }


def _loss_scale(engine: DeepSpeedEngine) -> dict[str, float]:
    if not engine.fp16_enabled():
        return {}
    return {k: v for k, v in vars(engine.optimizer.loss_scaler).items() if type(v) in (int, float)}


@torch.no_grad()
def allocate(engine: DeepSpeedEngine, saved: dict[str, Any]) -> None:
    """Make the optimizer state that ``saved`` speaks of, to be filled in place, and set the
    scalars. A checkpoint from before the first step brings none."""
    inner = _inner(engine)
    for flat in _flats(engine):
        group = inner.param_groups[flat.group]
        if saved["kinds"]:
            state: dict[str, Any] = {
                key: torch.tensor(value, dtype=torch.float32, device=flat.key.device)
                for key, value in saved["groups"][group["name"]].items()
            }
            state |= {kind: torch.zeros_like(flat.key) for kind in saved["kinds"]}
            inner.state[flat.key] = state
    if saved["loss_scale"]:
        vars(engine.optimizer.loss_scaler).update(saved["loss_scale"])
    engine.skipped_steps = saved["skipped_steps"]


def seek(engine: DeepSpeedEngine, steps: int) -> None:
    """Set the schedule to where it stands after so many optimizer steps, and with it the learning
    rates (and the momenta, which OneCycle moves): they depend on nothing else."""
    schedule = engine.lr_scheduler
    if isinstance(schedule, LambdaLR):
        schedule.last_epoch = steps
        for group, base, factor in zip(
            _inner(engine).param_groups, schedule.base_lrs, schedule.lr_lambdas
        ):
            group["lr"] = base * factor(steps)
    elif schedule is not None and steps:
        schedule.step(steps - 1)  # DeepSpeed's count from -1


@torch.no_grad()
def publish(engine: DeepSpeedEngine) -> None:
    """Bring changed master weights into the parameters that the model computes with.

    Collective over dp x cp under ZeRO.
    """
    optimizer = engine.optimizer
    if isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        for index in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(index)
        if optimizer.persistent_parameters:
            optimizer.persistent_parameters[0].all_gather(optimizer.persistent_parameters)
    elif isinstance(optimizer, (BF16_Optimizer, DeepSpeedZeroOptimizer)):
        optimizer.update_lp_params()

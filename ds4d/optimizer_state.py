"""DeepSpeed's optimizers, read as logical tensors: the one place that knows how each ZeRO stage
lays weights and moments out in memory (``gradients.py`` knows of gradients).

Whatever the stage, the trainable state is a list of *flats*: tensors that the wrapped torch
optimizer steps on, each a row of segments that belong to named parameters:

    stage 0       a flat is a parameter, whole (half precision runs stage 1, see deepspeed_json)
    stages 1, 2   a flat is this rank's equal part of a parameter group
    stage 3       a flat is a sub-group; each parameter in it is split over the ranks

``Segment`` says which elements of which parameter lie where; from it follow the boxes of the
logical tensors, as views, for the weights and for every optimizer state of the same length. What
DeepSpeed calls a parameter may itself be a tp rank's part of a logical tensor (``Part``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from ds4d.checkpoint.logical import LogicalTensor, Piece, boxes_of_range, pieces_of
from ds4d.tensor_parallel.shard import Shard


@dataclass(frozen=True)
class Part:
    """What this tp rank holds of a parameter or buffer; all of it where ``shard`` is None."""

    name: str
    shape: tuple[int, ...]
    shard: Shard | None

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Part":
        # under ZeRO-3 a parameter is empty, its shape is in ds_shape
        shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
        return cls(name, shape, getattr(tensor, "tp_shard", None))

    @property
    def logical_shape(self) -> tuple[int, ...]:
        return self.shape if self.shard is None else self.shard.logical_shape(self.shape)

    def whole(self, tensor: Tensor) -> list[Piece]:
        """The pieces of the logical tensor that are in ``tensor``, which is all of the part."""
        return list(pieces_of(tensor, (0,) * tensor.dim(), self.shard))


@dataclass(frozen=True)
class Segment:
    """Elements [start, stop) of ``part`` lie at ``offset`` of a flat."""

    part: Part
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
            part = Part.of(engine.param_names[param], param)
            segment = Segment(part, 0, param.numel(), 0)
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
                part = Part.of(engine.param_names[param], param)
                segments.append(Segment(part, start - first, stop - first, start - left))
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
    """This rank's equal share of a parameter; None where only padding is left for it."""
    share = param.ds_tensor.ds_numel
    start = dist.get_rank(param.ds_process_group) * share
    stop = min(start + share, param.ds_numel)
    return Segment(Part.of(name, param), start, stop, offset) if start < stop else None


def _flats(engine: DeepSpeedEngine) -> Iterator[Flat]:
    return of_wrapper(engine, _FLATS)(engine)


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
        shape = Part.of(name, param).logical_shape
        for kind in ("weight", *kinds):
            shapes[f"{kind}/{name}"] = (shape, torch.float32)
    for flat in _flats(engine):
        tensors = {"weight": flat.data} | {kind: state[flat.key][kind].view(-1) for kind in kinds}
        for segment in flat.segments:
            if segment.part.name not in trainable:
                continue  # in place of a group that a stage does not have (``engine._fillers``)
            for kind, tensor in tensors.items():
                key = f"{kind}/{segment.part.name}"
                pieces.setdefault(key, []).extend(_pieces(tensor, segment))
                shapes[key] = (segment.part.logical_shape, tensor.dtype)
    for key, shape, dtype, held in _untrained(engine):
        shapes[key], pieces[key] = (shape, dtype), held
    return {
        key: LogicalTensor(shape, dtype, tuple(pieces.get(key, ())))
        for key, (shape, dtype) in shapes.items()
    }


def _pieces(flat: Tensor, segment: Segment) -> Iterator[Piece]:
    offset, part = segment.offset, segment.part
    for offsets, sizes in boxes_of_range(part.shape, segment.start, segment.stop):
        count = math.prod(sizes)
        yield from pieces_of(flat[offset : offset + count].view(sizes), offsets, part.shard)
        offset += count


def _untrained(
    engine: DeepSpeedEngine,
) -> Iterator[tuple[str, tuple[int, ...], torch.dtype, list[Piece]]]:
    """Frozen parameters, in parts under ZeRO-3, and persistent buffers, whole on every rank."""
    module: nn.Module = engine.module
    for param in module.parameters():
        if param.requires_grad:
            continue
        name = engine.param_names[param]
        part = Part.of(name, param)
        if hasattr(param, "ds_tensor"):
            segment = _zero3_segment(name, param, offset=0)
            held = [] if segment is None else list(_pieces(param.ds_tensor.data, segment))
        else:
            held = part.whole(param.data)
        yield f"weight/{name}", part.logical_shape, param.dtype, held
    names = set(nn.Module.state_dict(module, keep_vars=True))  # a script's may have its own
    persistent = names - {name for name, _ in module.named_parameters()}
    for name, buffer in module.named_buffers():
        if name in persistent:
            part = Part.of(name, buffer)
            yield f"buffer/{name}", part.logical_shape, buffer.dtype, part.whole(buffer)


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
    every rank of a stage."""
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


def merged_scalars(stages: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a whole model: a stage may have no parameter of a group, or none that learns."""
    groups = {name: values for stage in stages for name, values in stage["groups"].items()}
    kinds = next((stage["kinds"] for stage in stages if stage["kinds"]), [])
    return {**stages[0], "kinds": kinds, "groups": groups}


def _loss_scale(engine: DeepSpeedEngine) -> dict[str, float]:
    if not engine.fp16_enabled():
        return {}
    return {k: v for k, v in vars(engine.optimizer.loss_scaler).items() if type(v) in (int, float)}


@torch.no_grad()
def allocate(engine: DeepSpeedEngine, saved: dict[str, Any]) -> None:
    """Make the optimizer state that ``saved`` speaks of, to be filled in place, and set the
    scalars. A checkpoint from before the first step brings none."""
    inner, groups = _inner(engine), saved["groups"]
    of_fillers = next(iter(groups.values()), {})  # alone in a group (``engine._fillers``)
    for flat in _flats(engine):
        group = inner.param_groups[flat.group]
        if saved["kinds"]:
            state: dict[str, Any] = {
                key: torch.tensor(value, dtype=torch.float32, device=flat.key.device)
                for key, value in groups.get(group["name"], of_fillers).items()
            }
            state |= {kind: torch.zeros_like(flat.key) for kind in saved["kinds"]}
            inner.state[flat.key] = state
    if saved["loss_scale"]:
        vars(engine.optimizer.loss_scaler).update(saved["loss_scale"])
    engine.skipped_steps = saved["skipped_steps"]


def seek(engine: DeepSpeedEngine, steps: int) -> None:
    """``seek_schedule`` for the one that DeepSpeed steps."""
    seek_schedule(engine.lr_scheduler, steps)


def seek_schedule(schedule: Any, steps: int) -> None:
    """Set a schedule to where it stands after so many optimizer steps, and with it the learning
    rates (and the momenta, which OneCycle moves): they depend on nothing else.

    Args:
        schedule: of this file's makers, or None.
    """
    if isinstance(schedule, LambdaLR):
        schedule.last_epoch = steps
        groups = schedule.optimizer.param_groups
        for group, base, factor in zip(groups, schedule.base_lrs, schedule.lr_lambdas):
            group["lr"] = base * factor(steps)
        schedule._last_lr = [group["lr"] for group in groups]
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


@torch.no_grad()
def begin_masters(engine: DeepSpeedEngine, values: Callable[[str], Tensor]) -> None:
    """Give fp32 master weights their first values as they are: DeepSpeed has made them of the
    half-precision ones, which are rounded. What the model computes with stays as it is.

    Args:
        values: of a logical tensor by its name, on the CPU.
    """
    for key, tensor in logical_state(engine).items():
        kind, _, name = key.partition("/")
        pieces = [piece for piece in tensor.pieces if piece.tensor.dtype == torch.float32]
        if kind == "weight" and pieces:
            whole = values(name)
            for offsets, part in ((piece.offsets, piece.tensor) for piece in pieces):
                box = tuple(slice(at, at + n) for at, n in zip(offsets, part.shape))
                part.copy_(whole[box])


T = TypeVar("T")


def of_wrapper(engine: DeepSpeedEngine, table: Mapping[type, T]) -> T:
    """The entry for the class of DeepSpeed's that wraps the torch optimizer, or for a bare one."""
    for wrapper, entry in table.items():
        if isinstance(engine.optimizer, wrapper):
            return entry
    raise TypeError(f"{type(engine.optimizer).__name__}: an optimizer of DeepSpeed unknown here")


_FLATS: Mapping[type, Callable[[DeepSpeedEngine], Iterator[Flat]]] = {
    BF16_Optimizer: _bf16_flats,
    DeepSpeedZeroOptimizer_Stage3: _zero3_flats,
    DeepSpeedZeroOptimizer: _zero12_flats,
    torch.optim.Optimizer: _plain_flats,
}

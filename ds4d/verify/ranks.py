"""What each rank does, and how what all ranks hold becomes whole tensors again.

A rank trains by ``Trainer``, as in a real run, twice: one step of plain SGD without clipping, from
whose weights the exact gradient follows in every layout, however it is kept; and the steps that the
file asks for. It leaves its pieces in a file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds4d.checkpoint.logical import LogicalTensor
from ds4d.comm import count_traffic
from ds4d.config.types import RunConfig
from ds4d.data.prepare import PreparedData, prepare
from ds4d.engine import StepResult
from ds4d.mesh import Mesh
from ds4d.planner.traffic import bytes_sent
from ds4d.trainer import Trainer
from ds4d.verify.activations import Activations
from ds4d.verify.held import held_by
from ds4d.verify.plain import Result

# A power of two, and so large that the weights before are but rounding in those after.
RATE = 2.0**12
WEIGHT = "weight/"
SMALLEST_CHUNK = 2  # tokens

Pieces = dict[str, tuple[tuple[int, ...], list[tuple[tuple[int, ...], Tensor]]]]
# Runs ``train_here`` on the ranks of the run; raises ``RanksFailed``.
CallOnRanks = Callable[[RunConfig, Path], None]


class RanksFailed(RuntimeError):
    """They did not train to the end."""


@dataclass(frozen=True)
class RankResult:
    """Attributes:
    steps: what each step said.
    before, moved: weights at first, and after the step of SGD.
    after: the weights after the steps of the file.
    sent: bytes that the last step sent, by purpose.
    foretold: what the formulas say of that.
    activations: bytes that a pipeline rank kept at most in the last step, and those that its
        schedule may keep; 0 without a pipeline.
    """

    steps: list[StepResult]
    before: Pieces
    moved: Pieces
    after: Pieces
    sent: Counter
    foretold: Counter
    activations: tuple[int, int]


def train_here(run: RunConfig, results: Path, *, device: torch.device, mesh: Mesh) -> None:
    """One rank's part, written into the folder ``results``. Collective: the world."""
    data = prepare(run, sources=("train",), progress=False)
    sgd = {"type": "SGD", "params": {"lr": RATE}}
    keys = {**run.deepspeed, "optimizer": sgd, "gradient_clipping": 0.0}
    once = _trainer(run.replace(deepspeed=keys), data, results, device, mesh)
    before = _weights(once)
    once.engine.train_step(next(once.micro_batches()))
    moved = _weights(once)
    trainer = _trainer(run, data, results, device, mesh)
    *first, last = islice(trainer.micro_batches(), run.training.steps)
    steps = [trainer.engine.train_step(micro_batches) for micro_batches in first]
    activations = Activations(trainer.engine.module, mesh.coordinate.pp)
    watching = activations.watching() if run.parallel.pp > 1 else nullcontext()
    with count_traffic() as traffic, watching:
        steps.append(trainer.engine.train_step(last, recorder=activations))
    sent: Counter = Counter()
    for (purpose, _), count in traffic.sent.items():
        sent[purpose] += count
    foretold = bytes_sent(run, held_by(trainer.engine.module, run, mesh, last))
    kept = activations.peak, activations.planned
    found = RankResult(steps, before, moved, _weights(trainer), sent, foretold, kept)
    torch.save(found, results / f"rank-{mesh.rank}.pt")


def _trainer(run: RunConfig, data: PreparedData, *others: Any) -> Trainer:
    """Which deals short rows by their work, as long ones are."""
    trainer = Trainer(run, data, *others)
    trainer.cutter = replace(trainer.cutter, smallest_chunk=SMALLEST_CHUNK)
    return trainer


def _weights(trainer: Trainer) -> Pieces:
    state = trainer.engine.logical_state()
    return {
        name.removeprefix(WEIGHT): _pieces(tensor)
        for name, tensor in state.items()
        if name.startswith(WEIGHT)
    }


def _pieces(tensor: LogicalTensor) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], Tensor]]]:
    return tensor.shape, [(p.offsets, p.tensor.detach().float().clone()) for p in tensor.pieces]


@dataclass(frozen=True)
class LayoutResult:
    """Of all ranks together.

    Attributes:
        whole: as one process would have it.
        skipped: steps that were not taken, because something was not finite.
        disagreement: the largest relative difference between copies that several ranks hold of
            one tensor after the last step, and its name; 0 where all are the same.
        steps_agree: what the ranks say about the steps is the same.
        sent: bytes that all ranks sent in the last step, by purpose.
        foretold: what the formulas say of that, for the purposes that there is one for.
        activations: of each rank, bytes kept at most in the last step, and those that its schedule
            may keep; 0 without a pipeline.
    """

    whole: Result
    skipped: int
    disagreement: tuple[float, str]
    steps_agree: bool
    sent: Counter
    foretold: Counter
    activations: list[tuple[int, int]]


def train_in_layout(run: RunConfig, results: Path, call: CallOnRanks) -> LayoutResult:
    """Train on all ranks of the run.

    Args:
        results: an empty folder.

    Raises:
        RanksFailed: where one has raised, or died.
    """
    call(run, results)
    world = range(run.parallel.world_size)
    ranks: list[RankResult] = [
        torch.load(results / f"rank-{rank}.pt", weights_only=False) for rank in world
    ]
    before, moved, after = (
        _assembled([getattr(rank, name) for rank in ranks]) for name in ("before", "moved", "after")
    )
    steps = ranks[0].steps
    whole = Result(
        [step.loss for step in steps],
        [step.grad_norm for step in steps],
        [step.tokens for step in steps],
        {name: (before.whole[name] - x) / RATE for name, x in moved.whole.items()},
        before.whole,
        after.whole,
        [step.router_loss for step in steps if step.router_loss is not None],
    )
    return LayoutResult(
        whole,
        sum(step.skipped for step in steps),
        max(moved.disagreement, after.disagreement),
        all(rank.steps == steps for rank in ranks),
        sum((rank.sent for rank in ranks), Counter()),
        sum((rank.foretold for rank in ranks), Counter()),
        [rank.activations for rank in ranks],
    )


@dataclass
class _Assembled:
    whole: dict[str, Tensor]
    disagreement: tuple[float, str] = (0.0, "")


def _assembled(ranks: list[Pieces]) -> _Assembled:
    """What no rank holds stays NaN."""
    found = _Assembled({})
    for pieces_of in ranks:
        for name, (shape, pieces) in pieces_of.items():
            full = found.whole.setdefault(name, torch.full(shape, float("nan")))
            for offsets, tensor in pieces:
                box = full[tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape))]
                off = (box - tensor)[~box.isnan()].norm()
                if off:
                    found.disagreement = max(found.disagreement, (float(off / tensor.norm()), name))
                box.copy_(tensor)
    return found

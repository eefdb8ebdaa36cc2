"""The one engine of all schedules: runs a rank's passes in their order, and moves what they need.

A pass of a micro-batch through a chunk takes the hidden state from the stage before (or the tokens)
and hands its own on; its backward pass goes the other way. What is held in between is the chunk's
input and the way back through it, not its output: that is let go when it has been sent.

Letters: B sequences, S tokens, s = S / t of them under sequence parallelism, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ds4d.comm import broadcast
from ds4d.config.types import PipelineConfig
from ds4d.data.batch import MicroBatch
from ds4d.loss import Objective, count_targets, model_inputs, padded, sum_loss, whole_logits
from ds4d.mesh import Mesh
from ds4d.pipeline.actions import Action, Kind, Schedule
from ds4d.pipeline.p2p import Mail, Message, messages_to, open_lanes
from ds4d.pipeline.recorder import OFF, Recorder
from ds4d.pipeline.schedules import (
    forward_only,
    forward_passes,
    make_schedule,
    placement_of,
)
from ds4d.pipeline.stage import Stages
from ds4d.router_loss import RouterLoss
from ds4d.tensor_parallel import sequence
from ds4d.tensor_parallel.state import TensorParallel
from ds4d.weight_gradients import Deferred, deferring, make_deferrable

SPLIT_BACKWARD = ("zb-h1", "zbv")


class _Held(NamedTuple):
    """Between the forward and the backward pass of a micro-batch through a chunk.

    Attributes:
        hidden: what went in, a leaf; None: the embedding is in the chunk.
        end: where the way back begins; None: nothing in the chunk learns.
        share: where that of the routers' loss begins; None: there is none.
    """

    hidden: Tensor | None
    end: GradientEdge | None
    share: GradientEdge | None


class Pipeline:
    """This rank's chunks, in the order of a schedule. Its methods are collective over ``pp`` (and
    whatever the model's passes are).

    Args:
        stages: this rank's part of the model.
        config: the schedule, and chunks on each rank.
    """

    def __init__(
        self, stages: Stages, mesh: Mesh, config: PipelineConfig, *, device: torch.device
    ) -> None:
        self.stages = stages
        self._mesh, self._device = mesh, device
        open_lanes(mesh, device)
        schedule, chunks = config.schedule, config.chunks
        self._rank, self._ranks = mesh.coordinate.pp, mesh.parallel.pp
        self._placement = placement_of(schedule, self._ranks, chunks)
        self._mine = tuple(self._placement.of_rank(self._rank))
        self._tp: TensorParallel = stages.model.ds4d_tp
        self._router_loss: RouterLoss | None = stages.model.ds4d_router_loss
        if schedule in SPLIT_BACKWARD:
            make_deferrable(stages.model)
            self._tp.split_backward = True

        def training(micro_batches: int) -> Schedule:
            return make_schedule(
                schedule, ranks=self._ranks, chunks=chunks, micro_batches=micro_batches
            )

        orders: dict[str, Callable[[int], Schedule]] = {
            "train": training,
            "route": lambda micro_batches: forward_passes(training(micro_batches)),
            "evaluate": partial(forward_only, self._placement),
        }

        @lru_cache(maxsize=8)
        def plan(purpose: str, micro_batches: int):
            order = orders[purpose](micro_batches)
            return order, messages_to(self._rank, order)

        self._plan = plan

    def train(
        self,
        batches: Sequence[MicroBatch],
        objective: Objective,
        *,
        scale: Tensor,
        accumulated: Callable[[], None],
        recorder: Recorder = OFF,
    ) -> Tensor:
        """All forward and backward passes of one step.

        Args:
            batches: on the device.
            scale: the sum of token losses is multiplied by it before its backward pass.
            accumulated: called after each pass that has added to gradients.
            recorder: is told when each pass runs.

        Returns:
            the sum of token losses of each micro-batch on the ranks that have the last stage, else
            zeros; fp32 [micro-batches].
        """
        schedule, incoming = self._plan("train", len(batches))
        recorder.begin(schedule)
        run = _Run(self, schedule, incoming, batches, recorder)
        with torch.enable_grad():
            return run.train(objective, scale, accumulated)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[MicroBatch]) -> Iterator[tuple[Tensor, Tensor]]:
        """(sum of token losses, count of valid targets) of each micro-batch, float64 scalars, on
        the ranks that have the last stage; zeros on the others.

        Args:
            batches: on any device; as many on every rank.
        """
        batches = iter(batches)
        # several at once, so that all stages are busy
        while group := [batch.to(self._device) for batch in islice(batches, 4 * self._ranks)]:
            yield from _Run(self, *self._plan("evaluate", len(group)), group).evaluate()

    @torch.no_grad()
    def logits(self, batch: MicroBatch) -> Tensor:
        """[B, S, V] of this rank's tokens, the same on all stages.

        Args:
            batch: on the device.
        """
        run = _Run(self, *self._plan("evaluate", 1), [batch], last=whole_logits)
        found = run.last_output()
        last = self._placement.places[-1].rank
        shape = torch.tensor([0, 0, 0] if found is None else found.shape, device=self._device)
        shape = broadcast(shape, last, self._mesh.group("pp"), purpose="logits").tolist()
        if found is None:
            found = torch.empty(shape, dtype=self.stages.model.dtype, device=self._device)
        return broadcast(found.contiguous(), last, self._mesh.group("pp"), purpose="logits")

    def route(self, batches: Sequence[MicroBatch]) -> None:
        """For ``RouterLoss.counting``: the forward passes of ``train`` alone, in the order in which
        each rank makes them there, and so with the same random numbers.

        Args:
            batches: on the device.
        """
        _Run(self, *self._plan("route", len(batches)), batches).evaluate()

    def stage_of_modules(self) -> dict[nn.Module, int]:
        """The virtual stage of each module that is part of one."""
        return {
            module: stage
            for stage, chunk in zip(self._mine, self.stages.chunks, strict=True)
            for part in chunk.modules.values()
            for module in part.modules()
        }

    # -- what a run asks for ----------------------------------------------------------------

    def new_hidden(self, batch: MicroBatch) -> Tensor:
        """[B, s, E], to be received into."""
        rows, tokens = batch.input_ids.shape
        if self._tp.sequence_parallel:
            tokens //= self._tp.size
        return self.stages.new_hidden((rows, tokens))


class _Run:
    """One pass through a schedule."""

    def __init__(
        self,
        pipeline: Pipeline,
        schedule: Schedule,
        incoming: dict[int, tuple[Message, ...]],
        batches: Sequence[MicroBatch],
        recorder: Recorder = OFF,
        last: Callable[..., Tensor] | None = None,
    ) -> None:
        self._last = sum_loss if last is None else last
        self._pipeline, self._stages = pipeline, pipeline.stages
        self._recorder = recorder
        self._places = schedule.placement.places
        self._actions = schedule.actions[pipeline._rank]
        self._batches = [padded(batch, pipeline._tp) for batch in batches]
        self._mail = Mail(
            pipeline._mesh,
            incoming,
            lambda message: pipeline.new_hidden(self._batches[message.micro_batch]),
        )
        self._here: dict[Message, Tensor] = {}  # between two chunks of this rank
        self._held: dict[tuple[int, int], _Held] = {}
        self._deferred: dict[tuple[int, int], Deferred] = {}

    def train(self, objective: Objective, scale: Tensor, accumulated: Callable[[], None]) -> Tensor:
        sums = torch.zeros(
            len(self._batches), dtype=torch.float32, device=self._pipeline._device
        )
        for action in self._actions:
            with self._recorder.running(action):
                if action.kind is Kind.FORWARD:
                    loss = self._forward(action, objective, scale)
                    if loss is not None:
                        sums[action.micro_batch] += loss
                elif action.kind is Kind.WEIGHT:
                    self._deferred.pop(action[1:]).compute()
                    accumulated()
                else:
                    self._backward(action)
                    accumulated()
        self._mail.finish()
        return sums

    def evaluate(self) -> list[tuple[Tensor, Tensor]]:
        zero = torch.zeros((), dtype=torch.float64, device=self._pipeline._device)
        found = [(zero, zero)] * len(self._batches)
        for action in self._actions:
            loss = self._forward(action, Objective(), 1.0)
            if loss is not None:
                count = count_targets(self._batches[action.micro_batch].targets)
                found[action.micro_batch] = (loss.double(), count.double())
        self._mail.finish()
        return found

    def last_output(self) -> Tensor | None:
        """What the last chunk makes of the last micro-batch; None: another rank has it."""
        found = None
        for action in self._actions:
            output = self._forward(action, Objective(), 1.0)
            found = output if output is not None else found
        self._mail.finish()
        return found

    def _forward(
        self, action: Action, objective: Objective, scale: Tensor | float
    ) -> Tensor | None:
        """Returns: the loss, of the last chunk; without the way back, which holds its input."""
        chunk, batch = self._stages.chunks[action.chunk], self._batches[action.micro_batch]
        stage = self._pipeline._mine[action.chunk]
        model, hidden, embeds = self._stages.model, None, None
        if not chunk.first:
            hidden = self._take(Message(stage, action.micro_batch, gradient=False))
            hidden.requires_grad_(torch.is_grad_enabled())
            embeds = self._stages.embeds(batch.input_ids.shape)
        routers = self._pipeline._router_loss
        watching = nullcontext(()) if routers is None else routers.watching()
        with watching as seen, self._stages.running(chunk, batch.input_ids.shape, hidden) as stream:
            if chunk.last:
                output = self._last(model, batch, objective, scale=scale, embeds=embeds)
            else:
                base = model.base_model
                with sequence.scattered(self._pipeline._tp):
                    base(**model_inputs(base, batch, embeds))
                output = stream.taken
        share = None if routers is None else routers.share(seen, batch)
        if torch.is_grad_enabled():
            end = output * scale if chunk.last else output
            self._held[action[1:]] = _Held(hidden, _edge(end), _edge(share))
        if chunk.last:
            return output.detach()
        self._give(Message(stage + 1, action.micro_batch, gradient=False), output.detach())
        return None

    def _backward(self, action: Action) -> None:
        chunk, stage = self._stages.chunks[action.chunk], self._pipeline._mine[action.chunk]
        hidden, *ends = self._held.pop(action[1:])
        gradient = None
        if not chunk.last:
            gradient = self._take(Message(stage, action.micro_batch, gradient=True))
        if action.kind is Kind.INPUT:
            with deferring() as self._deferred[action[1:]]:
                _go_back(ends, [gradient, None])
        else:
            _go_back(ends, [gradient, None])
        if not chunk.first:
            answer = torch.zeros_like(hidden) if hidden.grad is None else hidden.grad
            self._give(Message(stage - 1, action.micro_batch, gradient=True), answer)

    def _take(self, message: Message) -> Tensor:
        here = self._here.pop(message, None)
        if here is None:
            here = self._mail.receive(message)
            self._recorder.arrived()
        return here

    def _give(self, message: Message, x: Tensor) -> None:
        to = self._places[message.stage].rank
        if to == self._pipeline._rank:
            self._here[message] = x
        else:
            self._mail.send(x, to)


def _edge(x: Tensor | None) -> GradientEdge | None:
    return None if x is None or not x.requires_grad else get_gradient_edge(x)


def _go_back(ends: Sequence[GradientEdge | None], gradients: Sequence[Tensor | None]) -> None:
    """From all ends at once; None for a gradient: of a scalar, it is 1."""
    pairs = [(end, gradient) for end, gradient in zip(ends, gradients) if end is not None]
    if pairs:
        torch.autograd.backward(*zip(*pairs))

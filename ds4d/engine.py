"""The one face of training: ``train_step(micro_batches) -> StepResult``, over DeepSpeed.

What happens in a step, and who takes part:

1. count: the valid targets of all micro-batches, summed over dp x cp. Before the first forward
   pass, which computes the first gradients: those that logits get. Where routers have a loss,
   their choices are counted, too, in forward passes of their own (``router_loss.py``);
2. each micro-batch: forward, loss = (sum over its targets) * dp * cp / count, backward. DeepSpeed
   averages gradients over dp x cp; the factor undoes it, so that what is accumulated is the
   gradient of the mean over the global batch, however unequal the counts;
   With pp > 1 a schedule orders these passes (``pipeline/engine.py``), gradients are accumulated
   here, and those of a tied weight are summed over its two stages before DeepSpeed averages;
3. tp: gradients of which each tp rank has computed a part are summed, in one buffer;
4. step: norm, clipping, optimizer, schedule (DeepSpeed), skipped when anything is not finite;
5. report: the loss, summed over pp x dp x cp: only the last stages have a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.optim import Optimizer

from ds4d import gradients, optimizer_state
from ds4d.checkpoint.logical import LogicalTensor
from ds4d.comm import open_transport
from ds4d.config.deepspeed_json import to_deepspeed
from ds4d.config.types import RunConfig
from ds4d.data.batch import MicroBatch
from ds4d.loss import Objective, count_targets, eval_sums, padded, sum_loss
from ds4d.mesh import DeepSpeedMpu, Mesh
from ds4d.optim import OptimizerMaker
from ds4d.pipeline.engine import Pipeline
from ds4d.pipeline.recorder import OFF, Recorder
from ds4d.router_loss import RouterLoss
from ds4d.zero3 import Partition, forward_alone, hide_gathering, partition_for
from ds4d.zero_engine import ZeroEngine


@dataclass(frozen=True)
class StepResult:
    """Of one optimizer step; the same on every rank.

    Attributes:
        loss: mean over the valid targets of the global batch.
        grad_norm: L2 norm of the whole gradient before clipping.
        tokens: valid targets in the global batch.
        lr: the learning rate used.
        skipped: not finite, so weights, moments and schedule were left alone.
        loss_scale: of fp16, else None.
        router_loss: that balances experts, of the global batch, without its coefficient and no part
            of ``loss``; None: the model has none.
    """

    loss: float
    grad_norm: float
    tokens: int
    lr: float
    skipped: bool
    loss_scale: float | None
    router_loss: float | None = None


class Stepped(NamedTuple):
    """Of one optimizer step.

    Attributes:
        grad_norm: L2 norm of the whole gradient before clipping.
        skipped: not finite, so weights, moments and schedule were left alone.
    """

    grad_norm: float
    skipped: bool


def _fill_empty(groups: list[dict[str, Any]], model: nn.Module) -> dict[str, nn.Parameter]:
    """What a stage's optimizer has in the groups of which the stage trains nothing: zeros, in no
    checkpoint. Torch's optimizers refuse to have nothing, and DeepSpeed sums norms one group after
    the other, over all stages, which must have the same groups."""
    fillers = {}
    for number, group in enumerate(groups):
        if not group["params"]:
            zeros = torch.zeros(1, dtype=model.dtype, device=model.device)
            fillers[f"filler_{number}"] = filler = nn.Parameter(zeros)
            filler.tensor_model_parallel = True  # DeepSpeed fails on a rank that counts nothing
            group["params"] = [filler]
    return fillers


class Engine:
    """One model on one layout. Every method is collective over the world unless it says so."""

    def __init__(
        self,
        module: nn.Module,
        engine: DeepSpeedEngine,
        mesh: Mesh,
        device: torch.device,
        objective: Objective,
        pipeline: Pipeline | None = None,
        fillers: Iterable[nn.Parameter] = (),
    ) -> None:
        self.module = module
        self.device = device
        self.objective = objective
        self._engine = engine
        self._mesh = mesh
        self._group = mesh.group("dp_cp")
        self._group_size = mesh.size("dp_cp")
        self._pipeline = pipeline
        self._router_loss: RouterLoss | None = getattr(module, "ds4d_router_loss", None)
        self._fillers = list(fillers)
        tied = [] if pipeline is None else pipeline.stages.tied
        self._tied = [param for param in tied if param.requires_grad]

    @classmethod
    def create(
        cls,
        run: RunConfig,
        mesh: Mesh,
        build: Callable[[Partition | None], nn.Module],
        *,
        device: torch.device,
        optimizer: OptimizerMaker,
        scheduler: Callable[[Optimizer], Any],
    ) -> "Engine":
        """Build the model and wrap it. This is the only caller of DeepSpeed's engine.

        Args:
            build: makes the model on ``device``; under ZeRO-3 it is given a function to be
                called on each module as soon as its own parameters are filled, which leaves
                only this rank's part of them. With pp > 1 the model has been cut into
                ``pipeline.stage.Stages``.
            optimizer: makes that of this rank's parameters.
            scheduler: makes what DeepSpeed steps with it; gives None where somebody else does.
        """
        config = to_deepspeed(run, on_cpu=device.type == "cpu")
        mpu = DeepSpeedMpu(mesh)
        model = build(partition_for(config, mpu) if run.zero_stage == 3 else None)
        groups = optimizer.groups(model.named_parameters())
        fillers = _fill_empty(groups, model) if run.parallel.pp > 1 else {}
        for name, filler in fillers.items():
            model.register_parameter(name, filler)
        stepped = optimizer.make([group for group in groups if group["params"]])
        engine = ZeroEngine(
            args=None,
            model=model,
            optimizer=stepped,
            model_parameters=None,
            lr_scheduler=scheduler(stepped),
            mpu=mpu,
            dist_init_required=False,
            config=config,
            config_class=DeepSpeedConfig(config, mpu),
        )
        if run.zero_stage == 3 and run.recompute == "selective":
            hide_gathering(engine)
        for name in fillers:  # DeepSpeed knows them now
            delattr(model, name)
        open_transport(mesh.group("ring"), device)
        objective = Objective(run.training.label_smoothing, run.training.z_loss)
        pipeline = None
        if run.parallel.pp > 1:
            pipeline = Pipeline(model.ds4d_stages, mesh, run.pipeline, device=device)
            gradients.take_over_accumulation(engine)
            engine.param_names |= pipeline.stages.shared_names
        return cls(model, engine, mesh, device, objective, pipeline, fillers.values())

    @property
    def lr(self) -> float:
        return float(self._engine.optimizer.param_groups[0]["lr"])

    @property
    def monitor(self) -> Any:
        """DeepSpeed's own tensorboard / wandb / csv writers."""
        return self._engine.monitor

    def train_step(
        self, micro_batches: Sequence[MicroBatch], *, recorder: Recorder = OFF
    ) -> StepResult:
        """One optimizer step on this rank's share of the global batch.

        Args:
            micro_batches: ``gradient_accumulation_steps`` of them, on any device.
            recorder: of the passes of a pipeline.
        """
        engine = self._engine
        lr = self.lr
        tokens = self.count(micro_batches).sum()
        scale = self.mean_scale(tokens)
        engine.train()
        if self._router_loss is not None:
            self._count_routes(micro_batches)
        if self._pipeline is None:
            loss_sum = self._pass_after_pass(micro_batches, scale)
        else:
            loss_sum = self.run_schedule(micro_batches, scale, recorder).sum()
        stepped = self.step()
        self.sum_losses(loss_sum)
        return StepResult(
            loss=float(loss_sum / tokens.clamp(min=1)),
            grad_norm=stepped.grad_norm,
            tokens=int(tokens),
            lr=lr,
            skipped=stepped.skipped,
            loss_scale=float(engine.optimizer.loss_scale) if engine.fp16_enabled() else None,
            router_loss=None if self._router_loss is None else float(self._router_loss.value),
        )

    # -- the parts of a step ----------------------------------------------------------------

    def count(self, micro_batches: Sequence[MicroBatch]) -> Tensor:
        """Valid targets of each micro-batch over dp x cp; int64 [micro-batches]."""
        counts = torch.stack([count_targets(batch.targets) for batch in micro_batches])
        counts = counts.to(self.device)
        dist.all_reduce(counts, group=self._group)
        return counts

    def mean_scale(self, tokens: Tensor) -> Tensor:
        """What a sum of token losses is multiplied by before its backward pass, so that gradients
        come to be those of the mean over ``tokens``."""
        return self._group_size / tokens.clamp(min=1)

    def sum_losses(self, loss_sum: Tensor) -> None:
        """In place, over the ranks that each have a part."""
        dist.all_reduce(loss_sum, group=self._mesh.group("pp_dp_cp"))

    def forward(self, batch: MicroBatch, scale: Tensor) -> Tensor:
        """The sum of a micro-batch's token losses here, with its way back; without a pipeline.

        Args:
            scale: what it will be multiplied by (``mean_scale``).
        """
        return self._forward(batch, scale * self._loss_scale)[0]

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Args:
        last: of the step. Gradients are then reduced.
        """
        self._engine.set_gradient_accumulation_boundary(last)
        self._engine.backward(loss, scale_wrt_gas=False)
        if not last:
            self._engine.step()  # counts micro-batches

    def clip_at(self, max_norm: float) -> None:
        """From the next step on; 0: not at all."""
        self._engine._config.gradient_clipping = max_norm
        if hasattr(self._engine.optimizer, "clip_grad"):
            self._engine.optimizer.clip_grad = max_norm

    def multiply_gradients(self, factor: float) -> None:
        """Of a pipeline, after ``run_schedule``."""
        gradients.multiply(self._engine, factor)

    def step(self) -> Stepped:
        """After the last backward pass."""
        engine, skipped_before = self._engine, self._engine.skipped_steps
        gradients.sum_partial_gradients(engine, self._mesh.group("tp"))
        engine.step()
        norm = engine.get_global_grad_norm()
        norm = float("nan") if norm is None else float(norm)
        return Stepped(norm, engine.skipped_steps > skipped_before)

    @property
    def _loss_scale(self) -> float:
        """Of fp16."""
        return self._engine.optimizer.loss_scale if self._engine.fp16_enabled() else 1.0

    def _count_routes(self, micro_batches: Sequence[MicroBatch]) -> None:
        """The forward passes of the step alone, with the random numbers that they will have again.
        What is to come of them has the factor that undoes DeepSpeed's averaging, too."""
        loss, devices = self._router_loss, [self.device] if self.device.type == "cuda" else []
        scale = self._group_size * (1.0 if self._pipeline is None else self._loss_scale)
        group = self._mesh.group("pp_dp_cp")
        with ExitStack() as within:
            within.enter_context(torch.random.fork_rng(devices))
            within.enter_context(loss.counting(group, self.device, scale=scale))
            if self._pipeline is not None:
                self._pipeline.route([batch.to(self.device) for batch in micro_batches])
                return
            if self._engine.zero_optimization_partition_weights():
                within.enter_context(forward_alone(self._engine))
            for batch in micro_batches:
                self._forward(batch, 1.0)

    def _forward(self, batch: MicroBatch, scale: Tensor | float) -> tuple[Tensor, Tensor | None]:
        """The sum of a micro-batch's token losses, and its share of the routers' loss."""
        batch, routers = batch.to(self.device), self._router_loss
        if routers is None:
            return sum_loss(self._engine, batch, self.objective, scale=scale), None
        batch = padded(batch, self.module.ds4d_tp)
        with routers.watching() as seen:
            loss = sum_loss(self._engine, batch, self.objective, scale=scale)
        return loss, routers.share(seen, batch)

    def _pass_after_pass(self, micro_batches: Sequence[MicroBatch], scale: Tensor) -> Tensor:
        """The sum of token losses; the last ``step`` is the caller's."""
        engine = self._engine
        loss_sum = torch.zeros((), dtype=torch.float32, device=self.device)
        for number, batch in enumerate(micro_batches):
            if number:
                engine.step()  # counts micro-batches
            loss, share = self._forward(batch, scale * self._loss_scale)
            loss_sum += loss.detach()
            whole = loss * scale if share is None else loss * scale + share
            engine.backward(whole, scale_wrt_gas=False)
        return loss_sum

    def run_schedule(
        self, micro_batches: Sequence[MicroBatch], scale: Tensor, recorder: Recorder = OFF
    ) -> Tensor:
        """All passes of a pipeline, forward and backward, in the order of its schedule.

        Returns:
            the sum of token losses of each micro-batch, [micro-batches]; zeros where this rank does
            not have the last stage.
        """
        engine = self._engine
        for filler in self._fillers:
            filler.grad = torch.zeros_like(filler)
        loss_sums = self._pipeline.train(
            [batch.to(self.device) for batch in micro_batches],
            self.objective,
            scale=scale * self._loss_scale,
            accumulated=partial(gradients.accumulate, engine),
            recorder=recorder,
        )
        gradients.sum_over_stages(engine, self._tied, self._mesh.group("pp_ends"), self._group)
        engine.allreduce_gradients()
        return loss_sums

    def set_training(self, training: bool) -> None:
        """Train or eval mode, of the model and of what is around it."""
        if self._engine.training != training or self.module.training != training:
            self._engine.train(training)

    def __call__(self, **inputs: Any) -> Any:
        """The model as DeepSpeed runs it, without a pipeline."""
        return self._engine(**inputs)

    @property
    def optimizer(self) -> Optimizer:
        """As DeepSpeed has wrapped it."""
        return self._engine.optimizer

    @property
    def pipeline(self) -> Pipeline | None:
        return self._pipeline

    def eval_sums(self, batches: Iterable[MicroBatch]) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each micro-batch (sum of token losses, count of valid targets), float64 scalars: of
        this rank alone, and nothing where it does not have the last stage. See ``loss.eval_sums``.

        Every rank must give as many, for under ZeRO-3 a forward pass is collective, and so it is
        along a pipeline.
        """
        self.set_training(False)
        if self._pipeline is None:
            return eval_sums(self._engine, batches, device=self.device)
        return self._pipeline.evaluate(batches)

    def logical_state(self) -> dict[str, LogicalTensor]:
        """Weights, optimizer state and buffers as logical tensors; views, nothing is copied.

        Optimizer state that does not exist yet (before the first step) is absent.
        """
        return optimizer_state.logical_state(self._engine)

    def begin_masters(self, values: Callable[[str], Tensor]) -> None:
        """See ``optimizer_state.begin_masters``."""
        optimizer_state.begin_masters(self._engine, values)

    def scalars(self) -> dict[str, Any]:
        """What else the optimizer, schedule and loss scale are made of, as JSON: of all stages
        together."""
        stages: list[Any] = [None] * self._mesh.size("pp")
        mine = optimizer_state.scalars(self._engine)
        dist.all_gather_object(stages, mine, group=self._mesh.group("pp"))
        return optimizer_state.merged_scalars(stages)

    @contextmanager
    def restoring(
        self, scalars: dict[str, Any], *, step: int
    ) -> Iterator[dict[str, LogicalTensor]]:
        """Give out the state to be filled in place, then put it to use.

        Args:
            scalars: as ``scalars()`` returned when the checkpoint was written.
            step: steps taken until then, skipped ones included. The learning rate follows from
                it and from this run's schedule.

        Collective over dp x cp.
        """
        optimizer_state.allocate(self._engine, scalars)
        optimizer_state.seek(self._engine, step - scalars["skipped_steps"])
        yield optimizer_state.logical_state(self._engine)
        optimizer_state.publish(self._engine)

"""One run of a script: its model, once that is cut, the engine, and where training stands."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from ds4d.accelerate.calls import Work
from ds4d.accelerate.gathered import meet, whole_tensors
from ds4d.accelerate.lazy import InFiles, source_of
from ds4d.accelerate.takeover import Given, Original, take_over
from ds4d.accelerate.tensors import gather
from ds4d.checkpoint.find import locate
from ds4d.checkpoint.load import load, read_extra
from ds4d.checkpoint.save import save
from ds4d.config.load import resolved
from ds4d.config.types import RunConfig
from ds4d.context_parallel import Cutter
from ds4d.data.batch import MicroBatch
from ds4d.engine import Engine, Stepped
from ds4d.loss import eval_sums
from ds4d.mesh import Mesh
from ds4d.model.build import DTYPES
from ds4d.optim import OptimizerMaker
from ds4d.optimizer_state import seek_schedule
from ds4d.pipeline.engine import Pipeline
from ds4d.pipeline.generate import join_stages
from ds4d.pipeline.schedules import placement_of
from ds4d.resume import from_rank_0
from ds4d.zero3 import Partition

UNEVEN = (
    "ds4d.parallel.pp {pp}: the losses of one step were multiplied by different numbers ({factors})"
    " before backward; a pipeline has gone back already, and can only multiply them all by one"
)


@dataclass(frozen=True)
class Optimization:
    """How the engine comes to its optimizer, and the run to a schedule.

    Attributes:
        schedule: makes that of the file, or gives None: the script has its own.
        groups: of the script's own optimizer; None: it has none.
    """

    optimizer: OptimizerMaker
    schedule: Callable[[Optimizer], Any]
    groups: list[dict[str, Any]] | None = None


class ScriptRun:
    """Args:
    config: the file, completed.
    module: the script's model, whole; it is cut here.
    optimization: None: the model is only looked at, for now.

    Collective: the world, in all but the properties.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: Mesh,
        module: PreTrainedModel,
        original: Original,
        *,
        device: torch.device,
        optimization: Optimization | None,
    ) -> None:
        self.config, self.mesh, self.device = config, mesh, device
        self.module, self.original = module, original
        self.cutter: Cutter = mesh.cutter
        self.engine: Engine | None = None
        self.stepped: Stepped | None = None
        self.steps = 0  # taken, skipped ones included
        self.schedule: Any = None
        self._behind = False  # the schedule, by the last step
        self.pending: Work | None = None  # of a step whose schedule has run
        self.pending_items: Any = None  # that its losses are over: see ``ScriptModel._learned``
        self._ahead: Pipeline | None = None
        self._given: Given | InFiles | None = self._weights(module)
        if optimization is None:
            self._cut(partition=None)
        else:
            self._create_engine(self._cut, optimization)
        module.ds4d_run = self
        for parameter in module.parameters():
            parameter.ds4d_owned = True
        if config.parallel.pp > 1:
            module.ds4d_stages.hide_others()

    def _weights(self, module: PreTrainedModel) -> Given | InFiles:
        dtype, folder = DTYPES[self.config.precision.param_dtype], source_of(module)
        if folder is None:
            return Given(module, dtype)
        return InFiles(folder, self.original.config, dtype)

    def _cut(self, partition: Partition | None) -> PreTrainedModel:
        options = {"given": self._given, "device": self.device, "partition": partition}
        return take_over(self.module, self.original, self.config, self.mesh, **options)

    def learn(self, optimization: Optimization) -> None:
        """The optimizer came after the model had been looked at."""
        self._create_engine(self._split, optimization)

    def _split(self, partition: Partition | None) -> PreTrainedModel:
        if partition is not None:
            for module in reversed(list(self.module.modules())):
                if next(module.parameters(recurse=False), None) is not None:
                    partition(module)
        return self.module

    def _create_engine(
        self, build: Callable[[Partition | None], nn.Module], optimization: Optimization
    ) -> None:
        self.engine = Engine.create(
            self.config,
            self.mesh,
            build,
            device=self.device,
            optimizer=optimization.optimizer,
            scheduler=self._keep_schedule(optimization.schedule),
        )
        if self._given.is_wide:
            self.engine.begin_masters(self._given)
        self._given = None
        self._groups = optimization.groups or self.engine.optimizer.param_groups

    def _keep_schedule(self, make: Callable[[Optimizer], Any]) -> Callable[[Optimizer], None]:
        """The engine does not step it: the script's calls do, after it has looked at the rate."""

        def kept(stepped: Optimizer) -> None:
            self.schedule = make(stepped)

        return kept

    def advance_schedule(self) -> None:
        """To the rate of the next step, once for each step that was not skipped."""
        if self._behind:
            self._behind = False
            if self.schedule is not None:
                self.schedule.step()

    def engine_for_training(self) -> Engine:
        """Raises: RuntimeError: no optimizer was prepared."""
        if self.engine is None:
            raise RuntimeError(
                "ds4d.accelerate: the model is called in training, but no optimizer was handed to "
                "prepare(); to look at a loss use model.eval() or torch.no_grad()"
            )
        return self.engine

    # -- passes -----------------------------------------------------------------------------

    def set_training(self, training: bool) -> None:
        if self.engine is not None:
            self.engine.set_training(training)

    @property
    def called(self) -> Any:
        """The model as it is called, without a pipeline."""
        return self.module if self.engine is None else _Called(self.engine, self.module)

    @property
    def pipeline(self) -> Pipeline:
        if self.engine is not None:
            return self.engine.pipeline
        if self._ahead is None:
            stages, config = self.module.ds4d_stages, self.config.pipeline
            self._ahead = Pipeline(stages, self.mesh, config, device=self.device)
        return self._ahead

    def eval_sums(self, batches: Iterable[MicroBatch]) -> Iterator[tuple[Tensor, Tensor]]:
        """As ``Engine.eval_sums``."""
        if self.config.parallel.pp > 1:
            return self.pipeline.evaluate(batches)
        return eval_sums(self.called, batches, device=self.device)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Within, the model's own ``generate`` works, on all ranks alike."""
        if self.config.parallel.pp == 1:
            yield
            return
        pipeline = self.config.pipeline
        placement = placement_of(pipeline.schedule, self.config.parallel.pp, pipeline.chunks)
        join_stages(self.module.ds4d_stages, self.mesh, placement)
        try:
            with self.module.ds4d_stages.shown():
                yield
        finally:
            del self.module.forward

    # -- steps ------------------------------------------------------------------------------

    def step(self) -> Stepped:
        """Of the optimizer, after the last ``backward`` of a step."""
        engine = self.engine_for_training()
        self.advance_schedule()  # where the script has not
        if self.config.parallel.pp > 1:
            self._apply_factors(engine)
        self.stepped = engine.step()
        self.steps += 1
        self._behind = not self.stepped.skipped
        return self.stepped

    def _apply_factors(self, engine: Engine) -> None:
        work, self.pending = self.pending, None
        factors = torch.stack(work.factors).tolist() if work.factors else []
        if len(factors) != len(work.micro_batches):
            raise RuntimeError(
                f"ds4d.accelerate: accelerator.backward() was called {len(factors)} times for the "
                f"{len(work.micro_batches)} batches of a step; once for each is meant"
            )
        if max(factors) - min(factors) > 1e-6 * max(map(abs, factors)):
            raise ValueError(UNEVEN.format(pp=self.config.parallel.pp, factors=factors))
        factor = factors[0] * self._share(work)
        if abs(factor - 1.0) > 1e-6:
            engine.multiply_gradients(factor)

    def _share(self, work: Work) -> float:
        """Of the gradient that the schedule has left, by what the script's losses are over.

        Raises:
            ValueError: that is not the same on all ranks.
        """
        if self.pending_items is None:
            return len(work.micro_batches)
        items = torch.as_tensor(self.pending_items, device=self.device).double().reshape(1)
        each = gather(items, self.mesh.group("dp")).tolist()
        if len(set(each)) > 1:
            raise ValueError(
                f"ds4d.parallel.pp {self.config.parallel.pp}: num_items_in_batch differs between "
                f"ranks ({each}); give the number of all of them (the Trainer's "
                "average_tokens_across_devices)"
            )
        return float(work.counts.sum()) / (len(each) * each[0])

    # -- the whole model --------------------------------------------------------------------

    @property
    def is_whole_here(self) -> bool:
        """Every rank has all parameters."""
        parallel = self.config.parallel
        return parallel.tp == parallel.pp == 1 and self.config.zero_stage < 3

    def whole_state(self, what: str = "get_state_dict") -> dict[str, Tensor]:
        """The model's state dict as one process has it, in the dtype that is trained in: on the CPU
        of rank 0, empty elsewhere."""
        if self.is_whole_here:
            state = nn.Module.state_dict(self.module)
            return {k: _on_host(v) for k, v in state.items()} if self.mesh.rank == 0 else {}
        meet(what, rank=self.mesh.rank, size=dist.get_world_size())
        kinds = ("weight/", "buffer/")
        held = {k: v for k, v in self._logical().items() if k.startswith(kinds)}
        whole = whole_tensors(held, dtype=DTYPES[self.config.precision.param_dtype])
        state = {name.partition("/")[2]: tensor for name, tensor in whole.items()}
        if state:
            state |= {second: state[first] for second, first in self.original.tied.items()}
        return state

    def _logical(self) -> dict[str, Any]:
        if self.engine is None:
            raise RuntimeError(
                "ds4d.accelerate: the model was only evaluated, so there is nothing to save; it is "
                "where it was loaded from"
            )
        return self.engine.logical_state()

    # -- checkpoints ------------------------------------------------------------------------

    def save(self, folder: str | Path) -> None:
        """A ds4d checkpoint below ``folder``, the only one there.

        Raises:
            CheckpointError: the same on all ranks.
        """
        engine = self.engine_for_training()
        save(
            Path(folder),
            self.steps,
            engine.logical_state(),
            extra={
                "step": self.steps,
                "optimizer": engine.scalars(),
                "groups": {group["name"]: _settings(group) for group in self._groups},
                "dtype": self.config.precision.param_dtype,
                "config": resolved(self.config),
                "hf_config": json.loads(self.original.config.to_json_string(use_diff=False)),
            },
            rank_state={},
            keep=1,
        )

    def load(self, folder: str | Path) -> None:
        """Raises: CheckpointError: there is none, or it does not fit."""
        engine = self.engine_for_training()
        found = from_rank_0(lambda: locate(Path(folder)))
        extra = from_rank_0(lambda: read_extra(found))
        with engine.restoring(extra["optimizer"], step=extra["step"]) as state:
            load(found, state)
        for group in self._groups:  # a script's schedule counts on from these
            group.update(extra.get("groups", {}).get(group["name"], {}))
        self.steps, self._behind = extra["step"], False
        seek_schedule(self.schedule, extra["step"] - extra["optimizer"]["skipped_steps"])


def _on_host(x: Tensor) -> Tensor:
    """With memory of its own: DeepSpeed's parameters are views of one buffer."""
    return x.detach().to("cpu", copy=True)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Of a group, what JSON can hold: learning rate and the like, which schedules change."""
    kinds = bool, int, float
    return {k: v for k, v in group.items() if isinstance(v, kinds)}


def run_of(model: nn.Module) -> ScriptRun | None:
    """That has made ``model`` a rank's part; None: it is whole."""
    return model.__dict__.get("ds4d_run")


class _Called:
    """The engine's call with the module's attributes, which is what ``loss.py`` looks at."""

    def __init__(self, engine: Engine, module: nn.Module) -> None:
        self._engine, self.module = engine, module

    def __call__(self, **inputs: Any) -> Any:
        return self._engine(**inputs)

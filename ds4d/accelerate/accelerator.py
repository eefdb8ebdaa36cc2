"""Accelerate's ``Accelerator`` with ds4d underneath: a script keeps its loop.

What Accelerate does well stays its own (trackers, state of schedules and custom objects, printing);
what it does over all processes, or by DeepSpeed's engine, is done here over the ranks that it is
meant for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import accelerate
import torch
from accelerate.scheduler import AcceleratedScheduler
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DeepSpeedPlugin,
    DummyOptim,
    DummyScheduler,
    GradientAccumulationPlugin,
    InitProcessGroupKwargs,
)
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from ds4d.accelerate.loader import ScriptLoader, Sharing
from ds4d.accelerate.model import ScriptModel
from ds4d.accelerate.operations import Operations
from ds4d.accelerate.optimizer import (
    FilesSchedule,
    Names,
    PreparedOptimizer,
    fills_of,
    optimization,
    refuse,
)
from ds4d.accelerate.processes import Processes, begin
from ds4d.accelerate.randomness import DataRandomness, has_dropout, same_seed
from ds4d.accelerate.run import ScriptRun, run_of
from ds4d.accelerate.saving import install_on
from ds4d.accelerate.settings import ScriptFile
from ds4d.accelerate.states import States
from ds4d.accelerate.takeover import Original
from ds4d.late_checks import judge_script
from ds4d.monitor.screen import say
from ds4d.resume import seed_everything

SCHEDULES_NOTE = (
    "note: a prepared schedule advances num_processes = {dp} times with each optimizer step, as "
    "Accelerate's do: its numbers of steps are to be multiplied by accelerator.num_processes. For "
    "schedules that count optimizer steps: Accelerator(..., schedules_count=\"steps\")"
)
WITHOUT_BACKWARD = (
    "ds4d.accelerate: optimizer.step() after model(**batch) without accelerator.backward(loss); "
    "loss.backward() alone does not reach the engine"
)


class Accelerator(Operations, States, accelerate.Accelerator):
    """As Accelerate's, and:

    Args:
        config: the JSON file, or its content. Else it is the one of ``deepspeed_plugin``, of
            ``accelerate launch --deepspeed_config_file``, or of the environment's DS4D_CONFIG.
        schedules_count: what a prepared schedule counts: "processes", as Accelerate's do (it
            advances num_processes times with each optimizer step), or "steps".

    Raises:
        ConfigError: the file can't be used, or there is none.
        LaunchError: the processes were started in a way that cannot work.

    Collective: the world, as nearly everything here.
    """

    def __init__(
        self,
        *args: Any,
        config: Any = None,
        schedules_count: str = "processes",
        deepspeed_plugin: DeepSpeedPlugin | None = None,
        gradient_accumulation_steps: int = 1,
        gradient_accumulation_plugin: GradientAccumulationPlugin | None = None,
        **kwargs: Any,
    ) -> None:
        if schedules_count not in ("processes", "steps"):
            raise ValueError(f'schedules_count={schedules_count!r}: "processes" or "steps"')
        if kwargs.get("parallelism_config") is not None:
            raise ValueError("parallelism_config: the file's ds4d.parallel says what is parallel")
        file = ScriptFile.find(config or getattr(deepspeed_plugin, "hf_ds_config", None))
        self._these: Processes = begin(file, **_timeout(kwargs.get("kwargs_handlers")))
        trainers = deepspeed_plugin
        if AcceleratorState._shared_state:  # another Accelerator has told it
            deepspeed_plugin = None
        elif deepspeed_plugin is None:
            deepspeed_plugin = DeepSpeedPlugin(
                hf_ds_config=file.content_for_accelerate, zero3_init_flag=False
            )
        self._file, self._filled = file, None if trainers is None else trainers.hf_ds_config
        self._schedules_count = schedules_count
        # Whoever hands over a plugin divides by its own count, as the Trainer does.
        plugin = gradient_accumulation_plugin
        self._divides = plugin is None or plugin.num_steps > 1
        self._accumulating = False
        asked = kwargs.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION")
        self._asked_precision = None if asked in (None, "no") else str(asked)
        kwargs.pop("cpu", None)  # the launcher and DS_ACCELERATOR say it
        super().__init__(
            *args,
            deepspeed_plugin=deepspeed_plugin,
            gradient_accumulation_steps=gradient_accumulation_steps,
            gradient_accumulation_plugin=gradient_accumulation_plugin,
            **kwargs,
        )
        unset_hf_deepspeed_config()  # or transformers would cut models over the world
        mesh = self._these.mesh
        sharing, world = mesh.sharing_samples()
        self._sharing = Sharing(sharing, world, mesh.coordinate.dp, mesh.parallel.dp)
        self._randomness = DataRandomness(world)
        self._asked_steps = self.gradient_state.num_steps
        if self._divides:  # scripts look here for it
            shown = self.state.deepspeed_plugin.deepspeed_config
            shown["gradient_accumulation_steps"] = self._steps()
        self._forget()

    def _forget(self) -> None:
        self._run: ScriptRun | None = None
        self._original: Original | None = None
        self._given_optimizer: Any = None
        self._given_scheduler: Any = None
        self._backwards, self._due, self._clip = 0, False, None
        self._noted: set[str] = set()

    # -- who -------------------------------------------------------------------------------

    @property
    def is_last_process(self) -> bool:
        return self.process_index == self._these.mesh.parallel.world_size - 1

    # -- prepare ---------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Models, optimizers, loaders and schedules, in any order and number of calls; other things
        come back as they are."""
        order = sorted(range(len(args)), key=lambda i: _rank_of(args[i]))
        done: dict[int, Any] = {i: self._prepared(args[i]) for i in order}
        self._connect_schedules()
        results = tuple(done[i] for i in range(len(args)))
        return results if len(results) > 1 else results[0]

    def _prepared(self, thing: Any) -> Any:
        for kinds, prepare in (
            ((ScriptModel, PreparedOptimizer, ScriptLoader, AcceleratedScheduler), lambda x: x),
            (nn.Module, self.prepare_model),
            (DataLoader, self.prepare_data_loader),
            ((Optimizer, DummyOptim), self.prepare_optimizer),
            ((LRScheduler, DummyScheduler), self.prepare_scheduler),
        ):
            if isinstance(thing, kinds):
                return prepare(thing)
        return thing

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> ScriptModel:
        if isinstance(model, ScriptModel):
            return model
        for prepared in self._models:
            if prepared.module is model:
                return prepared
        if self._models:
            raise ValueError(
                "ds4d.accelerate: a second model was handed to prepare(); one model is trained in "
                "a layout (a reference model stays outside, whole on each rank)"
            )
        if (earlier := run_of(model)) is None:
            self._original = Original.of(model)
        elif earlier.engine is None:  # it was only looked at
            self._run, self._original = earlier, earlier.original
        else:
            raise ValueError(
                "ds4d.accelerate: this model was trained by an earlier prepare(), and each rank "
                "has a part of it: save it and load it again to train it once more"
            )
        prepared = ScriptModel(model, self._begin, self._dataloaders)
        self._models.append(prepared)
        install_on(model, self._begin_if_any, prepared.generate)
        return prepared

    def prepare_optimizer(self, optimizer: Any, device_placement: bool | None = None) -> Any:
        if isinstance(optimizer, PreparedOptimizer):
            return optimizer
        if self._given_optimizer is not None:
            if self._given_optimizer is optimizer:
                return self._optimizers[0]
            raise ValueError("ds4d.accelerate: a second optimizer was handed to prepare()")
        is_dummy = isinstance(optimizer, DummyOptim)
        if is_dummy and "optimizer" not in self._file.content:
            raise ValueError(
                "ds4d.accelerate: DummyOptim stands for the file's optimizer, but "
                f"{self._file.name} has none"
            )
        if not is_dummy:
            if "optimizer" in self._file.content:
                raise ValueError(
                    "ds4d.accelerate: the file has an optimizer, and the script makes its own: "
                    "take one of them away (or hand DummyOptim to prepare())"
                )
            refuse(optimizer)
        self._given_optimizer = optimizer
        prepared = PreparedOptimizer(None if is_dummy else optimizer, self._begin)
        prepared.step_due, prepared.do_step = self._step_is_due, self._step
        self._optimizers.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        if isinstance(scheduler, DummyScheduler):
            self._given_scheduler = scheduler
            prepared: Any = FilesSchedule(self._begin, self._optimizers[0])
        else:
            prepared = AcceleratedScheduler(
                scheduler,
                self._optimizers,
                step_with_optimizer=self.step_scheduler_with_optimizer,
                split_batches=self.split_batches or self._schedules_count == "steps",
            )
            if self.num_processes > 1 and not prepared.split_batches:
                self._note(SCHEDULES_NOTE.format(dp=self.num_processes))
        self._schedulers.append(prepared)
        return prepared

    def _connect_schedules(self) -> None:
        """Those that came before their optimizer."""
        for scheduler in self._schedulers:
            if not scheduler.optimizers:
                scheduler.optimizers = list(self._optimizers)

    def prepare_data_loader(
        self,
        data_loader: DataLoader,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Callable | None = None,
    ) -> ScriptLoader:
        if isinstance(data_loader, ScriptLoader):
            return data_loader
        for prepared in self._dataloaders:
            if prepared.loader is data_loader:
                return prepared
        place = self.device_placement if device_placement is None else device_placement
        prepared = ScriptLoader(
            data_loader,
            self._sharing,
            self._randomness,
            device=self.device if place else None,
            split=self.split_batches,
            seed=self.dataloader_config.data_seed,
            seedable=self.use_seedable_sampler,
            non_blocking=self.non_blocking,
        )
        prepared.window = self._steps()
        self._dataloaders.append(prepared)
        return prepared

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        return skip_first_batches(dataloader, num_batches)

    # -- the run begins --------------------------------------------------------------------

    def _steps(self) -> int:
        """Batches of an optimizer step: the script's number, or else the file's."""
        in_file = self._file.content.get("gradient_accumulation_steps")
        return in_file if isinstance(in_file, int) and self._asked_steps == 1 else self._asked_steps

    def _begin_if_any(self) -> ScriptRun | None:
        return self._begin() if self._models else None

    def _begin(self) -> ScriptRun:
        """The run; made when it is first needed, so that model and optimizer can be prepared in any
        order, and made to learn when the optimizer has come."""
        if self._run is not None and (self._run.engine or self._given_optimizer is None):
            return self._run
        # the first call may be one of evaluation
        with torch.inference_mode(False), torch.enable_grad():
            if self._run is None:
                self._run = self._make_run()
            else:
                self._run.learn(self._optimization(self._run.config))
        return self._run

    def _make_run(self) -> ScriptRun:
        if not self._models:
            raise RuntimeError("ds4d.accelerate: no model was handed to prepare()")
        mesh, module = self._these.mesh, self._models[0].module
        if self._filled is not None:  # by the Trainer, which knows its steps only now
            self._file = replace(ScriptFile.find(self._filled), name=self._file.name)
        if "scheduler" in self._file.content and self._given_scheduler is None:
            if self._given_optimizer is not None:
                raise ValueError(
                    f"ds4d.accelerate: {self._file.name} has a scheduler, which a script has to "
                    "hand to prepare() as DummyScheduler; or take it out of the file"
                )
        steps = self._steps()
        if self._divides:
            self.gradient_state.plugin_kwargs["num_steps"] = steps
        fills = fills_of(
            self._given_optimizer,
            self._given_scheduler,
            processes=1 if self._schedules_count == "steps" else self.num_processes,
        )
        run = self._file.run(
            self._original.config,
            world_size=mesh.parallel.world_size,
            micro=self._micro(),
            accumulation=steps,
            fills={**fills, "gradient_clipping": 0.0},
            precision=self._asked_precision,
        )
        if module.is_activation_checkpointing and run.recompute == "none":
            run = run.replace(recompute="full")
        run = judge_script(run, self._original.config)
        mesh = replace(mesh, parallel=run.parallel)  # sequence parallelism is settled now
        for note in run.notes:
            self._note(f"note: {note}")
        loaded = str(module.dtype).removeprefix("torch.")
        if loaded in ("bfloat16", "float16") and run.precision.param_dtype == "fp32":
            self._note(
                f"note: the model was loaded in {loaded} and is trained in fp32, for the file "
                "enables neither bf16 nor fp16"
            )
        if has_dropout(module, self._original.config):
            seed_everything(same_seed(self._sharing.world), mesh.dropout_rank)
        learns = self._given_optimizer is not None
        return ScriptRun(
            run,
            mesh,
            module,
            self._original,
            device=self.device,
            optimization=self._optimization(run) if learns else None,
        )

    def _optimization(self, run: Any) -> Any:
        seen = dict(self._original.names)
        if self._run is not None:  # it may have been made of the model that was cut
            seen |= {p: name for name, p in self._models[0].module.named_parameters()}
        names = Names(seen, self._original.tied)
        return optimization(self._given_optimizer, self._given_scheduler, run, names)

    def _micro(self) -> int:
        """Sequences in a batch of the loader that is trained on: the file's number, where there is
        such a loader, or else that of the first."""
        in_file = self._file.content.get("train_micro_batch_size_per_gpu")
        is_settled = self._filled is not None or self._given_optimizer is None
        if isinstance(in_file, int) and is_settled:  # the Trainer has compared it; or none trains
            return in_file
        parts = self.num_processes if self.split_batches else 1
        sizes = [x.batch_size for x in self._dataloaders if isinstance(x.batch_size, int)]
        sizes = [max(1, size // parts) for size in sizes] or [in_file]
        if in_file in sizes:
            return in_file
        return sizes[0] if isinstance(sizes[0], int) else 1

    def _note(self, text: str) -> None:
        if text not in self._noted and self.is_main_process:
            self._noted.add(text)
            say(text)

    # -- a step ----------------------------------------------------------------------------

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        self._begin_if_any()  # which settles how many batches a step has
        self._do_sync()
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Gradients are reduced when the step's last batch has gone back, in any case."""
        yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        run, model = self._begin(), self._models[0]
        engine, call = run.engine_for_training(), model.open
        if call is None:
            raise RuntimeError(
                "ds4d.accelerate: backward() of a loss that is not of the last model(**batch), or "
                "of one in evaluation: call model.train() before"
            )
        if self._due:
            raise RuntimeError(
                "ds4d.accelerate: backward() again before optimizer.step(): the step has "
                f"{self._steps()} batch(es), by gradient_accumulation_steps in {self._file.name} "
                "or in the script; set it to how many batches are accumulated"
            )
        last = self._is_last(call)
        if self._accumulating or (self._divides and self._asked_steps > 1):
            loss = loss / self.gradient_state.num_steps
        if run.config.parallel.pp > 1:
            loss.backward()
        else:
            engine.backward(loss, last=last)
        self._backwards, model.open, self._due = self._backwards + 1, None, last

    def _is_last(self, call: Any) -> bool:
        """Of the batches of a step."""
        managed = self._accumulating or not self._divides  # Accelerate counts, or the Trainer
        if call.own:
            whole = (self._backwards + 1) % self._steps() == 0
            return self.sync_gradients if managed else whole
        if managed and call.last != self.sync_gradients:
            raise RuntimeError(
                f"ds4d.accelerate: batch {call.index + 1} of {len(call.window.items)} of a step is "
                f"{'not ' if call.last else ''}taken for the last by the loop's own count: it "
                f"accumulates other than gradient_accumulation_steps {self._steps()}, or has "
                "skipped batches that make no whole step"
            )
        return call.last

    def _step_is_due(self) -> bool:
        if self._run is not None and self._run.engine is not None and not self._due:
            if (call := self._models[0].open) is not None and call.training:
                raise RuntimeError(WITHOUT_BACKWARD)
            if not self._accumulating and self._divides and self._steps() > 1:
                self._note(
                    f"note: optimizer.step() steps once in {self._steps()} batches "
                    "(gradient_accumulation_steps)"
                )
        return self._due

    def _step(self) -> None:
        self._due = False
        self._begin().step()

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> Tensor | None:
        """Sets where the step clips, takes it (its norm is that of all ranks' gradients together),
        and gives the norm before clipping. ``optimizer.step()`` has then nothing left to do."""
        if norm_type != 2:
            raise ValueError(f"ds4d.accelerate: norm_type {norm_type}; ds4d clips by the 2-norm")
        run = self._begin()
        in_file = self._file.content.get("gradient_clipping")
        bound = 0.0 if max_norm == float("inf") else float(max_norm)
        if bound and isinstance(in_file, (int, float)) and in_file and in_file != bound:
            raise ValueError(
                f"ds4d.accelerate: clip_grad_norm_({max_norm}), but gradient_clipping is {in_file} "
                f'in {self._file.name}; make them equal, or set the file\'s to "auto"'
            )
        if self._due:
            if bound or not in_file or in_file == "auto":
                run.engine_for_training().clip_at(bound)
            self._step()
            self._optimizers[0].remember_rates()
        if run.stepped is None:
            return None
        return torch.tensor(run.stepped.grad_norm, device=self.device)

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        raise ValueError("ds4d.accelerate: clip_grad_value_; ds4d clips by the norm")

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """The engine does so with each step."""

    @property
    def optimizer_step_was_skipped(self) -> bool:
        stepped = None if self._run is None else self._run.stepped
        return stepped is not None and stepped.skipped


def skip_first_batches(dataloader: Any, num_batches: int = 0) -> Any:
    """As Accelerate's."""
    if isinstance(dataloader, ScriptLoader):
        return dataloader.skipping(num_batches)
    return accelerate.skip_first_batches(dataloader, num_batches)


def _rank_of(thing: Any) -> int:
    """Loaders first, schedules after their optimizers."""
    kinds = (DataLoader, nn.Module, (Optimizer, DummyOptim), (LRScheduler, DummyScheduler))
    return next((i for i, kind in enumerate(kinds) if isinstance(thing, kind)), len(kinds))


def _timeout(handlers: list[Any] | None) -> dict[str, float]:
    """Seconds, where the script gives some."""
    for handler in handlers or ():
        if isinstance(handler, InitProcessGroupKwargs) and handler.timeout is not None:
            return {"timeout_seconds": handler.timeout.total_seconds()}
    return {}

"""The main job: builds the parts in one fixed order, then the loop.

JSON -> RunConfig -> data -> process groups -> mesh -> model -> engine -> checkpoint -> steps.
No parallel mathematics here.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds4d import attention, optim
from ds4d.checkpoint.find import find
from ds4d.checkpoint.load import load, read_extra
from ds4d.checkpoint.saver import Saver
from ds4d.config.load import load as load_config
from ds4d.config.report import as_dict
from ds4d.config.types import RunConfig
from ds4d.data.batch import MicroBatch
from ds4d.data.errors import DataError
from ds4d.data.loader import TrainLoader, eval_batches
from ds4d.data.order import SampleOrder
from ds4d.data.prepare import PreparedData, prepare
from ds4d.engine import Engine, StepResult
from ds4d.evaluate import mean_loss
from ds4d.late_checks import check_hosts_agree, judge_model, refuse_occupied
from ds4d.launch import runtime
from ds4d.mesh import Mesh
from ds4d.model.build import DTYPES, build_model, first_values
from ds4d.model.config import hf_config
from ds4d.monitor import Monitor
from ds4d.monitor.flops import model_flops, peak_tflops
from ds4d.monitor.screen import say
from ds4d.nonfinite import find_nonfinite
from ds4d.pipeline.recorder import OFF, Recorder
from ds4d.pipeline.stage import stage_cutter
from ds4d.resume import (
    check_continues,
    facts,
    from_rank_0,
    has_same_places,
    random_state,
    seed_everything,
    set_random_state,
)
from ds4d.run_lock import locked


class NonFiniteError(RuntimeError):
    """Too many steps in a row were skipped because something was not finite."""


def main(
    rank: runtime.Rank, config: Path, *, overrides: Sequence[str] = (), resume: str | None = None
) -> int:
    """Train as one rank of a job. Returns the exit code.

    Args:
        rank: this process, as ``runtime.run_rank`` made it; process groups do not exist yet.
        config: the JSON file.
        overrides: ``dotted.key=value`` each.
        resume: "auto", "latest", the path of a checkpoint, or None to begin anew.

    Collective: the world.
    """
    run = load_config(config, overrides=overrides, world_size=rank.launch.world_size)
    refuse_occupied(rank.output, resume)
    data = prepare(run, local_rank=rank.launch.local_rank)
    rank.init_distributed(run.training.process_group_timeout_seconds)
    check_hosts_agree(data)
    with _alone_in(rank.output):
        _train(run, data, rank, resume)
    return 0


def _train(run: RunConfig, data: PreparedData, rank: runtime.Rank, resume: str | None) -> None:
    mesh = Mesh.create(
        run.parallel, run.context, timeout_seconds=run.training.process_group_timeout_seconds
    )
    trainer = Trainer(run, data, rank.output, rank.device, mesh)
    checkpoint = trainer.find_checkpoint(resume)
    if checkpoint is None:
        trainer.begin()
    else:
        trainer.restore(checkpoint)
    if rank.launch.rank == 0:
        _write_run_folder(trainer.run, data, rank.output)
    with trainer.make_monitor() as monitor:
        for note in run.notes:
            monitor.note(f"note: {note}")
        if checkpoint is not None:
            monitor.resumed(checkpoint, trainer.progress.step)
        trainer.train(monitor)
        monitor.finished()


@contextmanager
def _alone_in(output: Path) -> Iterator[None]:
    """Rank 0 holds the run folder. Collective: the world.

    Raises:
        FolderInUse: on all ranks, while another run does.
    """
    with ExitStack() as held:
        from_rank_0(lambda: held.enter_context(locked(output)))
        yield


def _write_run_folder(run: RunConfig, data: PreparedData, output: Path) -> None:
    """``config.resolved.json``, which loads again, and the tokenizer, for export."""
    summary = as_dict(run)
    whole = summary.pop("config")
    facts = {"versions": runtime.versions(), **summary, "data": data.report}
    whole["ds4d"] = {**whole["ds4d"], "resolved": facts}
    (output / "config.resolved.json").write_text(json.dumps(whole, indent=2) + "\n")
    if data.tokenizer is not None:
        data.tokenizer.save_pretrained(output / "tokenizer")


@dataclass
class Progress:
    """Where training stands; what a resumed run continues from."""

    step: int = 0
    consumed_samples: int = 0
    skipped_in_a_row: int = 0


def total_steps(run: RunConfig, num_samples: int) -> int:
    """``training.steps``, or the steps in which ``training.epochs`` passes see every sample."""
    if run.training.steps is not None:
        return run.training.steps
    return max(1, math.ceil(run.training.epochs * num_samples / run.batch.train))


def _imbalance(micro_batches: list[MicroBatch]) -> float | None:
    """Of attention over the ranks that share these sequences: the largest ``Cut.imbalance``."""
    return max((batch.cut.imbalance for batch in micro_batches if batch.cut), default=None)


class Trainer:
    """One run: a config, its data, a mesh, an engine and a run folder."""

    def __init__(
        self, run: RunConfig, data: PreparedData, output: Path, device: torch.device, mesh: Mesh
    ) -> None:
        self.run = run
        self.data = data
        self.output = output
        self.mesh = mesh
        self.cutter = mesh.cutter
        self.total_steps = total_steps(run, len(data.train))
        self.progress = Progress()
        self._last_metrics: Mapping[str, Any] | None = None  # of the step that is continued from
        seed_everything(run.training.seed, self.mesh.dropout_rank)
        attention.register()
        self.hf_config = hf_config(
            run.model, vocab_size=data.vocab_size, tokenizer=data.tokenizer
        )
        self.run = run = judge_model(run, data, self.hf_config)
        self._facts = facts(run, data, self.hf_config.to_dict())
        self.engine = Engine.create(
            run,
            self.mesh,
            lambda partition: build_model(
                run.model,
                config=self.hf_config,
                dtype=DTYPES[run.precision.param_dtype],
                device=device,
                seed=run.training.seed,
                attn_implementation=attention.implementation_for(self.hf_config),
                recompute=run.recompute,
                partition=partition,
                tp=self.mesh.tensor_parallel(),
                cp=self.mesh.context_parallel(run.context),
                cut=stage_cutter(run, self.mesh, self.hf_config),
            ),
            device=device,
            **optim.of_run(run, total_steps=self.total_steps),
        )
        self._saver = self._make_saver()

    def _make_saver(self) -> Saver:
        """Collective over the world."""
        checkpoints, timeout = self.run.checkpoint, self.run.training.process_group_timeout_seconds
        group = Mesh.second_world(timeout_seconds=timeout) if checkpoints.async_ else None
        return Saver(self.output, keep=checkpoints.keep, group=group)

    def begin(self) -> None:
        """With the first weights in all their precision, where no checkpoint gives others."""
        if self.run.precision.param_dtype != "fp32":
            model, seed = self.run.model, self.run.training.seed
            self.engine.begin_masters(first_values(model, config=self.hf_config, seed=seed))

    # -- the loop ---------------------------------------------------------------------------

    def train(self, monitor: Monitor) -> None:
        """Run to the last step, or until SIGTERM asks to stop. Collective over the world."""
        checkpoints = self.run.checkpoint
        with self._saver, _stop_on_sigterm(self.run.training.on_sigterm) as stop:
            started = time.perf_counter()
            for micro_batches in self.micro_batches():
                recorder = self._recorder()
                result = self.engine.train_step(micro_batches, recorder=recorder)
                self._judge(result, micro_batches)
                stopping, save_failed, peak_memory = self._agree(stop.requested)
                if save_failed:
                    self._saver.wait()  # raises
                seconds = time.perf_counter() - started
                metrics = self._metrics(result, seconds, peak_memory, _imbalance(micro_batches))
                last = self.progress.step == self.total_steps
                evaluating = _due(self.run.training.eval_every, self.progress.step, last)
                if evaluating and self.data.eval is not None:
                    metrics["eval_loss"] = self.evaluate()
                self._report_saved(monitor)
                due = _due(checkpoints.every, self.progress.step, last and checkpoints.final)
                saving = due or stopping
                monitor.step(metrics, complete=not saving)
                if (measured := recorder.measured()) is not None:
                    monitor.timeline(measured)
                if saving:
                    self.save(monitor, metrics, wait=last or stopping)
                if last or stopping:
                    break
                started = time.perf_counter()

    def _recorder(self) -> Recorder:
        """For the step that comes."""
        wanted = self.progress.step + 1 == self.run.monitor.timeline_step
        if not wanted or self.run.parallel.pp == 1:
            return OFF
        return Recorder.on(self.engine.device, self.mesh.group("pp"))

    def micro_batches(self) -> Iterator[list[MicroBatch]]:
        """This rank's of each step that is left, and of more."""
        if self.progress.step >= self.total_steps:
            return iter(())
        order = SampleOrder(len(self.data.train), self.run.training.seed, self.run.data.shuffle)
        return iter(
            TrainLoader(
                self.data.train,
                order,
                self.run.batch,
                dp_rank=self.mesh.coordinate.dp,
                dp_size=self.run.parallel.dp,
                cutter=self.cutter,
                consumed_samples=self.progress.consumed_samples,
                num_workers=self.run.data.num_workers,
            )
        )

    def _judge(self, result: StepResult, micro_batches: list[MicroBatch]) -> None:
        """Count the step; stop when too many in a row were not finite."""
        progress = self.progress
        progress.step += 1
        progress.consumed_samples += self.run.batch.train
        progress.skipped_in_a_row = progress.skipped_in_a_row + 1 if result.skipped else 0
        if result.tokens == 0:
            raise DataError(
                f"step {progress.step}: none of the {self.run.batch.train} samples of the global "
                f"batch has a valid target (all labels are -100); remove such samples from the data"
            )
        limit = self.run.training.max_skipped_steps
        if progress.skipped_in_a_row >= limit:
            where = find_nonfinite(self.engine, micro_batches)
            raise NonFiniteError(
                f"step {progress.step}: the loss ({result.loss}) or gradient norm "
                f"({result.grad_norm}) was not finite in {limit} steps in a row "
                f"(ds4d.training.max_skipped_steps). First bad tensor: "
                f"{where or 'none when the step was repeated'}"
            )

    def _agree(self, stop_requested: bool) -> tuple[bool, bool, int]:
        """(somebody was asked to stop, a save beside the training has failed, the largest rank's
        peak memory in bytes)."""
        peak = runtime.peak_memory_bytes(self.engine.device)
        mine = [float(stop_requested), float(self._saver.has_failed), float(peak)]
        all_three = torch.tensor(mine, dtype=torch.float64, device=self.engine.device)
        dist.all_reduce(all_three, op=dist.ReduceOp.MAX)
        stopping, save_failed, peak = all_three.tolist()
        return bool(stopping), bool(save_failed), int(peak)

    def _metrics(
        self, result: StepResult, seconds: float, peak_memory: int, imbalance: float | None
    ) -> dict[str, Any]:
        metrics = {
            "step": self.progress.step,
            "loss": result.loss,
            "grad_norm": result.grad_norm,
            "lr": result.lr,
            "tokens": result.tokens,
            "samples": self.run.batch.train,
            "consumed_samples": self.progress.consumed_samples,
            "step_seconds": seconds,
            "tokens_per_second": result.tokens / seconds,
            "peak_memory_bytes": peak_memory,
        }
        if result.loss_scale is not None:
            metrics["loss_scale"] = result.loss_scale
        if result.router_loss is not None:
            metrics["router_loss"] = result.router_loss
        if result.skipped:
            metrics["skipped"] = True
        if imbalance is not None:
            metrics["cp_imbalance"] = imbalance
        return metrics

    def evaluate(self) -> float:
        """Mean loss of the held-out set. Collective over the world."""
        batches = eval_batches(
            self.data.eval,
            self.run.batch.micro,
            dp_rank=self.mesh.coordinate.dp,
            dp_size=self.run.parallel.dp,
            cutter=self.cutter,
        )
        sums = self.engine.eval_sums(batches)
        group = self.mesh.group("pp_dp_cp")
        return mean_loss(sums, device=self.engine.device, group=group)[0]

    # -- checkpoints ------------------------------------------------------------------------

    def save(self, monitor: Monitor, metrics: Mapping[str, Any], *, wait: bool) -> None:
        """Write a checkpoint of the present step. Collective over the world.

        Args:
            metrics: of the step.
            wait: until it is complete, also where it is written beside the training.
        """
        started = time.perf_counter()
        self._saver.wait()
        self._report_saved(monitor)
        self._saver.save(
            self.progress.step,
            self.engine.logical_state(),
            extra={
                "step": self.progress.step,
                "consumed_samples": self.progress.consumed_samples,
                "skipped_in_a_row": self.progress.skipped_in_a_row,
                "optimizer": self.engine.scalars(),
                "dtype": self.run.precision.param_dtype,
                "metrics": dict(metrics),
                **self._facts,
            },
            rank_state=random_state(self.engine.device),
        )
        if wait:
            self._saver.wait()
        monitor.waited_for_save(time.perf_counter() - started)
        self._report_saved(monitor)
        monitor.complete()

    def _report_saved(self, monitor: Monitor) -> None:
        if (saved := self._saver.take_saved()) is not None:
            monitor.saved(saved)

    def find_checkpoint(self, which: str | None) -> Path | None:
        """What ``--resume`` means in this run folder; what is passed over is said. Collective over
        the world.

        Raises:
            CheckpointError: it names one that is not there or not complete.
        """
        return from_rank_0(lambda: None if which is None else find(self.output, which, say=say))

    def restore(self, folder: Path) -> None:
        """Continue from a checkpoint, of this layout or another. Collective over the world.

        Raises:
            ConfigError: the checkpoint is of another run.
        """
        extra = from_rank_0(lambda: read_extra(folder))
        check_continues(folder, extra, self._facts)
        with self.engine.restoring(extra["optimizer"], step=extra["step"]) as state:
            _, rank_state = load(folder, state)
        if rank_state is not None and has_same_places(extra, self._facts):
            set_random_state(rank_state, self.engine.device)
        self.progress = Progress(
            extra["step"], extra["consumed_samples"], extra["skipped_in_a_row"]
        )
        self._last_metrics = extra.get("metrics")

    # -- what the user sees -----------------------------------------------------------------

    def make_monitor(self) -> Monitor:
        """For the steps that are left."""
        device, is_speaker = self.engine.device, self.mesh.rank == 0
        peak = self.run.monitor.peak_tflops
        if peak is None and device.type == "cuda":
            peak = peak_tflops(torch.cuda.get_device_name(device))
        return Monitor(
            self.output,
            is_speaker=is_speaker,
            total_steps=self.total_steps,
            start=self.progress.step,
            last=self._last_metrics,
            num_devices=self.run.parallel.world_size,
            flops_per_step=self._flops_per_step() if is_speaker else None,
            peak_tflops=peak,
            plot=self.run.monitor.plot,
            deepspeed=self.engine.monitor,
        )

    def _flops_per_step(self) -> float:
        """Model FLOPs of an average global batch: attention is quadratic in each document."""
        count = len(self.data.train)
        taken = range(0, count, max(1, count // 64))
        squares = sum(_square_of_lengths(self.data.train[i].document_ids) for i in taken)
        seq_len = self.run.data.seq_len
        mean = squares / len(taken) if squares else seq_len**2
        return self.run.batch.train * model_flops(self.hf_config).of_sequences(seq_len, mean)


def _square_of_lengths(document_ids: torch.Tensor | None) -> int:
    if document_ids is None:
        return 0
    _, lengths = document_ids.unique_consecutive(return_counts=True)
    return int((lengths**2).sum())


def _due(every: int | None, step: int, last: bool) -> bool:
    return last or (every is not None and step % every == 0)


class _Stop:
    requested = False


@contextmanager
def _stop_on_sigterm(policy: str) -> Iterator[_Stop]:
    """``save``: remember the signal and end after the step; ``stop``: die as usual."""
    stop = _Stop()

    def remember(_signal: int, _frame: Any) -> None:
        stop.requested = True

    previous = signal.signal(signal.SIGTERM, remember) if policy == "save" else None
    try:
        yield stop
    finally:
        if previous is not None:
            signal.signal(signal.SIGTERM, previous)

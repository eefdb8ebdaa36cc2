"""The main job: builds the parts in one fixed order, then the loop.

JSON -> RunConfig -> data -> process groups -> mesh -> model -> engine -> checkpoint -> steps.
No parallel mathematics here.
"""

from __future__ import annotations

import json
import math
import random
import signal
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import numpy as np
import torch
import torch.distributed as dist

from ds4d import attention, model, runtime
from ds4d.checkpoint import find, load, save
from ds4d.config.load import resolved
from ds4d.config.types import RunConfig
from ds4d.data.errors import DataError
from ds4d.data.loader import TrainLoader, eval_batches
from ds4d.data.order import SampleOrder
from ds4d.data.prepare import PreparedData, prepare
from ds4d.engine import Engine, StepResult, find_nonfinite
from ds4d.evaluate import evaluate
from ds4d.mesh import Mesh
from ds4d.monitor import Monitor


class NonFiniteError(RuntimeError):
    """Too many steps in a row were skipped because something was not finite."""


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


class Trainer:
    """One run: a config, its data, a mesh, an engine and a run folder."""

    def __init__(self, run: RunConfig, data: PreparedData, output: Path, device) -> None:
        self.run = run
        self.data = data
        self.output = output
        self.mesh = Mesh.create(
            run.parallel, timeout_seconds=run.training.process_group_timeout_seconds
        )
        self.total_steps = total_steps(run, len(data.train))
        self.progress = Progress()
        self._seed_everything()
        self.hf_config = model.hf_config(run.model, vocab_size=data.vocab_size)
        self.engine = Engine.create(
            run,
            self.mesh,
            lambda partition: model.build_model(
                run.model,
                config=self.hf_config,
                dtype=model.DTYPES[run.precision.param_dtype],
                device=device,
                seed=run.training.seed,
                attn_implementation=attention.implementation_for(self.hf_config),
                recompute=run.recompute,
                partition=partition,
            ),
            device=device,
            total_steps=self.total_steps,
        )

    def _seed_everything(self) -> None:
        """Dropout differs between ranks that see other tokens, and agrees within a tp group."""
        seed = self.run.training.seed * 1_000_003 + dist.get_rank(self.mesh.group("dp_cp"))
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.manual_seed(seed)

    # -- the loop ---------------------------------------------------------------------------

    def train(self, monitor: Monitor) -> None:
        """Run to the last step, or until SIGTERM asks to stop. Collective over the world."""
        checkpoints = self.run.checkpoint
        with _stop_on_sigterm(self.run.training.on_sigterm) as stop:
            started = time.perf_counter()
            for micro_batches in self._loader():
                result = self.engine.train_step(micro_batches)
                self._judge(result, micro_batches)
                stopping, peak_memory = self._agree(stop.requested)
                metrics = self._metrics(result, time.perf_counter() - started, peak_memory)
                last = self.progress.step == self.total_steps
                if _due(self.run.training.eval_every, self.progress.step, last):
                    metrics["eval_loss"] = self.evaluate()
                monitor.step(metrics)
                due = _due(checkpoints.every, self.progress.step, last and checkpoints.final)
                if due or stopping:
                    self.save(monitor)
                if last or stopping:
                    break
                started = time.perf_counter()

    def _loader(self) -> Iterator[list]:
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
                consumed_samples=self.progress.consumed_samples,
                num_workers=self.run.data.num_workers,
            )
        )

    def _judge(self, result: StepResult, micro_batches: list) -> None:
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

    def _agree(self, stop_requested: bool) -> tuple[bool, int]:
        """(somebody was asked to stop, the largest rank's peak memory in bytes)."""
        mine = [float(stop_requested), float(runtime.peak_memory_bytes(self.engine.device))]
        both = torch.tensor(mine, dtype=torch.float64, device=self.engine.device)
        dist.all_reduce(both, op=dist.ReduceOp.MAX)
        stopping, peak = both.tolist()
        return bool(stopping), int(peak)

    def _metrics(self, result: StepResult, seconds: float, peak_memory: int) -> dict[str, Any]:
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
        if result.skipped:
            metrics["skipped"] = True
        return metrics

    def evaluate(self) -> float:
        """Mean loss of the held-out set. Collective over the world."""
        batches = eval_batches(
            self.data.eval,
            self.run.batch.micro,
            dp_rank=self.mesh.coordinate.dp,
            dp_size=self.run.parallel.dp,
        )
        return evaluate(self.engine, batches, group=self.mesh.group("dp_cp"))

    # -- checkpoints ------------------------------------------------------------------------

    def save(self, monitor: Monitor) -> None:
        """Write a checkpoint of the present step. Collective over the world."""
        folder = save.save(
            self.output,
            self.progress.step,
            self.engine.logical_state(),
            extra={
                "step": self.progress.step,
                "consumed_samples": self.progress.consumed_samples,
                "skipped_in_a_row": self.progress.skipped_in_a_row,
                "optimizer": self.engine.scalars(),
                "hf_config": self.hf_config.to_dict(),
                "dtype": self.run.precision.param_dtype,
                "config": resolved(self.run),
            },
            rank_state=_random_state(),
            keep=self.run.checkpoint.keep,
        )
        monitor.saved(folder)

    def resume(self, which: str, monitor: Monitor) -> None:
        """Continue from a checkpoint: ``auto``, ``latest`` or a path. Collective over the world."""
        folder = find.find(self.output, which)
        if folder is None:
            return
        extra = load.read_extra(folder)
        self._check_continues(extra["config"])
        with self.engine.restoring(extra["optimizer"]) as state:
            rank_state = load.load(folder, state)
        if rank_state is not None:
            _set_random_state(rank_state)
        self.progress = Progress(
            extra["step"], extra["consumed_samples"], extra["skipped_in_a_row"]
        )
        monitor.resumed(folder, self.progress.step)

    def _check_continues(self, saved: dict[str, Any]) -> None:
        """The position in the data is a sample count: it means something else in other data."""
        for key in ("train", "seq_len", "packing", "shuffle", "long_documents"):
            before, now = saved["ds4d"]["data"].get(key), resolved(self.run)["ds4d"]["data"].get(key)
            if before != now:
                monitor_note = f"ds4d.data.{key}: was {json.dumps(before)}, is {json.dumps(now)}"
                runtime.warn(f"{monitor_note}; the position in the data restarts in the new data")


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


def _random_state() -> dict[str, Any]:
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "step": 0}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])

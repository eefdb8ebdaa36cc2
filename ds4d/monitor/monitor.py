"""Everything that is told about a run while it runs: file, screen, picture."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds4d.monitor import screen
from ds4d.monitor.display import Display, duration
from ds4d.monitor.metrics import MetricsFile
from ds4d.monitor.plot import plot_losses
from ds4d.pipeline.timeline import Timeline, write

if TYPE_CHECKING:
    from ds4d.checkpoint.saver import Saved
    from ds4d.pipeline.recorder import Measured


class Monitor:
    """What rank 0 records and shows; on the other ranks every method does nothing.

    A context manager: the bar leaves the terminal before a traceback comes.

    Args:
        output: the run folder.
        is_speaker: whether this is rank 0.
        total_steps, start, num_devices, flops_per_step, peak_tflops: see ``Display``.
        last: what ``metrics.jsonl`` has, or should have, of step ``start``.
        plot: whether ``finished`` draws the loss curve.
        deepspeed: DeepSpeed's own writers (tensorboard, wandb, csv), as the file asks for them.
    """

    def __init__(
        self,
        output: Path,
        *,
        is_speaker: bool,
        total_steps: int,
        start: int = 0,
        last: Mapping[str, Any] | None = None,
        num_devices: int = 1,
        flops_per_step: float | None = None,
        peak_tflops: float | None = None,
        plot: bool = True,
        deepspeed: Any = None,
    ) -> None:
        self._output = output
        self._plot = plot
        self._deepspeed = deepspeed
        self._started = time.monotonic()
        self._last_checkpoint: Path | None = None
        self._timeline: Path | None = None
        self._last: Mapping[str, Any] = {}
        self._unwritten: Mapping[str, Any] | None = None
        self._about_saves: dict[str, Any] = {}
        self._metrics = self._display = None
        if is_speaker:
            self._metrics = MetricsFile(output / "metrics.jsonl", start=start, last=last)
            self._display = Display(
                screen.console(),
                total_steps=total_steps,
                start=start,
                num_devices=num_devices,
                flops_per_step=flops_per_step,
                peak_tflops=peak_tflops,
            )

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *_: object) -> None:
        if self._display is not None:
            self._display.close()
            self.complete()
            self._metrics.close()

    def step(self, metrics: Mapping[str, Any], *, complete: bool = True) -> None:
        """One optimizer step: the object for ``metrics.jsonl``, ``eval_loss`` in it if there is.

        Args:
            complete: False where more is to be told of it: ``complete`` follows.
        """
        if self._display is not None:
            self._display.step(metrics)
            self._last = self._unwritten = metrics
            if complete:
                self.complete()

    def complete(self) -> None:
        """Nothing more is told of the last step."""
        if self._display is not None and self._unwritten is not None:
            metrics = {**self._unwritten, **self._about_saves}
            self._unwritten, self._about_saves = None, {}
            self._metrics.write(metrics)
            self._write_events(metrics)

    def timeline(self, measured: Measured) -> None:
        """When the passes of the last step ran on the ranks of the first pipeline: a picture, a
        trace, and a line that has their idle time beside the simulator's."""
        if self._display is None:
            return
        step = self._last["step"]
        title = f"{measured.timeline.title}: step {step} as measured"
        self._timeline = self._output / "timeline.svg"
        for file in (self._timeline, self._timeline.with_suffix(".json")):
            write(replace(measured.timeline, title=title), file)
        self.note(
            f"pipeline in step {step}: measured idle {_idle(measured.timeline)}; simulated with "
            f"the same mean costs {_idle(measured.simulated)}"
        )

    def _write_events(self, metrics: Mapping[str, Any]) -> None:
        if self._deepspeed is not None and self._deepspeed.enabled:
            step = metrics["step"]
            values = {k: v for k, v in metrics.items() if k not in ("step", "skipped")}
            self._deepspeed.write_events([(f"ds4d/{k}", v, step) for k, v in values.items()])

    def note(self, text: str) -> None:
        """Something that the user should know."""
        if self._display is not None:
            self._display.line(text)

    def saved(self, saved: Saved) -> None:
        """A checkpoint is complete, maybe of an earlier step."""
        self._last_checkpoint = saved.folder
        self._about_saves["save_bytes"] = saved.bytes
        if saved.background_seconds is not None:
            self._about_saves["background_save_seconds"] = saved.background_seconds
        self.note(f"saved {saved.folder}")

    def waited_for_save(self, seconds: float) -> None:
        """Training stood still for it after the last step."""
        self._about_saves["save_seconds"] = seconds

    def resumed(self, folder: Path, step: int) -> None:
        """Training goes on from a checkpoint."""
        self.note(f"resumed from {folder}: {step} steps are done")

    def finished(self) -> None:
        """Draw the curve, and say where each thing is."""
        if self._display is None:
            return
        self._display.close()
        rows = [("metrics", self._output / "metrics.jsonl")]
        if self._plot and self._last:
            rows += self._draw(self._output / "loss.png")
        if self._timeline is not None:
            rows.append(("timeline", self._timeline))
        if self._last_checkpoint is not None:
            rows.append(("checkpoint", self._last_checkpoint))
        rows.append(("logs", self._output / "logs"))
        seconds = time.monotonic() - self._started
        loss = f", loss {self._last['loss']:.4f}" if self._last else ""
        self.note(f"done in {duration(seconds)}{loss}")
        for name, path in rows:
            self.note(f"  {name:<12}{path}")

    def _draw(self, picture: Path) -> list[tuple[str, Path]]:
        try:
            plot_losses(self._output / "metrics.jsonl", picture)
        except ImportError:
            self.note("no picture of the loss: matplotlib is missing (pip install matplotlib)")
            return []
        return [("loss curve", picture)]


def _idle(timeline: Timeline) -> str:
    ranks = ", ".join(f"{idle:.1%}" for idle in timeline.idle_fraction)
    return f"{timeline.bubble:.1%} (by rank {ranks})"

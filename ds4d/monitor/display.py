"""The lines that a user reads while a model trains: one a step; a bar below them on a terminal."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

ETA_WINDOW_STEPS = 50


class Display:
    """Prints to ``console``.

    Args:
        total_steps: the last step.
        start: the step that this run continues from.
        num_devices: ranks, for the figures per device.
        flops_per_step: model FLOPs of one global batch, see ``flops``.
        peak_tflops: of one device; None where it is not known (CPU).
    """

    def __init__(
        self,
        console: Console,
        *,
        total_steps: int,
        start: int = 0,
        num_devices: int = 1,
        flops_per_step: float | None = None,
        peak_tflops: float | None = None,
    ) -> None:
        self._console = console
        self._total_steps = total_steps
        self._num_devices = num_devices
        self._flops_per_step = flops_per_step
        self._peak_tflops = peak_tflops
        self._seconds: deque[float] = deque(maxlen=ETA_WINDOW_STEPS)
        columns = (
            TextColumn("step"),
            BarColumn(None),
            TaskProgressColumn(),
            TextColumn("{task.fields[eta]}"),
        )
        self._bar = Progress(
            *columns, console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self._bar.add_task("", total=total_steps, completed=start, eta="")
        self._bar.start()

    def step(self, metrics: Mapping[str, Any]) -> None:
        """One line for one step, from the keys of ``metrics.jsonl``."""
        self._seconds.append(metrics["step_seconds"])
        left = self._total_steps - metrics["step"]
        eta = duration(left * sum(self._seconds) / len(self._seconds))
        self.line("  ".join([*self._parts(metrics), f"ETA {eta}"]))
        self._bar.update(self._task, completed=metrics["step"], eta=f"ETA {eta}")

    def line(self, text: str) -> None:
        self._console.print(text, soft_wrap=True, markup=False, highlight=False)

    def close(self) -> None:
        self._bar.stop()

    def _parts(self, metrics: Mapping[str, Any]) -> list[str]:
        width = len(str(self._total_steps))
        seconds, speed = metrics["step_seconds"], metrics["tokens_per_second"]
        parts = [
            f"step {metrics['step']:>{width}}/{self._total_steps}",
            f"loss {metrics['loss']:.4f}",
            f"grad norm {metrics['grad_norm']:.3f}",
            f"lr {metrics['lr']:.2e}",
            f"{speed:,.0f} tokens/s ({speed / self._num_devices:,.0f}/device)",
        ]
        if self._flops_per_step is not None:
            tflops = self._flops_per_step / seconds / self._num_devices / 1e12
            parts.append(f"{tflops:.{1 if tflops >= 10 else 3}f} TFLOP/s/device")
            if self._peak_tflops:
                parts.append(f"MFU {tflops / self._peak_tflops:.1%}")
        parts.append(f"peak {metrics['peak_memory_bytes'] / 2**30:.2f} GiB")
        parts.append(f"{seconds * 1e3:,.0f} ms")
        parts += [text.format(metrics[key]) for key, text in _OPTIONAL.items() if key in metrics]
        return parts


_OPTIONAL = {
    "loss_scale": "loss scale {:g}",
    "eval_loss": "eval loss {:.4f}",
    "skipped": "SKIPPED (not finite)",
}


def duration(seconds: float) -> str:
    """``00:42``, ``1:02:03`` or ``2 days, 1:02:03``."""
    if not math.isfinite(seconds):
        return "?"
    text = str(timedelta(seconds=round(seconds)))
    return text[2:] if text.startswith("0:") else text

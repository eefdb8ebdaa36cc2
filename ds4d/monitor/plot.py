"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ds4d.monitor.metrics import read_metrics


def plot_losses(metrics: Path, picture: Path) -> None:
    """Draw training and evaluation loss over steps.

    Args:
        metrics: a ``metrics.jsonl``.
        picture: the file to write, PNG by its name.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    steps = read_metrics(metrics)
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*_curve(steps, "loss"), label="training", linewidth=1.2)
    evaluated = _curve(steps, "eval_loss")
    if evaluated[0]:
        axes.plot(*evaluated, label="evaluation", marker="o", markersize=4)
        axes.legend()
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.grid(alpha=0.3)
    figure.savefig(picture)


def _curve(steps: Iterable[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    points = [(entry["step"], entry[key]) for entry in steps if entry.get(key) is not None]
    return [step for step, _ in points], [value for _, value in points]

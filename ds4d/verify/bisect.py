"""Where a layout that is not right goes wrong: the axis, or the pair of them, and the tensor.

One process is tried first, which has nothing of the layout; then each axis alone, then each pair:
the first that are wrong are named, or else all together. The whole layout without them says whether
there is more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from ds4d.config.errors import ConfigError
from ds4d.config.types import RunConfig
from ds4d.verify.compare import Off

# axis -> what takes it away; in the order in which they are tried and named
WITHOUT = {
    "tp": ("ds4d.parallel.tp=1", "ds4d.parallel.sequence_parallel=false"),
    "sequence_parallel": ("ds4d.parallel.sequence_parallel=false",),
    "pp": ("ds4d.parallel.pp=1",),
    "schedule": ("ds4d.pipeline={}",),
    "cp": ("ds4d.parallel.cp=1",),
    "dp": ("ds4d.parallel.dp=1",),
    "zero": ("zero_optimization.stage=0",),
    "recompute": ("ds4d.recompute=none",),
    "bf16": ("bf16.enabled=false",),
    "fp16": ("fp16.enabled=false",),
    "autocast": ("torch_autocast.enabled=false",),
}
NEEDS = {"sequence_parallel": "tp", "schedule": "pp"}  # is nothing without


@dataclass(frozen=True)
class Trial:
    """Attributes:
    passed: every row.
    off: tensors that are not within, in the order of the model.
    """

    passed: bool
    off: tuple[Off, ...]


@dataclass(frozen=True)
class Finding:
    """Attributes:
    axes: that are wrong together, and no fewer; none: one plain rank is wrong.
    off: tensors that are not within then, in the order of the model.
    right_without: the whole layout is right without these axes; None: there is nothing left.
    """

    axes: tuple[str, ...]
    off: tuple[Off, ...]
    right_without: bool | None


def axes_of(run: RunConfig) -> tuple[str, ...]:
    """What can be taken away."""
    here = {axis for axis in ("tp", "pp", "cp", "dp") if getattr(run.parallel, axis) > 1}
    here |= {run.precision.param_dtype}
    here |= {"sequence_parallel"} if run.parallel.sequence_parallel else set()
    here |= {"schedule"} if run.pipeline.schedule != "1f1b" else set()
    here |= {"autocast"} if run.deepspeed.get("torch_autocast", {}).get("enabled") else set()
    here |= {"zero"} if run.zero_stage else set()
    here |= {"recompute"} if run.recompute != "none" else set()
    return tuple(axis for axis in WITHOUT if axis in here)


def overrides(without: Sequence[str]) -> tuple[str, ...]:
    """Of a file, so that the axes are gone."""
    return tuple(dict.fromkeys(word for axis in without for word in WITHOUT[axis]))


def bisect(
    axes: Sequence[str], whole: Trial, attempt: Callable[[tuple[str, ...]], Trial]
) -> Finding:
    """Args:
    axes: ``axes_of`` the run.
    whole: of the run, which has failed.
    attempt: tries it without some axes. Its ``ConfigError`` means: there is no such layout, so
        it is not to blame.
    """
    for together in _subsets(axes):
        trial = whole
        if len(together) < len(axes):
            try:
                trial = attempt(tuple(axis for axis in axes if axis not in together))
            except ConfigError:
                continue
        if not trial.passed:
            break
    right_without = None
    if together and len(together) < len(axes):
        right_without = attempt(together).passed
    return Finding(together, trial.off, right_without)


def _subsets(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """None, each, each pair, all."""
    for size in range(min(len(axes), 3)):
        for subset in combinations(axes, size):
            if all(NEEDS.get(axis, axis) in subset for axis in subset):
                yield subset
    yield tuple(axes)

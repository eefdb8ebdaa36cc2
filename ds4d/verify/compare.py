"""Two results of the same steps -> rows with verdicts. Pure.

In fp32 tolerances are those of design.md 2. In half precision nothing is exact: there a layout may
be no further from one plain process in fp32 than one plain process in half precision is, with a
margin for chance (``MARGIN``, and ``FLOOR``: what rounding one number takes).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from ds4d.verify.plain import Result
from ds4d.verify.ranks import LayoutResult

EXACT = 1e-5  # relative, of losses, norms, gradients (L2) and weights (L2)
FAR = 10 * EXACT  # more than rounding makes
# A gradient that is nearly nothing is rounding: its error is measured against at least this part
# of the whole gradient's norm.
LEAST_PART = 0.02
# Weights must be off by less than this part of what they have moved, however little that is.
PART_OF_MOVE = 0.02
ROUNDING = 3e-7  # of weights in fp32, in a few steps
ROUNDED_BYTES = 1e-3  # each collective's are counted whole
NOTHING = 1e-6  # a gradient of less than this part of the whole one's norm is but rounding
SIGNS = ("lion",)  # optimizers that make a whole step of the sign of a rounding error
PART_OF_SIGNS = 0.05
MARGIN = {"all": 1.1, "number": 2.0, "tensor": 3.0}  # of many tensors together; of one
# More where a token's expert may hang on rounding: then it goes, or not, through other weights.
ROUTED = 3.0
# Which of the small weights (norms) Adam moves by rounding is chance: any may be as far off as the
# worst is in the plain process, if that is not more than this part of its move.
CHANCE = 0.15
FLOOR = {"bf16": 2.0**-9, "fp16": 2.0**-12}

Limit = Callable[[str, int], float]  # (what, step) -> tolerance


@dataclass(frozen=True)
class Row:
    """Attributes:
    what: is compared.
    where: name of the tensor, the worst of all; "" where it is one number.
    expected, found: in the plain process (of bytes: by the formula, or the schedule) and in the
        layout; None for tensors.
    error, tolerance: relative; in half precision ``tolerance`` is what plain half precision has.
    """

    what: str
    error: float
    tolerance: float
    where: str = ""
    expected: float | None = None
    found: float | None = None

    @property
    def passed(self) -> bool:
        return self.error <= self.tolerance  # not, where there is NaN


class Off(NamedTuple):
    """A tensor that is not within: ``what`` is "gradient", "weight" or "update"."""

    what: str
    name: str
    error: float


def compare(
    layout: LayoutResult,
    exact: Result,
    half: Result | None = None,
    *,
    precision: str = "fp32",
    optimizer: str = "adamw",
) -> list[Row]:
    """Args:
    exact: the plain process in fp32.
    half: the plain process in half precision, where the layout is.
    precision: of the layout.
    """
    found = layout.whole
    rows = [*_same_names(found, exact)]
    tensors = tensor_rows(layout, exact, half, precision=precision, optimizer=optimizer)
    if half is None:
        rows += _numbers(found, exact, lambda _what, _step: EXACT)
    else:
        rows += _numbers(found, exact, _half_limits(half, exact, FLOOR[precision]))
    for what, of_each in tensors.items():
        if half is not None:
            together = _TOGETHER[what]
            tolerance = _margin("all", exact) * together(half, exact) + FLOOR[precision] / 4
            rows.append(Row(f"{what}s, all", together(found, exact), tolerance))
        rows.append(max(of_each, key=lambda row: (math.isnan(row.error), _part(row))))
    rows += [
        Row(f"tokens, step {step}", abs(a - b), 0.0, "", b, a)
        for step, (a, b) in enumerate(zip(found.tokens, exact.tokens, strict=True), start=1)
    ]
    off, name = layout.disagreement
    rows.append(Row("copies", off, 0.0, name))
    rows.append(Row("what ranks say of the steps", float(not layout.steps_agree), 0.0))
    rows.append(Row("steps left out", layout.skipped, 0.0))
    return [*rows, *_bytes(layout), *_activations(layout)]


def _bytes(layout: LayoutResult) -> Iterator[Row]:
    """More than the formula says is not within: less is what masks and documents save."""
    for what, foretold in layout.foretold.items():
        sent = layout.sent[what]
        if sent or foretold:
            more = max(0.0, sent / foretold - 1) if foretold else math.inf
            yield Row(f"bytes sent: {what}", more, ROUNDED_BYTES, "", foretold, sent)


def _activations(layout: LayoutResult) -> Iterator[Row]:
    """Of the pipeline rank that keeps most of what it may."""
    kept = [(held / planned, held, planned) for held, planned in layout.activations if planned]
    if kept:
        part, held, planned = max(kept)
        rank = f"rank {[held for held, _ in layout.activations].index(held)}"
        yield Row("activation bytes held", max(0.0, part - 1), 0.0, rank, planned, held)


def allowing_rounding(rows: Sequence[Row], exact: Result, double: Result) -> list[Row]:
    """Rows of fp32, each with twice what the plain process itself is off by in fp32: some models
    (states that are updated token by token) make much of rounding.

    Args:
        exact: the plain process in fp32. double: in fp64.
    """
    own = {
        "loss": max(map(relative, exact.losses, double.losses)),
        "grad norm": max(map(relative, exact.grad_norms, double.grad_norms)),
        "gradient": max(gradient_errors(exact, double).values()),
    }
    more = (2 * own.get(row.what.partition(",")[0], 0.0) for row in rows)
    return [replace(row, tolerance=row.tolerance + extra) for row, extra in zip(rows, more)]


def _same_names(found: Result, exact: Result) -> Iterator[Row]:
    """Only where they are not."""
    odd = sorted(found.after.keys() ^ exact.after.keys())
    if odd:
        yield Row("tensors that only one has", len(odd), 0.0, odd[0])


def _numbers(found: Result, exact: Result, limit: Limit) -> Iterator[Row]:
    missing = [math.nan] * len(exact.router_losses)
    for what, of_layout, of_plain in (
        ("loss", found.losses, exact.losses),
        ("router loss", found.router_losses or missing, exact.router_losses),
        ("grad norm", found.grad_norms, exact.grad_norms),
    ):
        for step, (a, b) in enumerate(zip(of_layout, of_plain, strict=True)):
            name = f"{what}, step {step + 1}"
            yield Row(name, relative(a, b), limit(what, step), "", b, a)


def relative(found: float, expected: float) -> float:
    return abs(found - expected) / max(abs(expected), 1e-30)


def _half_limits(half: Result, exact: Result, floor: float) -> Limit:
    """The largest over the steps: a single one may be good by chance."""
    pairs = {
        "loss": (half.losses, exact.losses),
        "router loss": (half.router_losses, exact.router_losses),
        "grad norm": (half.grad_norms, exact.grad_norms),
    }
    worst = {what: max(map(relative, *pair), default=0.0) for what, pair in pairs.items()}
    return lambda what, _step: _margin("number", exact) * worst[what] + floor


def distance(found: Tensor | None, expected: Tensor) -> float:
    """L2; infinite where shapes differ."""
    if found is None or found.shape != expected.shape:
        return math.inf
    return float((found.double() - expected.double()).norm())


def gradient_errors(found: Result, exact: Result) -> dict[str, float]:
    """Relative L2 of each, in the order of the model."""
    least = LEAST_PART * exact.grad_norms[0]
    return {
        name: distance(found.gradients.get(name), gradient) / (float(gradient.norm()) + least)
        for name, gradient in exact.gradients.items()
    }


def move_errors(found: Result, exact: Result) -> dict[str, float]:
    """Of what each weight has moved in all steps, relative L2."""
    errors = {}
    for name, after in exact.after.items():
        moved = float((after - exact.before[name]).norm())
        errors[name] = distance(found.after.get(name), after) / max(moved, 1e-30)
    return errors


def _half_errors(
    found: Result, half: Result, exact: Result
) -> dict[str, tuple[dict[str, float], dict[str, float]]]:
    """Of gradients and of updates: the errors found, and those of plain half precision."""
    return {
        "gradient": (gradient_errors(found, exact), gradient_errors(half, exact)),
        "update": (move_errors(found, exact), move_errors(half, exact)),
    }


def _mean_gradient_error(found: Result, exact: Result) -> float:
    return root_mean_square(gradient_errors(found, exact).values())


def _whole_move_error(found: Result, exact: Result) -> float:
    """Of all weights as one vector: where gradients are small, optimizers like Adam make steps of
    rounding."""
    off = (distance(found.after.get(name), after) for name, after in exact.after.items())
    moved = (distance(exact.before[name], after) for name, after in exact.after.items())
    return math.hypot(*off) / max(math.hypot(*moved), 1e-30)


_TOGETHER = {"gradient": _mean_gradient_error, "update": _whole_move_error}


def _margin(of: str, exact: Result) -> float:
    routed = any("expert" in name for name in exact.after)
    return MARGIN[of] * (ROUTED if routed else 1.0)


def tensor_rows(
    layout: LayoutResult,
    exact: Result,
    half: Result | None = None,
    *,
    precision: str = "fp32",
    optimizer: str = "adamw",
) -> dict[str, list[Row]]:
    """Of every gradient and of every weight, in the order of the model; in half precision of what
    each weight has moved. Args: see ``compare``."""
    found = layout.whole
    if half is None:
        errors = gradient_errors(found, exact)
        gradients = [Row("gradient", error, EXACT, name) for name, error in errors.items()]
        return {"gradient": gradients, "weight": _weight_rows(found, exact, optimizer)}
    rows = {}
    margin, floor = _margin("tensor", exact), FLOOR[precision]
    for what, (errors, plain) in _half_errors(found, half, exact).items():
        least = margin * root_mean_square(plain.values())
        if what == "update":
            worst = min(max(plain.values()), CHANCE)
            least = max(least, _margin("number", exact) * worst)
        rows[what] = [
            Row(what, error, max(margin * plain[name], least) + floor, name)
            for name, error in errors.items()
        ]
    return rows


def _weight_rows(found: Result, exact: Result, optimizer: str) -> list[Row]:
    rows = []
    for name, after in exact.after.items():
        size = max(float(after.norm()), 1e-30)
        moved = float((after - exact.before[name]).norm()) / size
        allowed = min(EXACT, max(ROUNDING, PART_OF_MOVE * moved))
        if float(exact.gradients[name].norm()) < NOTHING * exact.grad_norms[0]:
            allowed = EXACT  # Adam makes small steps of rounding, too
        if optimizer.lower() in SIGNS:
            allowed = max(ROUNDING, PART_OF_SIGNS * moved)
        rows.append(Row("weight", distance(found.after.get(name), after) / size, allowed, name))
    return rows


def _part(row: Row) -> float:
    """Of what it may be off."""
    return row.error / row.tolerance


def root_mean_square(values: Iterable[float]) -> float:
    values = list(values)
    return math.sqrt(sum(value**2 for value in values) / max(1, len(values)))


def off_tensors(rows: dict[str, list[Row]]) -> tuple[Off, ...]:
    """Those that are not within: gradients first, each in the order of the model."""
    return tuple(
        Off(row.what, row.where, row.error)
        for of_each in rows.values()
        for row in of_each
        if not row.passed
    )

"""Logits that are not computed: what a model does to them is written down, for the loss to do.

Between the head and the loss models scale their logits (cohere, granite) or cap them (gemma).
``DeferredLogits`` goes through the model's own forward in the place of logits, and records that
as a ``Tail``, which is then applied to a chunk of logits at a time.

Letters: B sequences, s tokens of each, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Constant = int | float | Tensor  # a tensor has one element and learns nothing


@dataclass(frozen=True)
class Tail:
    """Elementwise steps, in their order: ("mul" | "div" | "add", constant) or ("tanh", None)."""

    steps: tuple[tuple[str, Constant | None], ...] = ()

    def then(self, name: str, constant: Constant | None = None) -> Tail:
        return Tail((*self.steps, (name, constant)))

    def apply_(self, z: Tensor, *, keep: bool) -> list[Tensor]:
        """Take the steps on ``z`` in place.

        Returns:
            What ``backward_`` needs; nothing unless ``keep``.
        """
        kept = []
        for name, constant in self.steps:
            if name == "tanh":
                z.tanh_()
                if keep:
                    kept.append(z.clone())
            else:
                getattr(z, f"{name}_")(constant)
        return kept

    def backward_(self, grad: Tensor, kept: list[Tensor]) -> None:
        """From the gradient of the result to that of the logits, in place; uses up ``kept``."""
        for name, constant in reversed(self.steps):
            if name == "tanh":
                grad.mul_(kept.pop().square_().neg_().add_(1))  # 1 - tanh^2
            elif name != "add":
                getattr(grad, f"{name}_")(constant)


class DeferredLogits:
    """Stands for logits [B, s, V]; knows their shape and the few operations of a ``Tail``.

    Attributes:
        hidden: what the head got.
        tail: what was done so far.

    Raises:
        TypeError: of anything else that is done to it; names the operation.
    """

    def __init__(
        self, hidden: Tensor, vocabulary: int, dtype: torch.dtype, tail: Tail = Tail()
    ) -> None:
        self.hidden, self.tail = hidden, tail
        self.shape = torch.Size((*hidden.shape[:-1], vocabulary))
        self.dtype, self.device = dtype, hidden.device

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> torch.Size | int:
        return self.shape if dim is None else self.shape[dim]

    # -- elementwise ------------------------------------------------------------------------

    def _then(self, name: str, constant: Any = None) -> DeferredLogits:
        if name != "tanh" and not _is_constant(constant):
            raise _unknown(f"{name} with {_described(constant)}")
        return self._with(tail=self.tail.then(name, constant))

    def _with(self, *, tail: Tail | None = None, dtype: torch.dtype | None = None):
        return DeferredLogits(
            self.hidden, self.shape[-1], dtype or self.dtype, self.tail if tail is None else tail
        )

    def mul(self, other: Any) -> DeferredLogits:
        return self._then("mul", other)

    def div(self, other: Any) -> DeferredLogits:
        return self._then("div", other)

    def add(self, other: Any) -> DeferredLogits:
        return self._then("add", other)

    def sub(self, other: Any) -> DeferredLogits:
        return self._then("add", -other if _is_constant(other) else other)

    def rsub(self, other: Any) -> DeferredLogits:
        return self.neg().add(other)

    def __rtruediv__(self, other: Any) -> DeferredLogits:
        raise _unknown(f"div of {_described(other)} by logits")

    def neg(self) -> DeferredLogits:
        return self.mul(-1)

    def tanh(self) -> DeferredLogits:
        return self._then("tanh")

    __mul__ = __rmul__ = mul
    __truediv__ = div
    __add__ = __radd__ = add
    __sub__ = sub
    __rsub__ = rsub
    __neg__ = neg

    # -- what changes nothing: the loss computes in fp32, on the logits' own device -----------

    def float(self) -> DeferredLogits:
        return self._with(dtype=torch.float32)

    def contiguous(self) -> DeferredLogits:
        return self

    def to(self, *args: Any, **kwargs: Any) -> DeferredLogits:
        given = [*args, *kwargs.values()]
        given = [value.dtype if isinstance(value, Tensor) else value for value in given]
        dtype = next((value for value in given if isinstance(value, torch.dtype)), self.dtype)
        if not dtype.is_floating_point:
            raise _unknown(f"to({dtype})")
        return self._with(dtype=dtype)

    def __getitem__(self, index: Any) -> DeferredLogits:
        """Slices, if they keep everything."""
        parts = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis in parts:
            at = parts.index(Ellipsis)
            parts[at : at + 1] = [slice(None)] * (self.ndim - len(parts) + 1)
        for part, size in zip(parts, self.shape):
            if not isinstance(part, slice) or part.indices(size) != (0, size, 1):
                raise _unknown(f"indexing with {index!r}")
        return self

    # -- everything else ----------------------------------------------------------------------

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # python and its libraries ask for these by themselves
            raise AttributeError(name)
        raise _unknown(name)

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> DeferredLogits:
        """``torch.tanh(logits)``, ``constant * logits`` and the like."""
        name = function.__name__.strip("_")
        if name not in _FUNCTIONS or kwargs or not 1 <= len(args) <= 2:
            raise _unknown(name)
        direct, reflected = _FUNCTIONS[name]
        if isinstance(args[0], cls):
            return getattr(args[0], direct)(*args[1:])
        if reflected is None:
            raise _unknown(f"{name} of {_described(args[0])} and logits")
        return getattr(args[1], reflected)(args[0])


# torch's name of a function -> the method for f(logits, ...), and for f(constant, logits)
_FUNCTIONS: dict[str, tuple[str, str | None]] = {
    "tanh": ("tanh", None),
    "neg": ("neg", None),
    "negative": ("neg", None),
    **dict.fromkeys(("mul", "multiply", "rmul"), ("mul", "mul")),
    **dict.fromkeys(("add", "radd"), ("add", "add")),
    **dict.fromkeys(("sub", "subtract"), ("sub", "rsub")),
    **dict.fromkeys(("div", "divide", "true_divide", "truediv"), ("div", None)),
}


def _is_constant(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.requires_grad
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        learned = ", learned" if value.requires_grad else ""
        return f"a tensor of shape {list(value.shape)}{learned}"
    return f"a {type(value).__name__}"


def _unknown(what: str) -> TypeError:
    return TypeError(
        f"{what}: not known to logits that are fused with the loss; they can be scaled and shifted "
        "by constants, capped by tanh, converted to a float type, and sliced so that all is kept"
    )

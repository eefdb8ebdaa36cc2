"""What a script gets from a call of its model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WITH_LABELS = (
    "ds4d.accelerate: these logits were computed to be looked at, beside a loss that ds4d has "
    "computed without them; they have no gradient. For a loss of your own call the model without "
    "labels: it then gives logits with their gradient (not with ds4d.parallel.pp above 1)"
)


class Output(OrderedDict):
    """``loss`` and ``logits`` as transformers' outputs have them: attributes, keys, places.

    Logits that nobody asks for are not computed.

    Args:
        loss: None: no labels were given.
        logits: computes them, whole on every rank; asked at most once, by all ranks alike.
    """

    def __init__(self, loss: Tensor | None, logits: Callable[[], Tensor]) -> None:
        super().__init__()
        if loss is not None:
            super().__setitem__("loss", loss)
        super().__setitem__("logits", None)
        self.__dict__["_make_logits"] = logits

    def _filled(self) -> None:
        if OrderedDict.__getitem__(self, "logits") is None:
            OrderedDict.__setitem__(self, "logits", self._make_logits())

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            if key == "logits":
                self._filled()
            return super().__getitem__(key)
        if key == 0 and "loss" in self:
            return super().__getitem__("loss")
        return self.to_tuple()[key]

    def __getattr__(self, name: str) -> Any:
        if name in ("loss", "logits"):
            return self[name] if name in self else None
        if name in ("past_key_values", "hidden_states", "attentions"):
            return None
        raise AttributeError(name)

    def get(self, key: str, default: Any = None) -> Any:
        return self[key] if key in self else default

    def items(self):
        self._filled()
        return super().items()

    def values(self):
        self._filled()
        return super().values()

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())


class Weighted(torch.autograd.Function):
    """The loss that a script sees, which is that of all ranks, with the way back through this
    rank's part of it.

    Its gradient is ``weight`` times what comes from the script, which may have divided the loss by
    the batches of a step.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        (weight,) = ctx.saved_tensors
        return grad * weight, None, None


class Recorded(torch.autograd.Function):
    """The loss of a micro-batch whose backward pass a pipeline has already made: what the script
    multiplies it by is kept, to be applied to the gradients before the step."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, whole: Tensor, factors: list[Tensor]) -> Tensor:
        ctx.factors = factors
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        ctx.factors.append(grad.detach())
        return None, None, None


class Shown(torch.autograd.Function):
    """Logits without a way back; the attempt is explained."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, anchor: Tensor) -> Tensor:
        return logits.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        raise RuntimeError(WITH_LABELS)


def anchor(device: torch.device) -> Tensor:
    """Something that learns, for a graph to hang on."""
    return torch.zeros((), device=device, requires_grad=True)

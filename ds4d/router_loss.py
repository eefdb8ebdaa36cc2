"""The loss that balances the experts of a mixture, of the whole global batch, in every layout.

It is transformers' ``load_balancing_loss_func`` as one process would have it with the whole global
batch in one batch (Switch Transformers, arXiv 2101.03961, eq. 4-6, summed over top-k slots):

    loss = cross-entropy + coefficient * E * sum_e F_e * P_e

    F_e  choices of expert e / rows       P_e  sum of the probabilities of expert e / rows

over all rows, which are a token in a layer with a router each; padding is none. It is no sum over
micro-batches, but F has no gradient. So a step has two passes:

1. count: the forward passes of the step alone, without gradients, from the same random state; then
   F, P and the number of rows are summed over the ranks that hold other tokens or layers;
2. train: F is a constant now, and what is left is a sum over tokens: each micro-batch adds its
   ``share`` to its loss, where a pipeline cuts the model each stage that of its own layers.

Inside a block all tp ranks have all tokens and the same logits, and gradients there are partial
(``tensor_parallel/blocks.py``): each rank's share is 1 / t of the whole.

A share is made of the logits after the forward pass, outside of what is recomputed: so there the
operations are those that were recorded, and no layer is counted twice.

Letters: B sequences, S tokens, E experts, t tp ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ds4d.comm import all_reduce
from ds4d.data.batch import MicroBatch, real_tokens
from ds4d.tensor_parallel.state import TensorParallel

COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")  # transformers' names, on the model


class Formula(NamedTuple):
    """Attributes:
    experts: E.
    top_k: experts that a token is counted for.
    coefficient: of the loss.
    """

    experts: int
    top_k: int
    coefficient: float


def asks_for_loss(config: PreTrainedConfig) -> bool:
    """transformers adds the loss where router logits are asked for."""
    return bool(getattr(config.get_text_config(), "output_router_logits", False))


def formula_of(model: PreTrainedModel) -> Formula:
    """What ``model`` gives to transformers' function.

    Raises:
        ValueError: it does not have it where models do.
    """
    experts, top_k, *coefficients = (
        getattr(model, name, None)
        for name in ("num_experts", "num_experts_per_tok", *COEFFICIENTS)
    )
    coefficient = next((c for c in coefficients if c is not None), None)
    if None in (experts, top_k, coefficient):
        raise ValueError(f"it has no num_experts, num_experts_per_tok or {COEFFICIENTS[0]}")
    return Formula(experts, top_k, coefficient)


class RouterLoss:
    """Of one model, which has it as ``ds4d_router_loss``; the step's state is here.

    Attributes:
        value: of the last step that was counted: E * sum_e F_e * P_e, float64 scalar, the same on
            all ranks.
    """

    def __init__(self, formula: Formula, tp: TensorParallel) -> None:
        self.formula = formula
        self.value: Tensor | None = None
        self._tp = tp
        self._watched: list[Tensor] | None = None
        self._sums: Tensor | None = None  # float64 [2 E + 1], while it counts: F, P, rows
        self._weights: Tensor | None = None  # fp32 [E], of the probabilities in a share

    @contextmanager
    def watching(self) -> Iterator[list[Tensor]]:
        """Yields the list that gets the logits of each router that runs within."""
        self._watched = []
        try:
            yield self._watched
        finally:
            self._watched = None

    def saw(self, logits: Tensor) -> None:
        """For hooks. Recomputation, in a backward pass, is watched by nobody."""
        if self._watched is not None:
            self._watched.append(logits)

    @contextmanager
    def counting(
        self, group: dist.ProcessGroup, device: torch.device, *, scale: float
    ) -> Iterator[None]:
        """The forward passes of all micro-batches of a step go here, without gradients; then shares
        can be had.

        Args:
            group: ranks that hold other tokens or layers.
            scale: what shares are multiplied by.

        Collective: ``group``, at the end.
        """
        experts, top_k, coefficient = self.formula
        self._sums = torch.zeros(2 * experts + 1, dtype=torch.float64, device=device)
        try:
            with torch.no_grad():
                yield
            sums = all_reduce(self._sums, group, purpose="router loss")
        finally:
            self._sums = None
        chosen, probable, rows = sums.split([experts, experts, 1])
        rows = rows.clamp(min=1)
        self.value = experts * (chosen * probable).sum() / rows.square().squeeze()
        weights = scale * coefficient * experts / self._tp.size * chosen / rows.square()
        self._weights = weights.float()

    def share(self, seen: Sequence[Tensor], batch: MicroBatch) -> Tensor | None:
        """What a micro-batch adds to the loss for the logits that were seen in its forward pass,
        times ``scale``: fp32 scalar. None: nothing; they were counted, or nobody learns.

        Args:
            seen: [B * S, E] each, or [B, S, E].
            batch: as long as what the routers saw.
        """
        if not seen or self._sums is None and not torch.is_grad_enabled():
            return None
        real = real_tokens(batch).flatten()  # [B * S]
        probabilities = (logits.flatten(0, -2).float().softmax(-1) for logits in seen)  # [B * S, E]
        if self._sums is None:
            parts = [(p @ self._weights * real).sum() for p in probabilities]
            return torch.stack(parts).sum()
        for p in probabilities:
            self._count(p, real)
        return None

    def _count(self, probabilities: Tensor, real: Tensor) -> None:
        """Of one layer. Reads no device."""
        experts, top_k, _ = self.formula
        chosen, probable, rows = self._sums.split([experts, experts, 1])
        slots = probabilities.topk(top_k, dim=-1).indices  # [B * S, top_k]
        chosen.scatter_add_(0, slots.flatten(), real.double().repeat_interleave(top_k))
        probable += (probabilities * real[:, None]).sum(0, dtype=torch.float64)
        rows += real.sum()


def install(model: PreTrainedModel, tp: TensorParallel, blocks: Sequence[str]) -> None:
    """If the config asks for router logits, watch the routers of a model, which is cut over tp
    already. Its forward then makes no loss of its own of them.

    Args:
        blocks: paths of modules inside of which all tokens are on each tp rank.

    Raises:
        ValueError: some router is not in a block.
    """
    model.ds4d_router_loss = None
    if not asks_for_loss(model.config):
        return
    model.config.get_text_config().output_router_logits = False
    inside = tuple(f"{block}." for block in blocks)
    outside = [path for path, *_ in routers_of(model) if not path.startswith(inside)]
    if tp.size > 1 and outside:
        raise ValueError(
            f"{tp.size}: output_router_logits: {outside[0]} of this {model.config.model_type} "
            "stands where tp ranks do not all have all tokens; set it to false, or tp to 1"
        )
    model.ds4d_router_loss = RouterLoss(formula_of(model), tp)
    watch(model, model.ds4d_router_loss)


def watch(model: PreTrainedModel, loss: RouterLoss) -> None:
    """Show ``loss`` the logits of the model's routers."""
    for _, router, index in routers_of(model):
        router.register_forward_hook(_hook(loss, index))


def routers_of(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module, int]]:
    """Path, module and place of the logits in its output, of each router, by transformers' own
    table of what a model can record."""
    given = (model._can_record_outputs or {}).get("router_logits", [])
    for recorder in given if isinstance(given, list) else [given]:
        name = recorder.layer_name
        for path, module in model.named_modules():
            in_place = name is None or f".{name.strip('.')}." in f".{path}."
            if in_place and isinstance(module, recorder.target_class):
                yield path, module, recorder.index


def _hook(loss: RouterLoss, index: int):
    def hook(_module: nn.Module, _args: Any, output: Any) -> None:
        loss.saw(output[index] if isinstance(output, tuple) else output)

    return hook

"""The reference: one process with the Hugging Face model and nothing of ds4d's in its steps.

Every document is given to the model alone, one after the other, so that nothing of packing,
padding, masks and micro-batches is left; the loss is the mean over the valid targets of the global
batch. To it comes, where router logits are asked for, what transformers' own function makes of
those of all documents together.

Letters: n tokens of a document, V vocabulary.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import AutoConfig, AutoModelForCausalLM

from ds4d.attention.documents import PADDING
from ds4d.config.types import RunConfig, TrainingConfig
from ds4d.data.batch import IGNORE
from ds4d.data.order import SampleOrder
from ds4d.optim import build_optimizer
from ds4d.router_loss import formula_of

# Eager falcon adds alibi twice, once of its own and once with the mask.
ATTENTION = {"falcon": "sdpa"}

Document = tuple[Tensor, Tensor, Tensor]  # ids, targets, positions: int64 [1, n]


@dataclass
class Result:
    """Of some steps. Tensors by Hugging Face's names, in the order of the model.

    Attributes:
        losses, grad_norms, tokens: of each step.
        gradients: of the first step, before clipping.
        before, after: the weights.
        router_losses: of each step, not in ``losses``; empty where the model makes none.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    router_losses: list[float] = field(default_factory=list)


def train_plainly(
    run: RunConfig, *, dtype: torch.dtype = torch.float32, autocast: bool = False
) -> Result:
    """``training.steps`` steps on ``data.train``, a file of samples.

    Args:
        run: a small one (``small.py``); its layout is not looked at.
        dtype: that the model computes in, and of its gradients; weights are updated in fp32.
        autocast: weights and gradients are in fp32; torch decides what is computed in ``dtype``.
    """
    model = _load(Path(run.model.path), torch.float32 if autocast else dtype)
    parameters = dict(model.named_parameters())
    masters = {name: nn.Parameter(value) for name, value in _copies(parameters).items()}
    optimizer = build_optimizer(
        masters.items(), run.deepspeed["optimizer"], decay_all=run.training.decay_all
    )
    found = Result(before=_copies(masters))
    for step in read_steps(run):
        targets = [targets for _, targets, _ in step]
        tokens = sum(int((t != IGNORE).sum()) for t in targets)
        loss, routed = 0.0, []
        for document in step:
            with torch.autocast("cpu", dtype, enabled=autocast):
                part, router_logits = _loss_sum(model, document, run.training)
            part = part / tokens
            loss += float(part.detach())
            if router_logits:
                routed.append((part, router_logits))
            else:
                part.backward()
        if routed:
            found.router_losses.append(_go_back_together(model, routed))
        gradients = {name: _gradient(p) for name, p in parameters.items()}
        norm = get_total_norm(gradients.values())
        found.gradients = found.gradients or _copies(gradients)
        for name, gradient in gradients.items():
            masters[name].grad = gradient if parameters[name].requires_grad else None
        if limit := run.deepspeed.get("gradient_clipping"):
            clip_grads_with_norm_(masters.values(), limit, norm)
        optimizer.step()
        model.zero_grad()
        with torch.no_grad():
            for name, master in masters.items():
                parameters[name].copy_(master)
        found.losses.append(loss)
        found.grad_norms.append(float(norm))
        found.tokens.append(tokens)
    found.after = _copies(masters)
    return found


def _load(folder: Path, dtype: torch.dtype) -> nn.Module:
    kind = json.loads((folder / "config.json").read_text())["model_type"]
    model = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=ATTENTION.get(kind, "eager"), dtype=dtype
    )
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    for parameter, of_made in zip(model.parameters(), made.parameters(), strict=True):
        parameter.requires_grad_(of_made.requires_grad)  # which reading weights has forgotten
    if dtype == torch.float64:
        with suppress(ValueError):  # raised where there are no experts
            model.set_experts_implementation("eager")  # grouped products have no fp64
    return model.train()


def _copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """In fp32."""
    return {name: tensor.detach().float().clone() for name, tensor in tensors.items()}


def _gradient(parameter: nn.Parameter) -> Tensor:
    """In fp32. A weight that the model does not use has zeros, and decays as the others do."""
    if parameter.grad is None:
        return torch.zeros_like(parameter, dtype=torch.float32)
    return parameter.grad.float().clone()


def read_steps(run: RunConfig) -> Iterator[list[Document]]:
    """The documents of each step's global batch."""
    lines = [json.loads(line) for line in Path(run.data.train.path).read_text().splitlines()]
    order = SampleOrder(len(lines), run.training.seed, run.data.shuffle)
    size = run.batch.train
    for start in range(0, run.training.steps * size, size):
        samples = (lines[order[k]] for k in range(start, start + size))
        yield [document for sample in samples for document in _documents(sample)]


def _documents(sample: dict[str, list[int]]) -> Iterator[Document]:
    rows = zip(*(sample[k] for k in ("document_ids", "input_ids", "labels", "position_ids")))
    for document, tokens in groupby(rows, key=lambda row: row[0]):
        if document != PADDING:
            _, ids, labels, positions = zip(*tokens)
            targets = [*labels[1:], IGNORE]
            yield tuple(torch.tensor([row]) for row in (ids, targets, positions))


def _go_back_together(model: nn.Module, routed: list[tuple[Tensor, tuple[Tensor, ...]]]) -> float:
    """From the losses of all documents, and from the loss of their routers, which is returned.

    Args:
        routed: of each document, its loss and the router logits of each layer.
    """
    losses, of_documents = zip(*routed)
    layers = tuple(torch.cat([x.flatten(0, -2) for x in layer]) for layer in zip(*of_documents))
    function = sys.modules[type(model).__module__].load_balancing_loss_func
    experts, top_k, coefficient = formula_of(model)
    balance = function(layers, experts, top_k)
    (sum(losses) + coefficient * balance).backward()
    return float(balance.detach())


def _loss_sum(
    model: nn.Module, document: Document, training: TrainingConfig
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Over the document's valid targets, and the logits of each router, if they are asked for."""
    ids, targets, positions = document
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    more = {"position_ids": positions} if takes_positions else {}
    output = model(input_ids=ids, use_cache=False, **more)
    logits = output.logits.float()  # [1, n, V]
    kept = targets != IGNORE
    loss = F.cross_entropy(
        logits[kept], targets[kept], reduction="sum", label_smoothing=training.label_smoothing
    )
    loss = loss + training.z_loss * logits[kept].logsumexp(-1).square().sum()
    return loss, getattr(output, "router_logits", None) or ()

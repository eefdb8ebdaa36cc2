"""One plain Hugging Face process on the whole global batch: what every layout must equal."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ds4d.attention.documents import PADDING, Documents
from ds4d.data.batch import IGNORE, MicroBatch, real_tokens

TINY_LLAMA = {
    "model_type": "llama",
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def tiny_model(seed: int = 0, dtype=torch.float32, attn: str = "sdpa", **changes) -> nn.Module:
    """A random tiny model, the same in every process."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**{**TINY_LLAMA, **changes})
    return AutoModelForCausalLM.from_config(config, attn_implementation=attn).to(dtype)


def samples(count: int, length: int = 24, vocab: int = 101, seed: int = 1) -> MicroBatch:
    """Random sequences as one big batch, whose numbers of valid targets differ wildly: case A01's
    3, 50, 7, 60, 1, 40, 12, 30, cut to the length."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab, (count, length), generator=generator)
    targets = torch.cat([ids[:, 1:], torch.full((count, 1), IGNORE)], dim=1)
    for row, valid in zip(range(count), [3, 50, 7, 60, 1, 40, 12, 30] * count):
        targets[row, : max(0, length - 1 - valid)] = IGNORE
    positions = torch.arange(length).expand(count, length).contiguous()
    return MicroBatch(ids, targets, positions)


def padded_samples(count: int, length: int, vocab: int = 101, seed: int = 1) -> MicroBatch:
    """With rows of which up to nearly all is padding."""
    batch = samples(count, length, vocab, seed)
    ids = torch.zeros_like(batch.input_ids)
    for row, real in zip(range(count), [length, 9, length - 1, 4] * count):
        ids[row, real:] = PADDING
        batch.targets[row, real - 1 :] = IGNORE
        batch.input_ids[row, real:] = 0
    return replace(batch, documents=Documents.from_ids(ids, batch.position_ids))


def packed_samples(count: int, length: int, vocab: int = 101, seed: int = 1) -> MicroBatch:
    """Two documents a row, and no padding."""
    batch = samples(count, length, vocab, seed)
    ids = torch.zeros_like(batch.input_ids)
    for row, first in zip(range(count), [5, 14, 8, 20] * count):
        ids[row, first:] = 1
        batch.targets[row, first - 1] = IGNORE
        batch.position_ids[row, first:] -= first
    return replace(batch, documents=Documents.from_ids(ids, batch.position_ids))


def rows(batch: MicroBatch, start: int, stop: int) -> MicroBatch:
    cut = MicroBatch(
        batch.input_ids[start:stop], batch.targets[start:stop], batch.position_ids[start:stop]
    )
    if batch.documents is None:
        return cut
    ids = batch.documents.ids[start:stop]
    return replace(cut, documents=Documents.from_ids(ids, cut.position_ids))


@dataclass
class PlainRun:
    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, torch.Tensor]  # of the first step
    weights: dict[str, torch.Tensor]  # after the last
    router_losses: list[float] = field(default_factory=list)  # where the model makes one


def train_plainly(
    model: nn.Module, batches: list[MicroBatch], optimizer, *, clip: float = 0.0
) -> PlainRun:
    """Loss = mean over the valid targets of the global batch, and what a model that is asked for
    its router logits adds to that; clip; step."""
    run = PlainRun([], [], {}, {})
    for batch in batches:
        real = real_tokens(batch)  # given where it says something: else positions tell documents
        mask = {} if real.all() else {"attention_mask": real.long()}
        given = dict(input_ids=batch.input_ids, position_ids=batch.position_ids, **mask)
        output = model(**given, use_cache=False)
        loss = F.cross_entropy(output.logits.float().flatten(0, 1), batch.targets.flatten())
        whole = loss
        if getattr(output, "aux_loss", None) is not None:
            whole = loss + model.router_aux_loss_coef * output.aux_loss
            run.router_losses.append(float(output.aux_loss))
        whole.backward()
        parameters = list(model.parameters())
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if not run.gradients:
            run.gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        if clip:
            torch.nn.utils.clip_grads_with_norm_(parameters, clip, norm)
        optimizer.step()
        optimizer.zero_grad()
        run.losses.append(float(loss.detach()))
        run.grad_norms.append(float(norm))
    run.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return run


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative L2 distance."""
    scale = expected.double().norm().clamp(min=1e-30)
    return float((actual.double() - expected.double()).norm() / scale)


def assemble(ranks: list[dict[str, tuple]]) -> dict[str, torch.Tensor]:
    """Put logical tensors together from every rank's ``(shape, [(offsets, tensor)])``.

    Raises AssertionError where the pieces leave a hole.
    """
    whole: dict[str, torch.Tensor] = {}
    for pieces_of in ranks:
        for name, (shape, pieces) in pieces_of.items():
            full = whole.setdefault(name, torch.full(shape, float("nan")))
            for offsets, tensor in pieces:
                box = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape))
                full[box] = tensor.to(full.dtype)
    holes = [name for name, full in whole.items() if full.isnan().any()]
    assert not holes, f"no rank holds all of {holes}"
    return whole

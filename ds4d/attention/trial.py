"""Whether a model is the same when its tokens are dealt out to several ranks: it is tried.

A small model of the family (``model/shrink.py``) runs once on whole sequences, and then on the part
of each rank of a ring alone, with the keys that the whole run had. Whatever else lets one token see
another (convolutions, states, masks or positions that the model makes from its input) now sees
other tokens, or none, and gives other logits.

Letters: B sequences, S tokens of a sequence, s of them in a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ds4d import attention
from ds4d.attention.context import Context, ContextParallel, install
from ds4d.attention.documents import Documents
from ds4d.attention.kernels import Call, attend, run_way
from ds4d.attention.ring import Gathered
from ds4d.config.layout import cut_multiple
from ds4d.context_parallel import Cutter
from ds4d.data.batch import MicroBatch
from ds4d.loss import model_inputs
from ds4d.model.shrink import shrunken
from ds4d.tensor_parallel.state import NoGroup

LENGTH, RANKS = 64, 2
MULTIPLE = cut_multiple(RANKS, ulysses=1, parts=1)
DOCUMENT = 20  # tokens of the first of two in a row
CLOSE = 1e-4  # of the largest logit; a model that is not the same is off by far more


def why_not_shared(config: PreTrainedConfig) -> str | None:
    """Why a model can't have its sequences shared by ranks, in one sentence; None: it can."""
    if reason := attention.supports(config, documents=False):
        return reason
    attention.register()
    name = f"model_type {config.model_type}"
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            model = _small_model(config)
            error = _largest_error(model, _batch(config, model.config))
    except Exception as error:  # whatever a family's own code makes of it
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return f"{name} does not run on a part of a sequence ({reason})"
    if error < CLOSE:
        return None
    return (
        f"{name} is another model on parts of a sequence: besides attention something lets one "
        f"token see another, or follows from where a token stands in its part (a small one of the "
        f"family was tried; its logits were off by {error:.1e})"
    )


def _small_model(config: PreTrainedConfig) -> PreTrainedModel:
    """With weights for which every part of the model matters."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        shrunken(config), attn_implementation=attention.NAME, dtype=torch.float32
    ).eval()
    for param in model.parameters():
        noise = torch.randn_like(param)
        if param.dim() > 1:
            param.copy_(noise * param.shape[-1] ** -0.5)
        else:  # norms, biases, scales, which may be small numbers or large ones
            param.copy_(param * (1 + 0.1 * noise) + 0.01 * noise)
    install(model, ContextParallel(NoGroup(), NoGroup()))
    return model


def _batch(config: PreTrainedConfig, small: PreTrainedConfig) -> MicroBatch:
    """A row that is one document, and one of two, where the model can keep them apart.

    Args:
        small: of the small model, which may have a shorter vocabulary or table of positions.
    """
    text = small.get_text_config(decoder=True)
    vocabulary = min(100, getattr(text, "vocab_size", None) or 100)
    length = LENGTH
    if not getattr(text, "rope_parameters", None):  # a table, if anything
        length = min(LENGTH, getattr(text, "max_position_embeddings", None) or LENGTH)
        length = max(MULTIPLE, length - length % MULTIPLE)
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, (2, length))
    positions, document_ids = torch.arange(length).repeat(2, 1), torch.zeros_like(ids)
    if attention.supports(config, documents=True) is None:
        positions[1, DOCUMENT:] -= DOCUMENT
        document_ids[1, DOCUMENT:] = 1
    return MicroBatch(ids, ids, positions, Documents.from_ids(document_ids, positions))


def _largest_error(model: PreTrainedModel, batch: MicroBatch) -> float:
    """Of a part's logits, relative to the largest; NaN where there are any."""
    whole = model(**model_inputs(model, batch)).logits
    parts = [Cutter(rank, RANKS)(batch) for rank in range(RANKS)]
    length = batch.input_ids.shape[1]
    whole_cut = replace(parts[0].cut, spans=(((0, length),),), places=torch.arange(length))
    seen = _Recording(whole_cut, model.ds4d_cp)
    model(**model_inputs(model, batch) | {"context": seen})
    errors = []
    for rank, part in enumerate(parts):
        context = _Remembering(part.cut, model.ds4d_cp, rank=rank, keys=iter(seen.keys))
        logits = model(**model_inputs(model, part) | {"context": context}).logits
        held = torch.cat([torch.arange(*span) for span in part.cut.spans[rank]])
        errors.append((logits - whole[:, held]).abs().max())
    return float(torch.stack(errors).max() / whole.abs().max())


@dataclass(frozen=True, eq=False)
class _Recording(Context):
    """Of whole sequences."""

    keys: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def attend(self, call: Call) -> Tensor:
        self.keys.append((call.key, call.value))
        return attend(call)


@dataclass(frozen=True, eq=False)
class _Remembering(Context):
    """Of a part: what other ranks would send is what was there in the whole sequences."""

    rank: int = 0
    keys: Iterator[tuple[Tensor, Tensor]] = iter(())

    def attend(self, call: Call) -> Tensor:
        return run_way(call, partial(self.way, self._gathered, group=NoGroup(RANKS, self.rank)))

    def _gathered(self, *args: object) -> Gathered:
        way, keys = Gathered(*args), next(self.keys)
        way._gather = lambda key, value: keys
        return way

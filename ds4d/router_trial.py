"""Whether a family makes the loss of its routers that ``router_loss.py`` has: it is tried.

A small model of the family (``model/shrink.py``) gets two sequences, one of them padded, once with
its own loss and once without; the difference, and the number that it reports, must be what the
formula makes of the logits that ``routers_of`` finds.
"""

from __future__ import annotations

import math

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ds4d.data.batch import MicroBatch
from ds4d.model.shrink import shrunken
from ds4d.router_loss import COEFFICIENTS, RouterLoss, asks_for_loss, formula_of, watch
from ds4d.tensor_parallel.state import NoGroup, TensorParallel

LENGTH, PADDED = 16, 5
CLOSE = 1e-5  # relative; another formula is off by far more
KEEP = "set output_router_logits to false"


def why_not_balanced(config: PreTrainedConfig) -> str | None:
    """Why the loss of a model's routers can't be had, in one sentence; None: it can, or is not
    asked for."""
    if not asks_for_loss(config):
        return None
    name = f"output_router_logits: model_type {config.model_type}"
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            small = shrunken(config)
            small.get_text_config().output_router_logits = False
            model = AutoModelForCausalLM.from_config(small, dtype=torch.float32).eval()
            return _compared(name, *_losses(model))
    except Exception as error:  # whatever a family's own code makes of it
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return f"{name}: its loss of routers cannot be tried ({reason}); {KEEP}"


def _compared(name: str, added: float, reported: float | None, ours: float) -> str | None:
    if not reported and not added:
        return f"{name} adds no loss of its routers; {KEEP}"
    if reported is not None and max(abs(reported - ours), abs(added - ours)) <= CLOSE * (1 + ours):
        return None
    return (
        f"{name} has another loss of its routers than the one that ds4d knows, Mixtral's (of a "
        f"small model {added:.4f}, not {ours:.4f}); {KEEP}"
    )


@torch.no_grad()
def _losses(model: PreTrainedModel) -> tuple[float, float | None, float]:
    """What the model adds to its loss if its coefficient is 1, what it reports, and the formula's;
    NaN where it adds nothing."""
    for name in COEFFICIENTS:
        if getattr(model, name, None) is not None:
            setattr(model, name, 1.0)
    for param in model.parameters():  # so that experts are chosen unevenly
        if param.dim() > 1:
            param.normal_(0, param.shape[-1] ** -0.5)
    vocabulary = model.get_input_embeddings().num_embeddings
    ids = torch.randint(min(3, vocabulary - 1), min(100, vocabulary), (2, LENGTH))
    real = torch.ones_like(ids)
    real[1, -PADDED:] = 0
    inputs = dict(input_ids=ids, attention_mask=real, labels=ids, use_cache=False)
    without = model(**inputs, output_router_logits=False)
    whole = model(**inputs, output_router_logits=True)
    added, reported = float(whole.loss - without.loss), getattr(whole, "aux_loss", None)
    if not reported and not added:
        return 0.0, None, math.nan
    loss = RouterLoss(formula_of(model), TensorParallel(NoGroup()))
    watch(model, loss)
    with loss.watching() as seen, loss.counting(NoGroup(), ids.device, scale=1.0):
        model(**inputs)
        loss.share(seen, MicroBatch(ids, ids, ids, real=real.bool()))
    return added, float(reported), float(loss.value)

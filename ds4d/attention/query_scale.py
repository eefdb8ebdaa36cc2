"""Queries that a model scales by where their token stands, which it takes from the shape of its
input: the place in the row of this rank, where the place in the document is meant.

Letters: B sequences, H heads, S tokens of a sequence, s of them on this rank, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ds4d.attention.documents import Documents
from ds4d.models.derive import blueprint_of


def scaled_by_document(
    attention: nn.Module, query: Tensor, documents: Documents | None, places: Tensor | None
) -> Tensor:
    """A query [B, H, s, D], scaled by where tokens stand in their documents.

    Args:
        documents: of whole rows; None: each is one.
        places: int64 [s], of this rank's tokens in their row; None: it has all of them.
    """
    kind = getattr(getattr(attention, "config", None), "model_type", None)
    scale = None if kind is None else blueprint_of(kind).query_scale
    if scale is None or (documents is None and places is None):
        return query
    of_model = torch.arange(query.shape[2], device=query.device)  # [s]
    right = of_model if places is None else places
    if documents is not None:
        right = _places(documents)[:, right]  # [B, S] -> [B, s]
    ratio = scale(attention, right) / scale(attention, of_model)
    ratio = ratio[None] if ratio.dim() == 1 else ratio[:, None]
    return (query * ratio[..., None]).to(query.dtype)


def _places(documents: Documents) -> Tensor:
    """Of each token in its document, int64 [B, S]."""
    bounds = documents.bounds.long()
    count = documents.ids.numel()
    starts = bounds[:-1].repeat_interleave(bounds.diff(), output_size=count)
    return (torch.arange(count, device=starts.device) - starts).view(documents.ids.shape)

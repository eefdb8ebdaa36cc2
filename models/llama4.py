"""Llama 4: layers without positions, whose queries grow with the place of their token."""

import torch
from ds4d.models.blueprint import Blueprint


def _query_scale(attention, places: torch.Tensor) -> torch.Tensor:
    if attention.use_rope or not attention.attn_temperature_tuning:
        return torch.ones_like(places, dtype=torch.float32)
    steps = torch.floor((places.float() + 1.0) / attention.floor_scale)
    return torch.log1p(steps) * attention.attn_scale + 1.0


BLUEPRINT = Blueprint(model_types=("llama4_text",), query_scale=_query_scale)

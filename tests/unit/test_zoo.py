"""What the zoo says of its outcomes, and what makes types that plans say nothing of exact."""

from __future__ import annotations

import pytest
import torch
from ds4d.models.blueprint import Cut
from ds4d.models.derive import plan_of
from torch import nn
from transformers import CONFIG_MAPPING

from ds4d.attention.documents import Documents
from ds4d.attention.interface import attention
from ds4d.attention.query_scale import scaled_by_document
from ds4d.model.meta import meta_model
from ds4d.model.shrink import shrunken
from tests.zoo.table import page, read
from tests.zoo.trials import EXACT, REFUSED, Outcome

OUTCOMES = [
    Outcome("a", "tp 2", EXACT),
    Outcome("a", "pp 2", REFUSED, "model_type a has no layers"),
    Outcome("b", "tp 2", EXACT),
    Outcome("b", "pp 2", REFUSED, "model_type b has no layers"),
    Outcome("c", "tp 2", REFUSED, "other"),
    Outcome("c", "pp 2", "wrong", "loss"),
]


def test_a_page_says_every_outcome_and_each_reason_once():
    text = page(OUTCOMES)
    assert read(text) == {(o.type, o.column): o.outcome for o in OUTCOMES} | {
        ("c", "pp 2"): "**wrong**:"
    }
    assert "| **exact** of 3 | 2 | 0 |" in text and "0 of 3 types are exact in all 2" in text
    assert text.count("model_type T has no layers") == 1 and "1. model_type T" in text


def plan(model_type: str) -> dict:
    config = shrunken(CONFIG_MAPPING[model_type]())
    return plan_of(meta_model(config, dtype=torch.float32))


@pytest.mark.parametrize("model_type", ["glm4_moe_lite", "exaone_moe"])
def test_shared_experts_are_cut_by_name_where_plans_leave_them_out(model_type):
    found, mlp = plan(model_type), "model.layers.*.mlp"
    assert found[f"{mlp}.gate"] == "replicate"
    assert found[f"{mlp}.shared_experts.up_proj"] == "colwise"
    assert found[f"{mlp}.shared_experts.down_proj"] == "rowwise"


def test_two_halves_are_cut_each():
    assert plan("inkling2_text")["model.layers.*.mlp.experts.gate_up_proj"] == Cut(1, blocks=2)


class _Attention(nn.Module):
    """As llama4's, of a layer without positions."""

    config = CONFIG_MAPPING["llama4_text"]()
    use_rope, attn_temperature_tuning, floor_scale, attn_scale = False, True, 2, 1.0


def test_queries_are_scaled_by_their_place_in_the_document():
    ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0]])
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, 6, 7]])

    def scale(places: torch.Tensor) -> torch.Tensor:
        return torch.log1p(torch.floor((places + 1.0) / 2)) + 1

    query = torch.ones(2, 1, 8, 4) * scale(torch.arange(8))[:, None]  # as the model has it
    found = scaled_by_document(_Attention(), query, Documents.from_ids(ids), None)
    torch.testing.assert_close(found[:, 0, :, 0], scale(places))
    mine = torch.tensor([6, 7, 2, 3])  # of a rank of two
    query = torch.ones(2, 1, 4, 4) * scale(torch.arange(4))[:, None]
    found = scaled_by_document(_Attention(), query, Documents.from_ids(ids), mine)
    torch.testing.assert_close(found[:, 0, :, 0], scale(places[:, mine]))
    assert scaled_by_document(_Attention(), query, None, None) is query


def test_a_mask_that_is_learned_is_refused():
    query = torch.ones(1, 1, 4, 4)
    mask = torch.zeros(1, 1, 4, 4, requires_grad=True)
    with pytest.raises(ValueError, match="learns its attention mask"):
        attention(nn.Module(), query, query, query, mask)

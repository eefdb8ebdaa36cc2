"""Whose loss of routers ds4d has, and what it is made of."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from ds4d.data.batch import MicroBatch
from ds4d.router_loss import Formula, RouterLoss
from ds4d.router_trial import why_not_balanced
from ds4d.tensor_parallel.state import NoGroup, TensorParallel
from tests.tp_families import FAMILIES


def asked(model_type: str, **fields):
    return AutoConfig.for_model(model_type, output_router_logits=True, **fields)


def test_not_asked_for_is_not_tried():
    assert why_not_balanced(AutoConfig.for_model("glm4_moe")) is None


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen2_moe"])
def test_families_with_the_loss(name):
    assert why_not_balanced(asked(**FAMILIES[name])) is None


@pytest.mark.parametrize("name, words", [
    ("deepseek_v3", "model_type deepseek_v3 adds no loss of its routers; set"),
    ("qwen4_exp_text", "has another loss of its routers than the one that ds4d knows, Mixtral's"),
])  # fmt: skip
def test_families_without_it(name, words):
    assert words in why_not_balanced(asked(name))


def test_no_router_at_all():
    config = asked("qwen3_moe", num_hidden_layers=2, mlp_only_layers=[0, 1])
    assert "its loss of routers cannot be tried (tuple index" in why_not_balanced(config)


def test_micro_batches_together_are_transformers_loss():
    """The value, and the gradient at every logit."""
    torch.manual_seed(0)
    formula, tokens, layers = Formula(experts=6, top_k=2, coefficient=0.7), 10, 3
    real = torch.rand(4, tokens) > 0.3
    logits = torch.randn(layers, 4, tokens, 6, requires_grad=True)
    flat = tuple(layer.flatten(0, 1) for layer in logits)
    expected = load_balancing_loss_func(flat, 6, 2, real.long())
    (wanted,) = torch.autograd.grad(formula.coefficient * expected, logits)

    ids = torch.zeros(4, tokens, dtype=torch.int64)
    loss = RouterLoss(formula, TensorParallel(NoGroup()))

    def shares():
        for row in range(4):
            batch = MicroBatch(ids[row, None], ids[row, None], ids[row, None], real=real[row, None])
            yield loss.share([layer[row] for layer in logits], batch)

    with loss.counting(NoGroup(), torch.device("cpu"), scale=3.0):
        assert list(shares()) == [None] * 4
    assert float(loss.value) == pytest.approx(float(expected.detach()), rel=1e-6)
    (found,) = torch.autograd.grad(sum(shares()), logits)
    torch.testing.assert_close(found, 3.0 * wanted, rtol=1e-5, atol=1e-7)
    with torch.no_grad():  # of an evaluation
        assert list(shares()) == [None] * 4

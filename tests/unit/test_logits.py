"""Logits that are not there: what is recorded is what torch would have done; all else is refused."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ds4d.config.types import ModelConfig
from ds4d.logits import DeferredLogits, Tail
from ds4d.model.config import hf_config
from ds4d.model.meta import meta_model
from ds4d.tensor_parallel.vocab import ParallelHead, install_head
from tests.unit.model_families import FAMILIES, fields

B, S, V = 2, 3, 7
CAP = torch.tensor(4.0)

RECORDED = {
    "nothing": lambda z: z,
    "mul": lambda z: z * 0.25,
    "rmul": lambda z: 0.25 * z,
    "div": lambda z: z / 3,
    "add": lambda z: 1.0 + (z + 2),
    "sub": lambda z: 1.0 - (z - 2),
    "neg": lambda z: -z,
    "inplace": lambda z: _inplace(z),
    "soft-cap": lambda z: torch.tanh(z / 5.0) * 5.0,
    "functional": lambda z: F.tanh(z / 5.0).mul(5.0),
    "tensor constants": lambda z: CAP * torch.tanh(z / CAP),
    "torch functions": lambda z: torch.mul(torch.div(z, 2.0), CAP),
    "tanh twice": lambda z: (2 * z.tanh()).tanh().add(1).div(0.5),
    "casts": lambda z: z.float().to(torch.float32).to(z.device).contiguous(),
    "slices": lambda z: z[:, slice(0, None), :][..., :V][:][...],
}


def _inplace(z):
    z *= 2
    z /= 3.0
    z -= 1
    return z


@pytest.mark.parametrize("name", RECORDED)
def test_what_is_recorded_is_what_torch_does(name):
    z = torch.randn(B, S, V, dtype=torch.float32).requires_grad_()
    expected = RECORDED[name](z * 1)
    deferred = RECORDED[name](DeferredLogits(torch.zeros(B, S, 4), V, torch.float32))
    assert deferred.shape == expected.shape and deferred.dtype == expected.dtype

    (gradient,) = torch.autograd.grad(expected, z, torch.ones_like(expected))
    ours, ones = z.detach().clone(), torch.ones_like(expected)
    kept = deferred.tail.apply_(ours, keep=True)
    torch.testing.assert_close(ours, expected)
    deferred.tail.backward_(ones, kept)
    torch.testing.assert_close(ones, gradient)


REFUSED = {
    "softmax": lambda z: torch.softmax(z, -1),
    "view": lambda z: z.view(-1, V),
    "logsumexp": lambda z: z.logsumexp(-1),
    "index_fill": lambda z: torch.index_fill(z, -1, torch.tensor([1]), 0.0),
    "indexing": lambda z: z[..., : V - 1],
    "indexing with -1": lambda z: z[:, -1],
    "mul with a tensor of shape": lambda z: z * torch.ones(V),
    "learned": lambda z: torch.nn.Parameter(torch.tensor(2.0)) * z,
    "div of a tensor": lambda z: CAP / z,
    "to(torch.int64)": lambda z: z.to(torch.long),
    "mul with a DeferredLogits": lambda z: z * z,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_recorded_is_refused_by_name(name):
    logits = DeferredLogits(torch.zeros(B, S, 4), V, torch.float32)
    with pytest.raises(TypeError) as error:
        REFUSED[name](logits)
    assert all(word in str(error.value) for word in name.split(" with ")), error.value


def test_sizes():
    logits = DeferredLogits(torch.zeros(B, S, 4), V, torch.bfloat16)
    assert logits.size() == (B, S, V) and logits.size(-1) == V
    assert logits.ndim == logits.dim() == 3
    assert logits.float().dtype == torch.float32 and Tail() == logits.tail


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_is_fused_in_every_family(family):
    """And ``state_dict`` names stay."""
    config = hf_config(ModelConfig(config=fields(family)))
    model = meta_model(config, dtype=torch.float32)
    before = list(model.state_dict()), model.get_output_embeddings().weight
    install_head(model)
    head = model.get_output_embeddings()
    assert isinstance(head, ParallelHead) and head.defers
    assert (list(model.state_dict()), head.weight) == before
    assert "forward" not in model.base_model.__dict__

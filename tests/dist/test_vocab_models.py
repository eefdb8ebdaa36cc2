"""Whole models whose embedding and head are cut by the vocabulary, against plain transformers."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from ds4d.data.batch import MicroBatch
from ds4d.loss import Objective, count_targets, sum_cross_entropy, sum_loss
from ds4d.model.meta import meta_model
from ds4d.tensor_parallel.state import TensorParallel
from ds4d.tensor_parallel.vocab import install_head, shard_embedding
from tests.harness import run_distributed
from tests.reference import TINY_LLAMA, tiny_model
from tests.tp_families import dealt
from tests.vocabulary import B, S, batch_of, check_gradients, give_values, plain_loss

SMALL = {k: v for k, v in TINY_LLAMA.items() if k not in ("model_type", "tie_word_embeddings")}
FAMILIES = [
    dict(model_type="llama", tie_word_embeddings=True),
    dict(model_type="gemma2", head_dim=8, final_logit_softcapping=3.0),
    dict(model_type="gemma3_text", head_dim=8),
    dict(model_type="cohere", logit_scale=0.25),
    dict(model_type="granite", logits_scaling=4.0, embedding_multiplier=3.0),
    dict(model_type="phi"),
    dict(model_type="gptj", n_embd=32, n_head=4, n_layer=2, n_positions=64, rotary_dim=4),
    dict(model_type="opt", word_embed_proj_dim=32, ffn_dim=48, pad_token_id=1),
    dict(model_type="gpt2", n_embd=32, n_head=4, n_layer=2, n_positions=64),
]  # fmt: skip


def families(fields):
    config = AutoConfig.for_model(**{**SMALL, **fields})
    torch.manual_seed(1)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, param in plain.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(param, std=0.1)
    return config, plain


def cut_model(config, plain, tp):
    model = meta_model(config, dtype=torch.float32, attn_implementation="eager")
    memo = {}
    shard_embedding(model.get_input_embeddings(), tp, memo)
    install_head(model, tp, memo)
    give_values(model, plain)
    return model.eval()


def mean_loss(logits, targets):
    return plain_loss(logits, targets, Objective()) / count_targets(targets)


def _family(fields):
    tp = TensorParallel(dist.group.WORLD)
    config, plain = families(fields)
    model = cut_model(config, plain, tp)
    ids, targets = batch_of(101)
    positions = torch.arange(S).expand(B, S)
    batch = MicroBatch(ids, targets, positions)
    assert model.get_output_embeddings().defers

    logits = plain(input_ids=ids, use_cache=False).logits
    expected = mean_loss(logits, targets)
    expected.backward()
    loss = sum_loss(model, batch) / count_targets(targets)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    check_gradients(model, plain)

    # as always: logits, their gradient (every rank computes the same with them), generation
    model.zero_grad()
    plain.zero_grad()
    whole = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(whole, logits, rtol=1e-5, atol=1e-5)
    mean_loss(whole, targets).backward()
    mean_loss(plain(input_ids=ids, use_cache=False).logits, targets).backward()
    check_gradients(model, plain)
    with torch.no_grad():
        tokens = [m.generate(ids[:, :4], max_new_tokens=5, do_sample=False) for m in (model, plain)]
    assert torch.equal(*tokens)


@pytest.mark.parametrize("world", dealt([1, 2, 4], 1))
@pytest.mark.parametrize("fields", FAMILIES, ids=lambda f: f["model_type"])
def test_families(fields, world):
    run_distributed(_family, world, fields=fields)


class OwnHead(nn.Linear):
    def forward(self, hidden):
        return super().forward(hidden).float() * 0.5


def _kept_whole(how):
    tp = TensorParallel(dist.group.WORLD)
    plain = tiny_model()
    if how == "own head":
        plain.lm_head.__class__ = OwnHead
    else:
        plain.register_forward_hook(_square_logits)
    model = meta_model(plain.config, dtype=torch.float32, attn_implementation="sdpa")
    if how == "own head":
        model.lm_head.__class__ = OwnHead
    else:
        model.register_forward_hook(_square_logits)
    shard_embedding(model.get_input_embeddings(), tp)
    install_head(model, tp)
    give_values(model, plain)
    ids, targets = batch_of(101)
    positions = torch.arange(S).expand(B, S)
    plain_loss(plain(input_ids=ids).logits, targets, Objective(0.1)).backward()
    sum_loss(model, MicroBatch(ids, targets, positions), Objective(0.1)).backward()
    check_gradients(model, plain)


def _square_logits(_module, _args, output):
    output.logits = output.logits.square()


@pytest.mark.parametrize("how", ["own head", "own tail"])
@pytest.mark.parametrize("world", [1, 2])
def test_what_can_not_be_fused_is_computed_whole(how, world):
    run_distributed(_kept_whole, world, how=how)


def _whole_head_of_a_shard():
    """Scattered, a head that is not cut gathers its input, and sends its stretch back."""
    tp = TensorParallel(dist.group.WORLD, scattered=True)
    model, plain = tiny_model(), tiny_model()
    for m in (model, plain):
        m.lm_head.__class__ = OwnHead
    install_head(model, tp)
    _, targets = batch_of(101)
    hidden = torch.randn(B, S, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    plain_loss(plain.lm_head(hidden), targets, Objective()).backward()
    shard = hidden.detach().chunk(tp.size, 1)[tp.rank].requires_grad_()
    sum_cross_entropy(model.lm_head(shard), targets).backward()
    torch.testing.assert_close(shard.grad, hidden.grad.chunk(tp.size, 1)[tp.rank])
    check_gradients(model.lm_head, plain.lm_head)


def test_a_head_that_is_not_cut_under_sequence_parallelism():
    run_distributed(_whole_head_of_a_shard, 2)

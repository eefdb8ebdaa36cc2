"""A tp rank's part of a model, read or drawn: all parts together are what one process has."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds4d.config.types import ModelConfig
from ds4d.model.build import fill, stored_or_initial
from ds4d.model.config import hf_config
from ds4d.model.initial import InitialValues
from ds4d.model.meta import logical_model, meta_model
from ds4d.model.weights import Weights
from tests.shards import cut_by_hand, held, put_together
from tests.unit.model_families import fields
from tests.unit.test_model_weights import edit, save

FAMILIES = ["llama", "llama-tied", "phi3", "mixtral", "gpt2"]


def parts(config, ranks, folder=None, dtype=torch.float32):
    """Every rank's part in turn; from ``folder`` or from scratch."""
    models = []
    for rank in range(ranks):
        logical = logical_model(config)
        values = InitialValues(logical, seed=5)
        if folder is not None:
            values = stored_or_initial(Weights(folder, logical), values)
        models.append(cut_by_hand(meta_model(config, dtype=dtype), rank, ranks))
        fill(models[-1], values, device="cpu")
    return models


def same_as_one(config, ranks, folder=None, dtype=torch.float32):
    models = parts(config, ranks, folder, dtype)
    (one,) = parts(config, 1, folder, dtype)
    found = put_together([held(model) for model in models])
    for name, param in one.named_parameters():
        assert torch.equal(found.pop(name), param), name
    assert not found
    for model in models:
        for name, buffer in one.named_buffers():
            assert torch.equal(model.get_buffer(name), buffer), name
        for param in model.parameters():  # no view of something larger
            assert param.untyped_storage().nbytes() == param.nbytes and param.is_contiguous()
    return models


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_from_scratch(family, ranks):
    config = hf_config(ModelConfig(config=fields(family) | {"vocab_size": 101}))
    models = same_as_one(config, ranks, dtype=torch.bfloat16)
    first, second = (m.get_input_embeddings().weight for m in models[:2])
    assert not torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_parts_from_files(family, dtype, tmp_path):
    save(family, tmp_path, max_shard_size="20KB")
    config = hf_config(ModelConfig(path=str(tmp_path)))
    for ranks in (2, 4):
        same_as_one(config, ranks, tmp_path, dtype)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    found = put_together([held(model) for model in parts(config, 2, tmp_path, dtype)])
    assert all(torch.equal(found[name], p) for name, p in theirs.named_parameters())


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [67, 72])
def test_a_vocabulary_with_added_tokens(size, tied, tmp_path):
    """Case B14: 64 tokens, resized by transformers, then loaded in parts."""
    torch.manual_seed(0)
    changes = {"vocab_size": 64, "tie_word_embeddings": tied, "pad_token_id": None}
    old = AutoModelForCausalLM.from_config(
        hf_config(ModelConfig(config=fields("llama") | changes))
    )
    rows = old.get_input_embeddings().weight.detach().clone()
    old.resize_token_embeddings(size)
    old.save_pretrained(tmp_path)
    config = hf_config(ModelConfig(path=str(tmp_path)))
    for ranks in (2, 3, 4):
        models = parts(config, ranks, tmp_path)
        found = put_together([held(model) for model in models])
        for name, param in old.named_parameters():
            assert torch.equal(found[name], param), (ranks, name)
        assert torch.equal(found["model.embed_tokens.weight"][:64], rows)
        assert tied == ("lm_head.weight" not in found)
        local = models[0].get_input_embeddings().weight.shape[0]
        assert local == -(-size // ranks)
        assert all((m.lm_head.weight is m.model.embed_tokens.weight) == tied for m in models)


def test_a_rank_with_nothing_but_padding(tmp_path):
    """5 tokens on 4 ranks: two a rank."""
    config = hf_config(
        ModelConfig(config=fields("llama") | {"vocab_size": 5, "pad_token_id": None})
    )
    same_as_one(config, 4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    models = same_as_one(hf_config(ModelConfig(path=str(tmp_path))), 4, tmp_path)
    assert not models[3].get_input_embeddings().weight.any()


def test_a_tied_pair_that_differs_is_an_error_in_parts(tmp_path):
    save("llama-tied", tmp_path)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    config = hf_config(ModelConfig(path=str(tmp_path)))
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        parts(config, 2, tmp_path)

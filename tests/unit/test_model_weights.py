"""From weights: what transformers' from_pretrained makes of a folder, and what can be wrong."""

from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from ds4d.config.types import ModelConfig
from ds4d.model.build import build_model
from ds4d.model.config import hf_config
from ds4d.model.meta import logical_model
from ds4d.model.weights import Weights
from ds4d.tensor_parallel.shard import Shard, part_of
from tests.unit.model_families import FAMILIES, fields

IDS = torch.arange(24).view(2, 12) % 90 + 3


def save(family: str, folder, **kwargs) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(hf_config(ModelConfig(config=fields(family))))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too must be read
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.save_pretrained(folder, **kwargs)


def build(folder, dtype=torch.float32):
    model = ModelConfig(path=str(folder))
    return build_model(
        model,
        config=hf_config(model),
        dtype=dtype,
        device="cpu",
        seed=0,
        attn_implementation="eager",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_is_what_from_pretrained_loads(family, dtype, tmp_path):
    save(family, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=dtype, attn_implementation="eager"
    )
    ours = build(tmp_path, dtype).eval()
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in [*theirs.named_parameters(), *theirs.named_buffers()]:
        value = ours.get_parameter_or_buffer(name)
        assert value.dtype == tensor.dtype and torch.equal(value, tensor), name
        assert value.untyped_storage().nbytes() == value.nbytes, name  # no view of something larger
    with torch.no_grad():
        expected = theirs(input_ids=IDS, use_cache=False).logits
        assert torch.equal(ours(input_ids=IDS, use_cache=False).logits, expected)


def test_several_files_and_parts(tmp_path):
    save("mixtral", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    weights = Weights(tmp_path, logical_model(hf_config(ModelConfig(path=str(tmp_path)))))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    experts = "model.layers.1.mlp.experts.gate_up_proj"
    for name in ("model.embed_tokens.weight", experts):
        rows, columns = theirs[name].shape[:2]
        for shard in (Shard(0, rows, ((1, 3),)), Shard(1, columns, ((0, 4), (9, 12)), 1)):
            assert torch.equal(weights(name, shard), part_of(theirs[name], shard))
        assert torch.equal(weights(name), theirs[name])


def edit(folder, change) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def test_missing_tensors_are_named_together(tmp_path):
    save("llama", tmp_path)
    lost = ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"]
    edit(tmp_path, lambda tensors: [tensors.pop(name) for name in lost])
    with pytest.raises(ValueError, match="not in the files") as error:
        build(tmp_path)
    assert all(name in str(error.value) for name in lost)


def test_a_missing_expert_is_named(tmp_path):
    save("qwen3_moe", tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.experts.2.up_proj.weight"))
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts"):
        build(tmp_path)


def test_a_resized_table_is_an_error_with_both_shapes(tmp_path):
    save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 99}))
    with pytest.raises(ValueError, match=r"embed_tokens.weight.*\[96, 32\].*\[99, 32\]"):
        build(tmp_path)


def test_unexpected_tensors_are_a_note(tmp_path, caplog):
    save("llama", tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"value_head.weight": torch.ones(3)}))
    with caplog.at_level(logging.WARNING):
        build(tmp_path)
    assert "value_head.weight" in caplog.text


@pytest.mark.parametrize("present", ["model.embed_tokens.weight", "lm_head.weight"])
def test_either_name_of_a_tied_pair_is_enough(present, tmp_path):
    save("llama-tied", tmp_path)
    edit(tmp_path, lambda t: t.update({present: t.pop("model.embed_tokens.weight")}))
    model = build(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, load_file(tmp_path / "model.safetensors")[present])


def test_a_tied_pair_that_differs_is_an_error(tmp_path):
    save("llama-tied", tmp_path)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        build(tmp_path)


def test_folders_that_hold_no_weights(tmp_path):
    save("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors \(\d+ bytes\) is damaged"):
        build(tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match="neither model.safetensors nor"):
        build(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"\.bin files.*\n.*save_pretrained"):
        build(tmp_path)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="model-00001-of-00002.safetensors"):
        build(tmp_path)

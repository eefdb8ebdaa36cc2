"""The Hugging Face config: what is asked for is what is made, or an error names the field."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from ds4d.config.types import ModelConfig
from ds4d.model.config import hf_config
from tests.unit.model_families import fields


def config_of(changes, **kwargs):
    return hf_config(ModelConfig(config=fields("llama") | changes), **kwargs)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_sizee": 64}, r"ds4d\.model\.config\.hidden_sizee.*did you mean 'hidden_size'"),
        ({"hidden_size": "64"}, r"ds4d\.model\.config: .*'hidden_size' expected int, got str"),
        ({"model_type": "lama"}, r"ds4d\.model\.config\.model_type: 'lama'.*did you mean 'llama'"),
        ({"model_type": "bert2"}, "no causal language model"),
        ({"vocab_size": "auto"}, r"ds4d\.model\.config\.vocab_size"),
        ({"model_type": "gpt_neox", "rope_theta": 5.0}, r"config\.rope_theta: gpt_neox has no"),
    ],
)
def test_wrong_fields(changes, message):
    with pytest.raises(ValueError, match=message):
        config_of(changes)


def test_all_unknown_fields_are_reported_together():
    with pytest.raises(ValueError) as error:
        config_of({"hidden_sizee": 1, "num_layerz": 2})
    assert "hidden_sizee" in str(error.value) and "num_layerz" in str(error.value)


def test_older_spellings_that_have_an_effect_are_taken():
    config = config_of({"rope_theta": 5e5, "torch_dtype": "bfloat16"})
    assert config.rope_parameters["rope_theta"] == 5e5


def test_a_field_that_only_the_model_reads_is_taken():
    assert hf_config(ModelConfig(config={"model_type": "qwen3_moe", "head_dim": 8})).head_dim == 8


def test_auto_vocabulary_and_special_tokens():
    tokens = SimpleNamespace(bos_token_id=None, eos_token_id=9, pad_token_id=9)
    config = hf_config(
        ModelConfig(config={"model_type": "llama", "vocab_size": "auto", "bos_token_id": 4}),
        vocab_size=300,
        tokenizer=tokens,
    )
    assert (config.vocab_size, config.eos_token_id, config.bos_token_id) == (300, 9, 4)
    assert config.pad_token_id is None  # it is the end of text, which must be trained


def test_a_saved_config_reads_back(tmp_path):
    config = config_of({"rope_theta": 5e5})
    config.save_pretrained(tmp_path)
    again = hf_config(ModelConfig(path=str(tmp_path)))
    changed = {k for k, v in again.to_dict().items() if config.to_dict()[k] != v}
    assert changed <= {"_name_or_path"}
    saved = json.loads((tmp_path / "config.json").read_text())
    assert hf_config(ModelConfig(config=saved)).hidden_size == config.hidden_size


def test_wrong_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match="has no config.json"):
        hf_config(ModelConfig(path=str(tmp_path)))
    with pytest.raises(ValueError, match="is no folder here"):
        hf_config(ModelConfig(path=str(tmp_path / "absent")))
    (tmp_path / "config.json").write_text('{"model_type": "made_up"}')
    with pytest.raises(ValueError, match="no config that transformers reads"):
        hf_config(ModelConfig(path=str(tmp_path)))
    quantized = fields("llama") | {"quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(ValueError, match="quantized"):
        hf_config(ModelConfig(path=str(tmp_path)))

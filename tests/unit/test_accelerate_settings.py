"""What a script's file says, completed by the script."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig

from ds4d.accelerate.settings import ACCELERATES, VARIABLE, ScriptFile
from ds4d.config.errors import ConfigError

MODEL = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
FILE = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}},
    "zero_optimization": {"stage": 1},
    "ds4d": {"parallel": {"tp": 2}},
}


def run_of(content, *, world_size=4, micro=3, accumulation=2, fills=None, precision=None):
    return ScriptFile.find(content).run(
        MODEL,
        world_size=world_size,
        micro=micro,
        accumulation=accumulation,
        fills=fills or {},
        precision=precision,
    )


def test_auto_is_what_the_script_says():
    run = run_of(FILE, fills={"optimizer.params.lr": 0.25})
    assert (run.batch.micro, run.batch.accumulation, run.batch.train) == (3, 2, 12)
    assert run.deepspeed["optimizer"]["params"]["lr"] == 0.25
    assert (run.parallel.tp, run.parallel.dp) == (2, 2)


def test_numbers_that_contradict_the_script_are_said_together():
    content = FILE | {
        "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 4,
        "ds4d": {"parallel": {"tp": 3}},
    }  # fmt: skip
    with pytest.raises(ConfigError) as error:
        run_of(content, world_size=6)
    text = str(error.value)
    assert "train_micro_batch_size_per_gpu: 8 in the file, 3 in the script" in text
    assert "gradient_accumulation_steps: 4 in the file, 2 in the script" in text
    assert "ds4d.parallel.tp" in text, "what ds4d's own rules say stands beside it"


def test_the_precision_that_the_script_asks_for():
    assert run_of(FILE).precision.param_dtype == "fp32"
    assert run_of(FILE, precision="bf16").precision.param_dtype == "bf16"
    auto = FILE | {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    for precision in (None, "bf16", "fp16"):
        assert run_of(auto, precision=precision).precision.param_dtype == (precision or "fp32")
    with pytest.raises(ConfigError, match="bf16.enabled: false in the file, true in the script"):
        run_of(FILE | {"bf16": {"enabled": False}}, precision="bf16")


def test_model_data_and_length_are_the_scripts():
    block = {
        "model": {"path": "nowhere"}, "data": {"seq_len": 7}, "training": {"epochs": 3, "seed": 5},
        "parallel": {"tp": 2},
    }  # fmt: skip
    run = run_of(FILE | {"ds4d": block})
    assert run.model.config["hidden_size"] == 32 and run.training.seed == 5


def test_an_unknown_key_is_an_error_before_there_is_a_model():
    with pytest.raises(ConfigError, match="ds4d.parallel.tpp"):
        ScriptFile.find({"ds4d": {"parallel": {"tpp": 2}}}).layout(2)


def test_degrees_that_need_the_model_are_refused():
    with pytest.raises(ConfigError, match='ds4d.parallel.tp.*"auto"'):
        ScriptFile.find({"ds4d": {"parallel": {"tp": "auto"}}}).layout(2)
    with pytest.raises(ConfigError, match="tp 2 x pp 1 x cp 1 = 2 does not divide the 3 ranks"):
        ScriptFile.find(FILE).layout(3)


def test_where_the_file_is_named(tmp_path, monkeypatch):
    named = {}
    for name in ("mine", "accelerates"):
        named[name] = tmp_path / f"{name}.json"
        named[name].write_text(json.dumps(FILE))
    for variable in (VARIABLE, ACCELERATES):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigError, match="no JSON file is given"):
        ScriptFile.find(None)
    monkeypatch.setenv(VARIABLE, str(named["mine"]))
    assert ScriptFile.find(None).name == str(named["mine"])
    monkeypatch.setenv(ACCELERATES, str(named["accelerates"]))
    assert ScriptFile.find(None).name == str(named["accelerates"])
    assert ScriptFile.find(str(named["mine"])).name == str(named["mine"])


def test_comments_in_the_file_are_no_error(tmp_path):
    file = tmp_path / "ds4d.json"
    file.write_text('{"ds4d": {"parallel": {"tp": 2}}, // four GPUs\n}')
    assert ScriptFile.find(file).layout(4)[0].dp == 2


def test_what_accelerate_writes_into_the_dict_is_taken_out():
    content = FILE | {"steps_per_print": float("inf"), "bf16": {"enabled": False}}
    plugins = SimpleNamespace(config=content)
    assert run_of(plugins, precision="bf16").precision.param_dtype == "bf16"


def test_a_version_that_is_not_known_is_refused(monkeypatch):
    from ds4d.accelerate import patches

    versions = {"transformers": "5.24.0", "accelerate": "1.99.0"}
    monkeypatch.setattr(patches, "version", versions.__getitem__)
    with pytest.raises(ImportError, match="accelerate 1.15, installed is 1.99.0"):
        patches.check_versions()

"""Generation and evaluation by tensor-parallel ranks: what one process gives."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig

from ds4d import cli
from ds4d.config.types import ParallelConfig
from ds4d.evaluate import evaluate
from ds4d.generate import generate
from ds4d.mesh import Mesh
from ds4d.saved_model import load_model
from tests.dist.test_launch import ROOT, environment
from tests.harness import run_distributed
from tests.unit.test_generate import (
    byte_tokenizer,
    make,
    save_checkpoint,
    save_folder,
)

PROMPTS = ["def f(x):", "a", 'import os,\n"sys"', "--tp 'x'"]
LONG = {"max_position_embeddings": 256, "eos_token_id": None}


def generate_with_tp(**kwargs) -> list[str]:
    return generate(mesh=Mesh.create(ParallelConfig(tp=2)), **kwargs)


def dtype_with_tp(path: Path) -> torch.dtype:
    model = load_model(path, device="cpu", mesh=Mesh.create(ParallelConfig(tp=2)))
    assert {p.dtype for p in model.parameters()} == {model.dtype}
    return model.dtype


def same_with_tp(**kwargs) -> list[str]:
    """The texts of two ranks; they are those of one process."""
    alone = generate(**kwargs)
    assert run_distributed(generate_with_tp, 2, **kwargs) == [alone, alone]
    return alone


def run_ds4d(*words: str | Path) -> str:
    """What ``ds4d WORDS`` prints on stdout."""
    command = [sys.executable, "-m", "ds4d", *map(str, words)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_command_prints_what_one_process_prints(tmp_path, capsys):
    save_folder("llama", tmp_path, byte_tokenizer(), **LONG)
    words = ["generate", tmp_path, "--max-new-tokens", 200, "--json", "--", *PROMPTS]
    printed = run_ds4d(*words[:1], "--tp", 2, *words[1:])
    capsys.readouterr()  # what libraries said before
    assert cli.main([str(word) for word in words]) == 0
    assert printed == capsys.readouterr().out
    assert min(len(each["text"]) for each in json.loads(printed)) > 180  # the rest is special


@pytest.mark.parametrize("family", ["llama-tied", "gpt2", "gemma2", "opt"])
def test_ranks_say_what_one_process_says(tmp_path, family):
    save_folder(family, tmp_path, byte_tokenizer())
    texts = same_with_tp(path=tmp_path, prompts=PROMPTS, max_new_tokens=24)
    assert len(set(texts)) == len(PROMPTS)


def test_drawing_is_the_same_on_all_ranks(tmp_path):
    save_folder("llama-tied", tmp_path, byte_tokenizer())
    drawn = dict(path=tmp_path, prompts=PROMPTS, max_new_tokens=40, temperature=2.0)
    assert same_with_tp(**drawn, seed=1) != same_with_tp(**drawn, seed=2)


def test_the_folder_says_which_tokens_end_a_text(tmp_path):
    save_folder("llama-tied", tmp_path, byte_tokenizer(), eos_token_id=None)
    settings = dict(path=tmp_path, prompts=PROMPTS, max_new_tokens=40)
    endless = same_with_tp(**settings)
    ends = byte_tokenizer()(endless[0][3])["input_ids"]
    GenerationConfig(eos_token_id=ends).save_pretrained(tmp_path)
    assert same_with_tp(**settings)[0] == endless[0][: endless[0].index(endless[0][3]) + 1]


def test_ranks_read_their_parts_of_a_checkpoint(tmp_path):
    save_checkpoint(make("llama"), tmp_path, byte_tokenizer())
    same_with_tp(path=tmp_path, prompts=PROMPTS, max_new_tokens=24)


def test_the_dtype_is_that_of_the_file_where_the_config_has_none(tmp_path):
    make("llama-tied").bfloat16().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert run_distributed(dtype_with_tp, 2, path=tmp_path) == [torch.bfloat16] * 2


def test_eval_gives_the_loss_of_one_process(tmp_path):
    model, text = tmp_path / "model", tmp_path / "text.txt"
    save_folder("llama", model, byte_tokenizer())
    text.write_text("def f(x):\n    return x + 1\n" * 40)
    source = {"type": "text", "path": str(text)}
    overrides = [f"ds4d.data.cache_dir={tmp_path}/cache", "ds4d.data.seq_len=64"]
    alone = evaluate(model, source=source, overrides=overrides)
    sets = [word for override in overrides for word in ("--set", override)]
    printed = run_ds4d("eval", model, "--source", json.dumps(source), *sets, "--tp", 2, "--json")
    assert json.loads(printed) == pytest.approx(alone, rel=1e-5)

"""Generation and evaluation by the stages of a pipeline: what one Hugging Face process gives."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds4d import cli
from ds4d.config.types import ParallelConfig
from ds4d.evaluate import evaluate
from ds4d.generate import generate
from ds4d.mesh import Mesh
from ds4d.model.checkpoint_weights import CheckpointWeights
from ds4d.model.weights import Weights
from ds4d.pipeline.actions import Placement
from ds4d.pipeline.generate import join_stages
from ds4d.saved_model import load_model
from tests.dist.test_generate import PROMPTS, run_ds4d
from tests.harness import run_distributed
from tests.unit.model_families import FAMILIES
from tests.unit.test_generate import (
    byte_tokenizer,
    make,
    one_by_one,
    save_checkpoint,
    save_folder,
)


def with_layers(family: str, count: int) -> dict[str, int]:
    return {"n_layer" if family in ("gpt2", "bloom") else "num_hidden_layers": count}


def generate_in(layout: dict[str, int], **kwargs) -> list[str]:
    return generate(mesh=Mesh.create(ParallelConfig(**layout)), **kwargs)


def evaluate_in(layout: dict[str, int], **kwargs) -> dict[str, float]:
    return evaluate(mesh=Mesh.create(ParallelConfig(**layout)), progress=False, **kwargs)


def by_ranks(body, **layout: int):
    """``body`` on the ranks of a layout: the results, by rank."""
    ranks = layout.get("pp", 1) * layout.get("tp", 1)
    return partial(run_distributed, body, ranks, layout=layout)


def read_and_kept(layout: dict[str, int], path: Path) -> tuple[set[str], int, list[int]]:
    """Of this rank: tensors read, elements of its parameters, elements in its cache by layer."""
    mesh = Mesh.create(ParallelConfig(**layout))
    read: set[str] = set()

    def spy(kind):
        call = kind.__call__

        def record(self, name, shard=None):
            read.add(name)
            return call(self, name, shard)

        return mock.patch.object(kind, "__call__", record)

    with spy(Weights), spy(CheckpointWeights):
        model = load_model(path, device="cpu", mesh=mesh)
    join_stages(model.ds4d_stages, mesh, Placement.loop(mesh.parallel.pp, 1))
    ids = torch.full((2, 5), 7)
    made = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=4,
        eos_token_id=None,
        return_dict_in_generate=True,
    )
    cached = [layer.keys.numel() for layer in made.cache.layers]
    return read, sum(p.numel() for p in model.parameters()), cached


@pytest.mark.parametrize(
    "family, layers, layout, tokens, changes",
    [
        ("llama", 5, {"pp": 2}, 200, {}),
        ("llama-tied", 4, {"pp": 4}, 200, {}),
        ("gpt2", 5, {"pp": 2, "tp": 2}, 200, {}),
        ("gemma2", 6, {"pp": 4}, 200, {"sliding_window": 8}),
        ("opt", 4, {"pp": 2}, 60, {}),
        ("bloom", 4, {"pp": 4}, 60, {}),
        ("qwen3", 4, {"pp": 2, "tp": 2}, 60, {}),
        ("mixtral", 4, {"pp": 2}, 60, {}),
    ],
)
def test_stages_say_what_one_process_says(tmp_path, family, layers, layout, tokens, changes):
    changes = changes | with_layers(family, layers) | {"eos_token_id": None}
    if family != "bloom":
        changes["max_position_embeddings"] = 256
    save_folder(family, tmp_path, byte_tokenizer(), **changes)
    texts = by_ranks(generate_in, **layout)(path=tmp_path, prompts=PROMPTS, max_new_tokens=tokens)
    assert texts == [one_by_one(tmp_path, PROMPTS, max_new_tokens=tokens)] * len(texts)
    assert len(set(texts[0])) == len(PROMPTS)


def test_layers_that_keep_no_keys(tmp_path):
    """lfm2's first layers are convolutions, and have a state instead."""
    config = AutoConfig.for_model(
        "lfm2",
        **FAMILIES["llama"]
        | {"vocab_size": 99, "max_position_embeddings": 256, "eos_token_id": None}
        | {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]},
    )
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    settings = dict(path=tmp_path, prompts=PROMPTS, max_new_tokens=60)
    texts = by_ranks(generate_in, pp=4)(**settings)
    assert texts == [generate(**settings)] * 4
    assert texts[0][1:2] == one_by_one(tmp_path, PROMPTS[1:2], max_new_tokens=60)


def test_texts_end_where_they_end(tmp_path):
    save_folder("llama", tmp_path, byte_tokenizer())
    settings = dict(path=tmp_path, prompts=PROMPTS, max_new_tokens=40)
    alone = generate(**settings)
    assert by_ranks(generate_in, pp=2)(**settings) == [alone] * 2
    assert len(set(map(len, alone))) > 1


@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 2, "tp": 2}])
def test_drawing_is_the_same_on_all_ranks(tmp_path, layout):
    save_folder("llama-tied", tmp_path, byte_tokenizer())
    draw = partial(
        by_ranks(generate_in, **layout),
        path=tmp_path, prompts=PROMPTS, max_new_tokens=40, temperature=2.0,
    )  # fmt: skip
    alone = generate(tmp_path, PROMPTS, max_new_tokens=40, temperature=2.0, seed=1)
    drawn = draw(seed=1)
    assert drawn == [alone] * len(drawn) != draw(seed=2)


def test_half_precision_is_that_of_one_process(tmp_path):
    make("llama-tied", num_hidden_layers=4).bfloat16().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    settings = dict(path=tmp_path, prompts=PROMPTS, max_new_tokens=40)
    assert by_ranks(generate_in, pp=4)(**settings) == [generate(**settings)] * 4


@pytest.mark.parametrize("kind", ["folder", "checkpoint"])
def test_a_stage_reads_and_keeps_its_own_layers_alone(tmp_path, kind):
    model = make("llama-tied", num_hidden_layers=4)
    if kind == "folder":
        model.save_pretrained(tmp_path)
        byte_tokenizer().save_pretrained(tmp_path)
    else:
        save_checkpoint(model, tmp_path, byte_tokenizer())
    weights = {name: p.numel() for name, p in model.named_parameters()}
    embedding = "model.embed_tokens.weight"  # the head, too

    def of_layers(*layers: int) -> set[str]:
        return {name for name in weights for n in layers if f".layers.{n}." in name}

    first, last = by_ranks(read_and_kept, pp=2)(path=tmp_path)
    assert first[0] == of_layers(0, 1) | {embedding}
    assert last[0] == of_layers(2, 3) | {"model.norm.weight", embedding}
    for read, kept, _ in (first, last):
        assert kept == sum(weights[name] for name in read)
    whole, length = 2 * 2 * 8 * 8, 2 * 8  # 2 texts of 8 tokens, 2 key heads of 8 features
    assert first[2] == [whole, whole, length, length]
    assert last[2] == [length, length, whole, whole]


def test_a_checkpoint_is_generated_from_as_it_is(tmp_path):
    model = make("llama", num_hidden_layers=3)
    settings = dict(prompts=PROMPTS, max_new_tokens=40)
    save_checkpoint(model, tmp_path / "run", byte_tokenizer())
    texts = by_ranks(generate_in, pp=3)(path=tmp_path / "run", **settings)
    assert texts == [generate(tmp_path / "run", **settings)] * 3


@pytest.mark.parametrize("layout", [{"pp": 2}, {"pp": 4}, {"pp": 2, "tp": 2}])
@pytest.mark.parametrize("micro", [1, 3])
def test_eval_gives_the_loss_of_one_process(tmp_path, layout, micro):
    model, text = tmp_path / "model", tmp_path / "text.txt"
    save_folder("llama-tied", model, byte_tokenizer(), num_hidden_layers=4)
    text.write_text("def f(x):\n    return x + 1\n" * 26)
    settings = dict(
        path=model,
        source={"type": "text", "path": str(text)},
        overrides=[f"ds4d.data.cache_dir={tmp_path}/cache", "ds4d.data.seq_len=64",
                   f"train_micro_batch_size_per_gpu={micro}"],
    )  # fmt: skip
    alone = evaluate(**settings)
    assert alone["samples"] % 2 == 1 and alone["samples"] > 4 * 2  # more than goes in at once
    found = by_ranks(evaluate_in, **layout)(**settings)
    assert found == [found[0]] * len(found)
    assert found[0] == pytest.approx(alone, rel=1e-6)


def test_the_command_prints_what_one_process_prints(tmp_path, capsys):
    save_folder("llama", tmp_path, byte_tokenizer())
    words = ["generate", str(tmp_path), "--max-new-tokens", "30", "--json", "--", *PROMPTS]
    printed = run_ds4d(*words[:1], "--pp", 2, *words[1:])
    assert cli.main(words) == 0
    assert printed == capsys.readouterr().out

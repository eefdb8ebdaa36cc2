"""Generation: token for token what plain transformers generates, prompt by prompt."""

from __future__ import annotations

import json

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ds4d.checkpoint.logical import LogicalTensor, Piece
from ds4d.checkpoint.save import save
from ds4d.config.types import ModelConfig
from ds4d.evaluate import evaluate
from ds4d.generate import generate
from ds4d.model.config import hf_config
from tests.unit.model_families import fields

PROMPTS = ["def f(x):", "a", "import os, sys"]
FAMILIES = ["llama", "gpt2", "gemma2", "mixtral", "opt"]


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte a token: 3 special tokens, then printable ASCII, which fits in 96 + 3."""
    letters = {chr(code): code - 29 for code in range(33, 127)} | {"Ġ": 98}
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3} | letters
    byte_level = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=byte_level, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_tokenizer()


def make(family: str, **more):
    torch.manual_seed(1)
    changes = {"vocab_size": 99, "initializer_range": 0.3}
    if family in ("llama", "gpt2"):
        changes["eos_token_id"] = 40  # a token that comes up: some prompts end early
    changes |= more
    return AutoModelForCausalLM.from_config(hf_config(ModelConfig(config=fields(family) | changes)))


def save_folder(family: str, folder, tokenizer, **more) -> None:
    make(family, **more).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_checkpoint(model, run, tokenizer):
    """A checkpoint of a run folder, as training would have left it."""
    state = {
        f"{kind}/{name}": LogicalTensor(
            tuple(t.shape), t.dtype, (Piece((0,) * t.dim(), t.detach()),)
        )
        for kind, tensors in (
            ("weight", model.named_parameters()),
            ("buffer", ((n, b) for n, b in model.named_buffers() if n in model.state_dict())),
        )
        for name, t in tensors
    }
    extra = {"hf_config": model.config.to_dict(), "dtype": "fp32"}
    tokenizer.save_pretrained(run / "tokenizer")
    return save(run, 7, state, extra=extra, rank_state={}, keep=None)


def one_by_one(folder, prompts, **kwargs) -> list[str]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        output = model.generate(**ids, do_sample=False, pad_token_id=0, **kwargs)
        new = output[0, ids["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(new, skip_special_tokens=True))
    return texts


@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_unequal_prompts_is_hugging_face_one_by_one(family, tmp_path, tokenizer):
    save_folder(family, tmp_path, tokenizer)
    texts = generate(tmp_path, PROMPTS, max_new_tokens=24)
    assert texts == one_by_one(tmp_path, PROMPTS, max_new_tokens=24)
    assert len(set(texts)) == len(PROMPTS)


@pytest.mark.parametrize("family", ["llama-tied", "gpt2"])
def test_a_checkpoint_is_its_exported_folder(family, tmp_path, tokenizer):
    run, folder = tmp_path / "run", tmp_path / "folder"
    checkpoint = save_checkpoint(make(family), run, tokenizer)
    save_folder(family, folder, tokenizer)
    expected = generate(folder, PROMPTS, max_new_tokens=20)
    assert generate(checkpoint, PROMPTS, max_new_tokens=20) == expected
    assert generate(run, PROMPTS, max_new_tokens=20) == expected


def test_drawing_follows_the_seed(tmp_path, tokenizer):
    save_folder("llama-tied", tmp_path, tokenizer)

    def draw(**kwargs):
        return generate(tmp_path, PROMPTS, max_new_tokens=20, **kwargs)

    warm = draw(temperature=2.0, seed=1)
    assert warm == draw(temperature=2.0, seed=1) != draw(temperature=2.0, seed=2)
    assert draw(temperature=1.0, top_p=1e-6) == draw()  # only the likeliest is left


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"prompts": []}, "no prompts"),
        ({"prompts": ["a", ""]}, "prompt 2 has no token"),
        ({"max_new_tokens": 0}, "max_new_tokens 0"),
        ({"temperature": -1.0}, "temperature -1.0"),
        ({"top_p": 0.5}, "no effect at temperature 0"),
        ({"max_new_tokens": 60}, r"\(14 tokens\) and max_new_tokens 60 make 74 .* at most 50"),
    ],
)
def test_what_cannot_be_done_is_said(kwargs, message, tmp_path, tokenizer):
    save_folder("llama-tied", tmp_path, tokenizer)
    with pytest.raises(ValueError, match=message):
        generate(tmp_path, kwargs.pop("prompts", PROMPTS), **{"max_new_tokens": 4} | kwargs)


def test_a_folder_without_model_or_tokenizer(tmp_path):
    with pytest.raises(Exception, match="neither a Hugging Face folder"):
        generate(tmp_path, PROMPTS)
    make("llama-tied").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no tokenizer in"):
        generate(tmp_path, PROMPTS)


def test_tokens_are_judged_without_a_tokenizer(tmp_path):
    model = make("llama-tied")
    model.save_pretrained(tmp_path / "model")
    ids = torch.randint(99, (3, 10), generator=torch.Generator().manual_seed(0))
    lines = [json.dumps({"input_ids": row.tolist()}) for row in ids]
    (tmp_path / "held.jsonl").write_text("\n".join(lines))
    source = {"type": "tokens", "path": str(tmp_path / "held.jsonl")}
    cache = f"ds4d.data.cache_dir={tmp_path / 'cache'}"
    found = evaluate(tmp_path / "model", source=source, overrides=[cache, "ds4d.data.seq_len=10"])
    logits = model(ids).logits[:, :-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    assert found["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert (found["tokens"], found["samples"]) == (27, 3)

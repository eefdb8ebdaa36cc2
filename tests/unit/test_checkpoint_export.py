"""Exported folders load with from_pretrained and are the trained model."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, MixtralConfig
from transformers.core_model_loading import revert_weight_conversion

from ds4d import cli
from ds4d.checkpoint import export as export_module
from ds4d.checkpoint.errors import CheckpointError
from ds4d.checkpoint.export import export
from ds4d.checkpoint.logical import LogicalTensor, Piece
from ds4d.checkpoint.save import save

SIZES = dict(
    vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


def llama(**changes):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, **changes))


def checkpoint_of(model, root, *, dtype="fp32", drop=()):
    """As the trainer saves: fp32 masters in slices (here two), the config, the trained dtype."""
    state = {}
    for name, param in model.named_parameters():
        rows = param.detach().float()
        cut = max(1, rows.shape[0] // 3)
        pieces = [Piece((0,) * rows.dim(), rows[:cut])]
        pieces.append(Piece((cut,) + (0,) * (rows.dim() - 1), rows[cut:]))
        if name not in drop:
            state[f"weight/{name}"] = LogicalTensor(tuple(rows.shape), rows.dtype, tuple(pieces))
        state[f"exp_avg/{name}"] = state.get(f"weight/{name}") or LogicalTensor(
            tuple(rows.shape), rows.dtype, tuple(pieces)
        )
    extra = {"hf_config": json.loads(model.config.to_json_string()), "dtype": dtype}
    return save(root / "run", 1, state, extra=extra, rank_state={}, keep=None)


def headers(folder):
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                assert name not in found
                found[name] = file.get_slice(name).get_dtype()
    return found


IDS = torch.arange(12).view(1, -1) % 97


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_model_is_the_trained_one(tmp_path, tied):
    model = llama(tie_word_embeddings=tied)
    out = export(checkpoint_of(model, tmp_path), tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert loaded.dtype == torch.float32
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)
    assert ("lm_head.weight" in headers(out)) != tied
    assert loaded.config.tie_word_embeddings == tied
    assert sorted(p.name for p in out.iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors"
    ]  # fmt: skip


DTYPES = {"fp32": ("F32", "float32"), "bf16": ("BF16", "bfloat16"), "fp16": ("F16", "float16")}


@pytest.mark.parametrize("trained", ["bf16", "fp32"])
@pytest.mark.parametrize("asked", [None, "fp32", "bf16", "fp16"])
def test_the_dtype_is_as_trained_or_as_asked(tmp_path, trained, asked):
    """Case D10: tensors and config agree."""
    model = llama()
    out = export(checkpoint_of(model, tmp_path, dtype=trained), tmp_path / "out", dtype=asked)
    in_header, in_config = DTYPES[asked or trained]
    assert set(headers(out).values()) == {in_header}
    assert json.loads((out / "config.json").read_text())["dtype"] == in_config
    loaded = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    for name, param in model.named_parameters():
        assert torch.equal(loaded[name], param.to(loaded[name].dtype)), name
        assert str(loaded[name].dtype) == f"torch.{in_config}"


def test_what_a_family_keeps_in_fp32_stays_so(tmp_path, monkeypatch):
    model = llama()
    monkeypatch.setattr(type(model), "_keep_in_fp32_modules_strict", {"input_layernorm"})
    out = export(checkpoint_of(model, tmp_path), tmp_path / "out", dtype="bf16")
    for name, dtype in headers(out).items():
        assert dtype == ("F32" if "input_layernorm" in name else "BF16"), name
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"


def test_names_on_the_disk_are_those_of_the_hub(tmp_path):
    """transformers holds a Mixtral's experts in one tensor; on the hub each is by itself."""
    torch.manual_seed(0)
    config = MixtralConfig(**SIZES, num_local_experts=4)
    model = AutoModelForCausalLM.from_config(config)
    out = export(checkpoint_of(model, tmp_path), tmp_path / "out")
    model.save_pretrained(tmp_path / "by transformers")
    assert headers(out) == headers(tmp_path / "by transformers")
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


def test_experts_are_taken_apart_a_layer_at_a_time(tmp_path, monkeypatch):
    """What transformers makes of them is in memory: never of the whole model."""
    model = AutoModelForCausalLM.from_config(MixtralConfig(**SIZES, num_local_experts=8))
    given = []

    def counted(model, tensors):
        given.append(sum(tensor.nbytes for tensor in tensors.values()))
        return revert_weight_conversion(model, tensors)

    monkeypatch.setattr(export_module, "revert_weight_conversion", counted)
    export(checkpoint_of(model, tmp_path), tmp_path / "out")
    assert sum(given) == sum(p.nbytes for p in model.parameters())
    assert max(given) < 0.5 * sum(given)  # of two layers


def test_large_models_are_sharded(tmp_path):
    model, out = llama(), tmp_path / "out"
    command = ["export", str(checkpoint_of(model, tmp_path)), str(out), "--max-shard-size", "20KB"]
    assert cli.main(command) == 0
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert set(index["weight_map"]) == set(headers(out))
    loaded = AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(loaded(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("place", ["run folder", "nowhere"])
def test_the_tokenizer_comes_along(tmp_path, place, caplog):
    model = llama()
    checkpoint = checkpoint_of(model, tmp_path)
    folder = tmp_path / "run" / "tokenizer"
    if place != "nowhere":
        folder.mkdir()
        (folder / "tokenizer.json").write_text("{}")
    out = export(checkpoint, tmp_path / "out")
    assert (out / "tokenizer.json").exists() == (place != "nowhere")
    assert ("no tokenizer is exported" in caplog.text) == (place == "nowhere")


def test_a_folder_in_use_is_not_touched_unless_forced(tmp_path):
    model, out = llama(), tmp_path / "out"
    checkpoint = checkpoint_of(model, tmp_path)
    out.mkdir()
    export(checkpoint, out)
    (out / "mine.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="out is not empty: name another folder"):
        export(checkpoint, out)
    assert (out / "mine.txt").read_text() == "precious"
    export(checkpoint, out, force=True)
    assert not (out / "mine.txt").exists()
    assert AutoConfig.from_pretrained(out).model_type == "llama"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "run"]


def test_only_an_older_export_is_replaced(tmp_path):
    """Neither the run itself, nor what holds it, nor anything else that --force may hit."""
    checkpoint = checkpoint_of(llama(), tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("precious")
    before = sorted(tmp_path.rglob("*"))
    for out in (other, tmp_path, checkpoint, checkpoint.parent.parent, other / "thesis.tex"):
        with pytest.raises(CheckpointError, match="replaced|is a file"):
            export(checkpoint, out, force=True)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_checkpoint_without_all_of_the_model_is_refused(tmp_path):
    checkpoint = checkpoint_of(llama(), tmp_path, drop=["model.norm.weight", "lm_head.weight"])
    with pytest.raises(CheckpointError) as error:
        export(checkpoint, tmp_path / "out")
    assert "weight/model.norm.weight (32,): not in the checkpoint" in str(error.value)
    assert "weight/lm_head.weight (97, 32): not in the checkpoint" in str(error.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_the_newest_of_a_run_is_exported(tmp_path):
    checkpoint_of(llama(), tmp_path)
    out = export(tmp_path / "run", tmp_path / "out")
    assert (out / "model.safetensors").exists()
    with pytest.raises(CheckpointError, match='dtype "float32" is not one of fp32, bf16, fp16'):
        export(tmp_path / "run", tmp_path / "other", dtype="float32")

"""Building under ZeRO-3: no rank ever holds the whole model, on the device or in host memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from ds4d.config.types import ModelConfig
from ds4d.model.build import build_model, fill, stored_or_initial
from ds4d.model.config import hf_config
from ds4d.model.initial import InitialValues
from ds4d.model.meta import logical_model, meta_model
from ds4d.model.weights import Weights
from tests.harness import run_distributed

LLAMA = dict(
    model_type="llama",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=True,
)
ZERO3 = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}
MIB = 2**20


def partitioner():
    """What the engine gives to build_model, by DeepSpeed's public constructor."""
    import deepspeed

    return lambda module: deepspeed.zero.Init(module=module, config_dict_or_path=ZERO3)


def build(model: ModelConfig, partition=None, dtype=torch.float32):
    return build_model(
        model,
        config=hf_config(model),
        dtype=dtype,
        device="cpu",
        seed=3,
        attn_implementation="sdpa",
        partition=partition,
    )


def live_bytes(model) -> int:
    """Bytes of parameters that exist now: whole ones, and this rank's parts."""
    tensors = [p for p in model.parameters() if not p.is_meta]
    tensors += [p.ds_tensor for p in model.parameters() if hasattr(p, "ds_tensor")]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def _build_partitioned(model: ModelConfig) -> dict:
    import deepspeed

    peak, order, convert = 0, [], partitioner()

    def partition(module):
        nonlocal peak
        peak = max(peak, live_bytes(built))
        convert(module)
        order.append(type(module).__name__)

    config = hf_config(model)
    built, logical = meta_model(config, dtype=torch.float32), logical_model(config)
    values = InitialValues(logical, seed=3)
    if model.path:
        values = stored_or_initial(Weights(Path(model.path), logical), values)
    fill(built, values, device="cpu", partition=partition)
    expected = build(model)
    with deepspeed.zero.GatheredParameters(list(built.parameters())):
        same = {
            name: torch.equal(p, expected.get_parameter(name))
            for name, p in built.named_parameters()
        }
    return {
        "peak": peak,
        "total": live_bytes(expected),
        "largest": max(
            sum(p.nbytes for p in m.parameters(recurse=False)) for m in expected.modules()
        ),
        "same": same,
        "tied": built.lm_head.weight is built.model.embed_tokens.weight,
        "order": order,
        "left": live_bytes(built),
    }


@pytest.mark.parametrize("source", ["scratch", "weights"])
def test_one_module_at_a_time(source, tmp_path):
    model = ModelConfig(config=LLAMA)
    if source == "weights":
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(hf_config(model)).save_pretrained(tmp_path)
        model = ModelConfig(path=str(tmp_path))
    for result in run_distributed(_build_partitioned, 2, model=model):
        assert all(result["same"].values()), result["same"]
        assert result["tied"] and result["order"].count("Embedding") == 1
        assert "Linear" in result["order"] and result["order"][-1] == "LlamaRMSNorm"
        assert result["peak"] <= result["total"] / 2 + result["largest"]
        assert result["left"] <= result["total"] / 2 + 64 * len(result["same"])


def _peak_of_loading(model: ModelConfig, sharded: bool) -> int:
    """Bytes by which this process grew at most while it loaded, by the kernel's own count."""
    build(ModelConfig(config=LLAMA), partitioner() if sharded else None)  # imports, allocator
    dist.barrier()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far
    before = _status("VmRSS")
    built = build(model, partitioner() if sharded else None)
    peak = _status("VmHWM") - before
    del built
    return peak


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field + ":"))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """192 MiB in files of 32 MB; the largest module has 12 MiB."""
    folder = tmp_path_factory.mktemp("checkpoint")
    fields = LLAMA | dict(hidden_size=1024, intermediate_size=3072, vocab_size=2048)
    config = hf_config(ModelConfig(config=fields | dict(num_hidden_layers=4)))
    config.save_pretrained(folder)
    index, files = {}, [{}]
    for name, tensor in logical_model(config).named_parameters():
        if sum(t.nbytes for t in files[-1].values()) > 32e6:
            files.append({})
        if name != "lm_head.weight":
            files[-1][name] = torch.full(tensor.shape, 0.5)
            index[name] = f"model-{len(files):05d}.safetensors"
    for number, tensors in enumerate(files, start=1):
        save_file(tensors, folder / f"model-{number:05d}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    return ModelConfig(path=str(folder)), size


@pytest.mark.usefixtures("fresh_workers")
def test_four_ranks_load_one_checkpoint_in_one_checkpoints_memory(checkpoint):
    model, size = checkpoint
    peaks = run_distributed(_peak_of_loading, 4, model=model, sharded=True)
    print(f"{size / MIB:.0f} MiB in files; peaks {[round(p / MIB) for p in peaks]} MiB")
    assert sum(peaks) < size + 4 * 40 * MIB  # a rank: its quarter, and a module in passing


@pytest.mark.usefixtures("fresh_workers")
def test_a_whole_copy_would_be_seen(checkpoint):
    model, size = checkpoint
    (peak,) = run_distributed(_peak_of_loading, 1, model=model, sharded=False)
    assert 0.95 * size < peak < size + 40 * MIB

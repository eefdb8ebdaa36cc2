"""Building a tp rank's part: all ranks of a host in the memory of one model; under ZeRO-3."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ds4d.checkpoint.find import find
from ds4d.checkpoint.load import load
from ds4d.checkpoint.logical import LogicalTensor, pieces_of
from ds4d.checkpoint.save import save
from ds4d.config.types import ModelConfig
from ds4d.model.build import fill, stored_or_initial
from ds4d.model.config import hf_config
from ds4d.model.initial import InitialValues
from ds4d.model.meta import logical_model, meta_model
from ds4d.model.weights import Weights
from tests.dist.test_model_zero3 import LLAMA, MIB, ZERO3, _status, checkpoint  # noqa: F401
from tests.harness import run_distributed
from tests.shards import cut_by_hand, held, put_together


def build(model: ModelConfig, rank: int, ranks: int, partition=None):
    config = hf_config(model)
    logical = logical_model(config)
    values = InitialValues(logical, seed=3)
    if model.path:
        values = stored_or_initial(Weights(Path(model.path), logical), values)
    built = cut_by_hand(meta_model(config, dtype=torch.float32), rank, ranks)
    fill(built, values, device="cpu", partition=partition)
    return built


def growth(act) -> int:
    """Bytes by which this process grew at most, by the kernel's own count."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = _status("VmRSS")
    kept = act()
    peak = _status("VmHWM") - before
    del kept
    return peak


def peak_of_loading(model: ModelConfig) -> int:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    build(ModelConfig(config=LLAMA), rank, ranks)  # imports, allocator
    return growth(lambda: build(model, rank, ranks))


@pytest.mark.usefixtures("fresh_workers")
@pytest.mark.parametrize("ranks", [1, 4])
def test_all_ranks_load_one_checkpoint_in_one_checkpoints_memory(checkpoint, ranks):  # noqa: F811
    """Case F01. One rank, whose growth must be the whole, says that growth is seen."""
    model, size = checkpoint
    peaks = run_distributed(peak_of_loading, ranks, model=model)
    print(f"{size / MIB:.0f} MiB in files; peaks {[round(p / MIB) for p in peaks]} MiB")
    assert 0.95 * size < sum(peaks) < 1.2 * size + ranks * 8 * MIB


def state_of(model) -> dict[str, LogicalTensor]:
    state = {}
    for name, param in model.named_parameters():
        shard = getattr(param, "tp_shard", None)
        shape = tuple(param.shape) if shard is None else shard.logical_shape(tuple(param.shape))
        pieces = tuple(pieces_of(param.data, (0,) * param.dim(), shard))
        state[f"weight/{name}"] = LogicalTensor(shape, param.dtype, pieces)
    return state


def save_parts(model: ModelConfig, root) -> None:
    state = state_of(build(model, dist.get_rank(), dist.get_world_size()))
    save(root, 1, state, extra={}, rank_state={}, keep=None)


def peak_of_resuming(model: ModelConfig, root) -> int:
    """With the model's memory taken before: what is only read must go again."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    state = state_of(build(model, rank, ranks))
    return growth(lambda: load(find(root, "latest"), state))


@pytest.mark.usefixtures("fresh_workers")
def test_all_ranks_resume_without_another_copy(checkpoint, tmp_path):  # noqa: F811
    model, size = checkpoint
    run_distributed(save_parts, 2, model=model, root=tmp_path)
    peaks = run_distributed(peak_of_resuming, 4, model=model, root=tmp_path)
    print(f"{size / MIB:.0f} MiB saved; peaks {[round(p / MIB) for p in peaks]} MiB")
    assert sum(peaks) < 0.5 * size


def build_under_zero3(model: ModelConfig):
    """tp 2 x dp 2: this rank's part, gathered over dp."""
    import deepspeed

    from ds4d.config.types import ParallelConfig
    from ds4d.mesh import DeepSpeedMpu, Mesh

    mesh = Mesh.create(ParallelConfig(dp=2, tp=2))
    context = deepspeed.zero.Init(
        module=torch.nn.Identity(),
        data_parallel_group=mesh.group("dp_cp"),
        config_dict_or_path=ZERO3,
        mpu=DeepSpeedMpu(mesh),
    )

    def partition(module) -> None:
        context._convert_to_zero_parameters(module.parameters(recurse=False))

    built = build(model, mesh.coordinate.tp, 2, partition)
    with deepspeed.zero.GatheredParameters(list(built.parameters())):
        return held(built)


@pytest.mark.parametrize("source", ["scratch", "weights"])
def test_zero3_takes_each_module_of_a_part(source, tmp_path):
    model = ModelConfig(config={**LLAMA, "vocab_size": 101})
    whole = build(model, 0, 1)
    if source == "weights":
        whole.save_pretrained(tmp_path)
        model = ModelConfig(path=str(tmp_path))
    ranks = run_distributed(build_under_zero3, 4, model=model)
    for dp in range(2):
        found = put_together(ranks[2 * dp : 2 * dp + 2])
        assert all(torch.equal(found[name], p) for name, p in whole.named_parameters())

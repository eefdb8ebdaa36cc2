"""Case F03: memory must not be higher while the engine is made than it is in training, and what
stays is what the formulas of ZeRO say (shared/formulas.md 2.2, fp32: 4 bytes each of weight,
gradient, and two moments; DeepSpeed's ZeRO keeps a master copy beside)."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from tests.dist.test_engine import GLOBAL_BATCH, make_engine, make_run, share
from tests.harness import run_distributed
from tests.reference import samples, tiny_model

BIG = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 16384}
DP = 2
NOISE = 16 * 2**20  # of the allocator; a copy of the weights is 36 MiB


def live_bytes() -> int:
    """Of all tensors, each storage once."""
    gc.collect()
    storages = {}
    for item in gc.get_objects():
        if isinstance(item, torch.Tensor) and item.device.type == "cpu":
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def peak_of(act) -> int:
    """The most resident memory of this process while ``act`` runs."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    act()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def phases(run) -> dict[str, int]:
    """Peaks while the engine is made and in the first step; tensors kept after some steps."""
    batch = samples(GLOBAL_BATCH, vocab=BIG["vocab_size"])
    before, made = live_bytes(), []
    found = {"init": peak_of(lambda: made.append(make_engine(run, **BIG)))}
    found["step 1"] = peak_of(lambda: made[0].train_step(share(batch, run)))
    for step in range(2, 5):
        made[0].train_step(share(batch, run))
        found[f"kept {step}"] = live_bytes() - before
    return found


@pytest.mark.usefixtures("fresh_workers")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("stage, kept", [(0, 12), (1, 4 + 12 / DP), (2, 4 + 12 / DP), (3, 20 / DP)])
def test_memory_is_highest_in_training_and_stays_what_the_formula_says(stage, kept):
    parameters = sum(p.numel() for p in tiny_model(**BIG).parameters())
    # DeepSpeed's bucket is 2 GB by default, whatever the model
    zero = {"stage": stage, "reduce_bucket_size": 100_000}
    run = make_run(stage=stage, dp=DP, micro=2, zero_optimization=zero)
    for rank in run_distributed(phases, DP, run=run):
        assert rank["init"] <= rank["step 1"] + NOISE, rank
        assert rank["kept 4"] == rank["kept 3"] == rank["kept 2"], rank
        assert rank["kept 4"] <= kept * parameters * 1.05, rank["kept 4"] / parameters

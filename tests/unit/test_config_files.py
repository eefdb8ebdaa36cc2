"""Every file in ds_configs/ passes check, and DeepSpeed takes what is made of it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ds4d.config.deepspeed_json import to_deepspeed
from ds4d.config.load import load, resolved

FILES = sorted((Path(__file__).parents[2] / "ds_configs").glob("*.json"))


def test_there_are_files():
    assert len(FILES) >= 5


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_passes_check(path):
    from deepspeed.runtime.config import DeepSpeedConfig

    run = load(path)
    written_for = re.search(r"-(\d+)gpu$", path.stem)
    assert run.parallel.world_size == (int(written_for[1]) if written_for else 1)
    assert load(json.loads(json.dumps(resolved(run)))) == run
    assert all("world size" in note for note in run.notes)
    config = DeepSpeedConfig(to_deepspeed(run, on_cpu=True))
    assert config.train_micro_batch_size_per_gpu == run.batch.micro
    assert config.zero_optimization_stage == run.zero_stage


@pytest.mark.parametrize(
    "world_size, degrees",
    [(1, (1, 1, 1, 1)), (3, (1, 3, 1, 1)), (8, (2, 2, 2, 1)), (16, (2, 2, 2, 2))],
)
def test_the_quickstart_has_the_same_batch_on_any_number_of_ranks(world_size, degrees):
    run = load(next(p for p in FILES if p.stem == "quickstart"), world_size=world_size)
    assert run.batch.train == 8
    p = run.parallel
    assert (p.tp, p.pp, p.cp, p.dp) == degrees

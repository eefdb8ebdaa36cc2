"""Files for ``ds4d verify`` and workers that it runs on, faulty ones too."""

from __future__ import annotations

import json
import random
import tempfile
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ds4d.config.load import load
from ds4d.config.types import RunConfig
from ds4d.mesh import Mesh
from ds4d.verify.ranks import RanksFailed, train_here
from tests.harness import RankFailure, run_distributed
from tests.verify_faults import FAULTS

MODEL = dict(
    model_type="llama", vocab_size=4097, hidden_size=256, intermediate_size=704,
    num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=512,
)  # fmt: skip
ADAMW = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.1}}


@cache
def sample_lines() -> Path:
    """Rows of several documents, some of whose tokens are no targets."""
    draw = random.Random(0)
    file = Path(tempfile.mkdtemp(prefix="ds4d-samples-")) / "samples.jsonl"
    lines = []
    for _ in range(80):
        ids = [draw.randrange(4097) for _ in range(draw.randint(40, 64))]
        documents = sorted(draw.randrange(4) for _ in ids)
        labels = [-100 if draw.random() < 0.2 else token for token in ids]
        lines.append({"input_ids": ids, "labels": labels, "document_ids": documents})
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def run_of(
    model: dict[str, Any] = MODEL,
    *,
    stage: int = 1,
    optimizer: dict[str, Any] = ADAMW,
    pipeline: dict[str, Any] | None = None,
    context: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    keys: dict[str, Any] | None = None,
    recompute: str = "none",
    **parallel: Any,
) -> RunConfig:
    """Of a file, checked.

    Args:
        keys: more of DeepSpeed's.
        parallel: ``ds4d.parallel``.
    """
    degrees = {"dp": 1} | parallel
    block = {
        "model": {"config": model},
        "data": {"seq_len": 64, "train": {"type": "tokens", "path": str(sample_lines())}},
        "parallel": degrees,
        "pipeline": pipeline or {},
        "context": context or {},
        "training": {"steps": 10, **(training or {})},
        "recompute": recompute,
    }
    return load(
        {
            "train_batch_size": 16,
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": optimizer,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": stage},
            **(keys or {}),
            "ds4d": block,
        }
    )


def on_workers(run: RunConfig, results: Path, *, fault: str | None = None) -> None:
    """``train_here`` on the harness's ranks."""
    kwargs = {"run": run, "results": results, "fault": fault}
    try:
        run_distributed(train_on_worker, run.parallel.world_size, timeout=300, **kwargs)
    except RankFailure as failure:
        raise RanksFailed(str(failure)) from failure


def with_fault(fault: str):
    return partial(on_workers, fault=fault)


def train_on_worker(run: RunConfig, results: Path, fault: str | None) -> None:
    with nullcontext() if fault is None else FAULTS[fault].plant():
        mesh = Mesh.create(run.parallel, run.context)
        train_here(run, results, device=torch.device("cpu"), mesh=mesh)

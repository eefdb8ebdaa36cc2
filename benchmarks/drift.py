"""How far bf16 runs of different layouts drift apart: ``python -m benchmarks.drift --out docs``.

One small Llama on Python's standard library, 200 steps, the same initial weights and samples. The
measure of noise is plain Hugging Face in bf16 (fp32 master weights, gradients of micro-batches added
in fp32), with one to eight sequences in a micro-batch: the same run for everybody who thinks of it
as a number of sequences a step. Then ds4d in bf16, one run a layout; and some of them
with gradients that are added and reduced in bf16. Each run is compared with plain Hugging Face in
fp32 and with the runs of its kind. Numbers, not times: a busy machine does not matter.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch.nn import functional as F

from ds4d.config.load import load
from ds4d.config.types import RunConfig
from ds4d.data.loader import TrainLoader
from ds4d.data.order import SampleOrder
from ds4d.data.prepare import prepare
from ds4d.model.config import hf_config
from ds4d.monitor.metrics import read_metrics
from ds4d.optim import build_optimizer

STEPS, SEQUENCES = 200, 8
FILE: dict[str, Any] = {
    "train_batch_size": SEQUENCES,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 5e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": 1},
    "ds4d": {
        "model": {
            "config": {
                "model_type": "llama", "vocab_size": 1024, "hidden_size": 128,
                "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4,
                "num_key_value_heads": 2, "max_position_embeddings": 128,
                "tie_word_embeddings": False,
            }
        },
        "data": {
            "seq_len": 128, "packing": "concat", "train": {"type": "python_stdlib"},
            "tokenizer": {"vocab_size": 1024},
        },
        "training": {"steps": STEPS, "seed": 7},
    },
}  # fmt: skip
IN_BF16 = (
    "data_types.grad_accum_dtype=bf16",
    "communication_data_type=bf16",
)
LAYOUTS: dict[str, dict[str, int]] = {
    "dp 2": {"dp": 2},
    "tp 2": {"tp": 2},
    "pp 2": {"pp": 2},
    "cp 2": {"cp": 2},
}
REDUCED: dict[str, dict[str, int]] = {"1 rank": {}, "dp 2": {"dp": 2}, "dp 4": {"dp": 4}}
PLAIN = {f"micro-batch {micro}": micro for micro in (1, 2, 4, 8)}

Curve = list[float]


@dataclass(frozen=True)
class Drift:
    """Of curves of one kind, in nats; over the second half of the steps.

    Attributes:
        apart, largest: mean and largest distance of the losses of two runs, over all pairs.
        off: mean distance from the fp32 run, over all runs.
    """

    apart: float
    largest: float
    off: float

    @classmethod
    def of(cls, curves: dict[str, Curve], exact: Curve) -> Drift:
        late = [curve[STEPS // 2 :] for curve in curves.values()]
        pairs = [_distances(*pair) for pair in combinations(late, 2)]
        off = [_distances(curve, exact[STEPS // 2 :]) for curve in late]
        return cls(_mean(sum(pairs, [])), max(map(max, pairs)), _mean(sum(off, [])))


def _distances(one: Curve, other: Curve) -> list[float]:
    return [abs(a - b) for a, b in zip(one, other, strict=True)]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def plain(run: RunConfig, micro: int, dtype: torch.dtype) -> Curve:
    """One process with the Hugging Face model.

    Args:
        micro: sequences in a micro-batch.
        dtype: that the model computes in.
    """
    from transformers import AutoModelForCausalLM

    from ds4d.model.initial import InitialValues
    from ds4d.model.meta import logical_model

    config = hf_config(run.model)
    initial = InitialValues(logical_model(config), seed=run.training.seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    model.load_state_dict({name: initial(name) for name in model.state_dict()})
    masters = {name: torch.nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    optimizer = build_optimizer(masters.items(), run.deepspeed["optimizer"], decay_all=False)
    model.to(dtype)
    store = prepare(run, progress=False).train
    batch = load(_content(), overrides=[f"train_micro_batch_size_per_gpu={micro}"]).batch
    order = SampleOrder(len(store), run.training.seed, run.data.shuffle)
    loader = iter(TrainLoader(store, order, batch, dp_rank=0, dp_size=1))
    losses = []
    for _ in range(STEPS):
        micro_batches, total = next(loader), 0.0
        tokens = sum(int((b.targets != -100).sum()) for b in micro_batches)
        for b in micro_batches:
            logits = model(input_ids=b.input_ids, use_cache=False).logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), b.targets.flatten(), reduction="sum")
            (loss / tokens).backward()
            total += float(loss.detach()) / tokens
            for name, p in model.named_parameters():
                kept = masters[name].grad
                masters[name].grad = p.grad.float() if kept is None else kept + p.grad.float()
            model.zero_grad()
        torch.nn.utils.clip_grad_norm_(masters.values(), run.deepspeed["gradient_clipping"])
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
        losses.append(total)
    return losses


def _content() -> dict[str, Any]:
    return json.loads(json.dumps(FILE))


def ds4d(degrees: dict[str, int], *overrides: str) -> Curve:
    """One run of ``ds4d train``."""
    with tempfile.TemporaryDirectory(prefix="ds4d-drift-") as folder:
        file, output = Path(folder) / "drift.json", Path(folder) / "run"
        file.write_text(json.dumps(FILE))
        sets = [f"ds4d.parallel.{axis}={degree}" for axis, degree in degrees.items()]
        words = [word for each in (*sets, *overrides) for word in ("--set", each)]
        command = [sys.executable, "-m", "ds4d", "train", str(file), "--output", str(output), *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return [step["loss"] for step in read_metrics(output / "metrics.jsonl")]


def measure() -> tuple[Curve, dict[str, dict[str, Curve]]]:
    """The fp32 curve, and by kind and run the others."""
    run = load(_content())
    with Progress() as progress:
        task = progress.add_task("runs", total=1 + len(PLAIN) + len(LAYOUTS) + len(REDUCED))

        def done(curve: Curve) -> Curve:
            progress.advance(task)
            return curve

        exact = done(plain(run, 4, torch.float32))
        return exact, {
            "plain Hugging Face": {
                name: done(plain(run, micro, torch.bfloat16)) for name, micro in PLAIN.items()
            },
            "ds4d": {name: done(ds4d(degrees)) for name, degrees in LAYOUTS.items()},
            "ds4d, gradients in bf16": {
                name: done(ds4d(degrees, *IN_BF16)) for name, degrees in REDUCED.items()
            },
        }


def draw(exact: Curve, kinds: dict[str, dict[str, Curve]], picture: Path) -> None:
    """Each run's distance from the fp32 run, smoothed over 10 steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    for axes, (kind, curves) in zip(
        figure.subplots(1, len(kinds), sharey=True), kinds.items(), strict=True
    ):
        for name, curve in curves.items():
            off = _distances(curve, exact)
            smooth = [_mean(off[max(0, i - 9) : i + 1]) for i in range(len(off))]
            axes.plot(range(1, len(off) + 1), smooth, label=name, linewidth=1)
        axes.set(title=kind, xlabel="step", yscale="log")
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("loss: distance from fp32 (nats)")
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for drift.json, drift.png")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    exact, kinds = measure()
    out.mkdir(parents=True, exist_ok=True)
    draw(exact, kinds, out / "drift.png")
    drifts = {kind: vars(Drift.of(curves, exact)) for kind, curves in kinds.items()}
    curves = {"plain Hugging Face, fp32": exact, **kinds}
    (out / "drift.json").write_text(json.dumps({"late": drifts, "losses": curves}) + "\n")
    print(json.dumps(drifts, indent=2))


if __name__ == "__main__":
    main()

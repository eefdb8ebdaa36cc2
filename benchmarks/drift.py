"""How far bf16 runs of different layouts drift apart: ``python -m benchmarks.drift --out docs``.

One small Llama on Python's standard library, 200 steps, the same initial weights and samples. The
measure of noise is plain Hugging Face in bf16 (fp32 master weights, gradients of micro-batches
added in fp32), with one to eight sequences in a micro-batch: the same run for everybody who thinks
of it as a number of sequences a step. Then ds4d in bf16, one run a layout; and some of them with
gradients that are added and reduced in bf16. Each run is compared with plain Hugging Face in
fp32, over several seeds, for one run's distance is chance in part. And, without training: how far a
sum of many bf16 gradients is off when it is kept in bf16. Numbers, not times: a busy machine does
not matter.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ds4d.config.load import load
from ds4d.config.types import BatchSizes, RunConfig
from ds4d.data.batch import MicroBatch
from ds4d.data.loader import TrainLoader
from ds4d.data.order import SampleOrder
from ds4d.data.prepare import prepare
from ds4d.model.config import hf_config
from ds4d.monitor.metrics import read_metrics
from ds4d.optim import build_optimizer

STEPS, SEQUENCES, ADDITIONS = 200, 8, 1024
FILE: dict[str, Any] = {
    "train_batch_size": SEQUENCES,
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {
        "type": "AdamW", "params": {"lr": 5e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}
    },
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
Curves = dict[str, dict[str, list[Curve]]]


@dataclass(frozen=True)
class Drift:
    """Of one kind of run, over seeds: its distance from fp32 over the second half of the steps.

    Attributes:
        mean, smallest, largest: of the seeds' mean distances, in nats.
    """

    mean: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, curves: Sequence[Curve], exact: Sequence[Curve]) -> Drift:
        late = slice(STEPS // 2, None)
        off = [_mean(_distances(*map(itemgetter(late), pair))) for pair in zip(curves, exact)]
        return cls(_mean(off), min(off), max(off))


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
    model = _model(run)
    masters = {name: torch.nn.Parameter(p.detach().clone()) for name, p in model.named_parameters()}
    optimizer = build_optimizer(masters.items(), run.deepspeed["optimizer"], decay_all=False)
    model.to(dtype)
    batch = load(_content(), overrides=[f"train_micro_batch_size_per_gpu={micro}"]).batch
    loader = _samples(run, batch)
    losses = []
    for _ in range(STEPS):
        micro_batches, total = next(loader), 0.0
        tokens = sum(int((b.targets != -100).sum()) for b in micro_batches)
        for b in micro_batches:
            loss = _loss(model, b)
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


def _model(run: RunConfig) -> PreTrainedModel:
    """With the weights that ds4d begins with."""
    from transformers import AutoModelForCausalLM

    from ds4d.model.initial import InitialValues
    from ds4d.model.meta import logical_model

    config = hf_config(run.model)
    initial = InitialValues(logical_model(config), seed=run.training.seed)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    model.load_state_dict({name: initial(name) for name in model.state_dict()})
    return model


def _samples(run: RunConfig, batch: BatchSizes) -> Iterator[list[MicroBatch]]:
    store = prepare(run, progress=False).train
    order = SampleOrder(len(store), run.training.seed, run.data.shuffle)
    return iter(TrainLoader(store, order, batch, dp_rank=0, dp_size=1))


def _loss(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    logits = model(input_ids=batch.input_ids, use_cache=False).logits.float()
    return F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")


def sums(run: RunConfig) -> dict[str, dict[int, float]]:
    """By dtype of the sum and number of bf16 gradients in it, its relative distance from their
    exact sum. Of micro-batches of one sequence, at the beginning."""
    model = _model(run).to(torch.bfloat16)
    micro = BatchSizes(train=1, micro=1, accumulation=1)
    held: dict[torch.dtype, Tensor] = {}
    off: dict[str, dict[int, float]] = {"bf16": {}, "fp32": {}}
    for number, (batch,) in enumerate(islice(_samples(run, micro), ADDITIONS), start=1):
        model.zero_grad()
        (_loss(model, batch) / batch.targets.numel()).backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
        for dtype in (torch.bfloat16, torch.float32, torch.float64):
            held[dtype] = held.get(dtype, 0) + gradient.to(dtype)
        if number & (number - 1) == 0:
            exact = held[torch.float64]
            for name, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
                off[name][number] = float((held[dtype].double() - exact).norm() / exact.norm())
    return off


def _content(seed: int = 7) -> dict[str, Any]:
    content = json.loads(json.dumps(FILE))
    content["ds4d"]["training"]["seed"] = seed
    return content


def ds4d(seed: int, degrees: dict[str, int], *overrides: str) -> Curve:
    """One run of ``ds4d train``."""
    with tempfile.TemporaryDirectory(prefix="ds4d-drift-") as folder:
        file, output = Path(folder) / "drift.json", Path(folder) / "run"
        file.write_text(json.dumps(_content(seed)))
        sets = [f"ds4d.parallel.{axis}={degree}" for axis, degree in degrees.items()]
        words = [word for each in (*sets, *overrides) for word in ("--set", each)]
        train = [sys.executable, "-m", "ds4d", "train", str(file)]
        command = [*train, "--output", str(output), *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return [step["loss"] for step in read_metrics(output / "metrics.jsonl")]


def measure(seeds: Sequence[int]) -> Curves:
    """By kind and run the curves, one a seed. The kind "exact" is plain fp32."""
    curves: Curves = {}
    with Progress() as progress:
        count = 1 + len(PLAIN) + len(LAYOUTS) + len(REDUCED)
        task = progress.add_task("runs", total=len(seeds) * count)

        def add(kind: str, name: str, curve: Curve) -> None:
            curves.setdefault(kind, {}).setdefault(name, []).append(curve)
            progress.advance(task)

        for seed in seeds:
            run = load(_content(seed))
            add("exact", "fp32", plain(run, 4, torch.float32))
            for name, micro in PLAIN.items():
                add("plain Hugging Face", name, plain(run, micro, torch.bfloat16))
            for name, degrees in LAYOUTS.items():
                add("ds4d", name, ds4d(seed, degrees))
            for name, degrees in REDUCED.items():
                add("ds4d, gradients in bf16", name, ds4d(seed, degrees, *IN_BF16))
    return curves


def draw(curves: Curves, off: dict[str, dict[int, float]], picture: Path) -> None:
    """Each run's distance from fp32, the mean of seeds, smoothed over 10 steps; and the sums."""
    from matplotlib.figure import Figure

    exact, kinds = curves["exact"]["fp32"], {k: v for k, v in curves.items() if k != "exact"}
    figure = Figure(figsize=(13, 4), dpi=120, layout="constrained")
    *panels, last = figure.subplots(1, len(kinds) + 1)
    for axes, (kind, runs) in zip(panels, kinds.items(), strict=True):
        for name, seeds in runs.items():
            each = [_distances(*pair) for pair in zip(seeds, exact, strict=True)]
            mean = [_mean(list(step)) for step in zip(*each)]
            smooth = [_mean(mean[max(0, i - 9) : i + 1]) for i in range(len(mean))]
            axes.plot(range(1, len(mean) + 1), smooth, label=name, linewidth=1)
        axes.set(title=kind, xlabel="step", yscale="log", ylim=(1e-5, 3e-3))
    for dtype, errors in off.items():
        last.plot(list(errors), list(errors.values()), label=f"kept in {dtype}", marker=".")
    last.set(title="a sum of bf16 gradients", xlabel="gradients in it", ylabel="relative error")
    last.set(xscale="log", yscale="log")
    for axes in figure.axes:
        axes.legend(fontsize=7)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("loss: distance from fp32 (nats)")
    figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for drift.json, drift.png")
    parser.add_argument("--seeds", type=int, nargs="+", default=[7, 11, 12, 13])
    args = parser.parse_args()
    torch.set_num_threads(1)
    off, curves = sums(load(_content())), measure(args.seeds)
    args.out.mkdir(parents=True, exist_ok=True)
    draw(curves, off, args.out / "drift.png")
    exact = curves["exact"]["fp32"]
    drifts = {
        kind: {name: vars(Drift.of(seeds, exact)) for name, seeds in runs.items()}
        for kind, runs in curves.items()
        if kind != "exact"
    }
    result = {"late": drifts, "sums": off, "losses": curves}
    (args.out / "drift.json").write_text(json.dumps(result) + "\n")
    print(json.dumps({"late": drifts, "sums": off}, indent=2))


if __name__ == "__main__":
    main()

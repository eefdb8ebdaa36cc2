"""What a script's own loop costs over ds4d's: CPU seconds a step, both in one run.

    python -m benchmarks.scripts [--rounds 6] [--steps 2] [--json]

Two gloo ranks, the model and sizes of ``benchmarks.overhead``, one layout after the other. The
script is an Accelerate loop as everybody writes it (``accumulate``, ``backward``,
``clip_grad_norm_``), on a DataLoader of ready samples, which ds4d's own loop is spared here.
"""

from __future__ import annotations

import json
import statistics
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from benchmarks.overhead import SEQ_LEN, SEQUENCES, batches, ds4d, plain_model
from benchmarks.turns import Step, arguments, cpu_seconds

LAYOUTS: dict[str, dict[str, int]] = {
    "dp 2, ZeRO-1": {"stage": 1}, "tp 2": {"stage": 0, "tp": 2},
    "pp 2": {"stage": 0, "pp": 2}, "cp 2": {"stage": 0, "cp": 2},
}  # fmt: skip


class Samples(Dataset):
    """More than anybody takes."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(4096, (SEQ_LEN,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def script(accumulation: int, stage: int, **parallel: int) -> Step:
    from ds4d.accelerate import Accelerator

    content = {"zero_optimization": {"stage": stage}, "ds4d": {"parallel": parallel}}
    accelerator = Accelerator(gradient_accumulation_steps=accumulation, config=content)
    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    loader = DataLoader(Samples(), batch_size=1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    iterator = iter(loader)

    def step(_: list[torch.Tensor]) -> None:
        for _ in range(accumulation):
            batch = next(iterator)
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    return step


def both(layout: dict[str, int]) -> dict[str, Step]:
    dp = 2 if len(layout) == 1 else 1
    return {"script": script(SEQUENCES // dp, **layout), "ds4d": ds4d(**layout)}


def everybodys(layout: dict[str, int], generator: torch.Generator) -> list[torch.Tensor]:
    """Of a step of ds4d's own loop."""
    found = batches(generator)
    return found if len(layout) == 1 else found + batches(generator)


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    result: list[dict[str, Any]] = []
    for name, layout in LAYOUTS.items():
        seconds = cpu_seconds(
            partial(both, layout), partial(everybodys, layout), rounds=args.rounds,
            steps=args.steps, same_data=len(layout) > 1,
        )  # fmt: skip
        ours, its = seconds["ds4d"], seconds["script"]
        ratio = statistics.median(a / b for a, b in zip(its, ours))
        row = {"ds4d": statistics.median(ours), "script": statistics.median(its), "ratio": ratio}
        result.append({"layout": name, **row})
    if args.json:
        print(json.dumps(result, indent=2))
        return
    table = Table("layout", "ds4d's loop", "script", "ratio", title="CPU seconds a step, 2 ranks")
    for row in result:
        table.add_row(row["layout"], *(f"{row[k]:.3f}" for k in ("ds4d", "script", "ratio")))
    Console().print(table)


if __name__ == "__main__":
    main()

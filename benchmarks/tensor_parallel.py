"""What tensor parallelism costs: CPU seconds a step over those of one plain process, in one run.

    python -m benchmarks.tensor_parallel [--rounds 6] [--steps 2] [--json]

Two gloo ranks, one thread each; model and batch of ``benchmarks.overhead``. The work is the same
for everyone, so a ratio over 1 is communication and what both ranks do alike. One plain Hugging
Face process is on rank 0 alone. Contestants take turns in the same two processes, so that a busy
machine slows all alike; the figure is CPU time summed over both ranks, the ratio the median over
rounds.
"""

from __future__ import annotations

import json
import statistics
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.overhead import MODEL, SEQ_LEN, SEQUENCES, ds4d, plain_model, raw_deepspeed
from benchmarks.turns import RANKS, Step, arguments, cpu_seconds

PLAIN, AUTOTP = "one plain process", "DeepSpeed AutoTP, tp 2"
OURS, OURS_SEQUENCE = "ds4d, tp 2", "ds4d, tp 2, sequence parallel"


def plain(
    *, seq_len: int = SEQ_LEN, config: dict[str, Any] = MODEL, fused: bool = False
) -> Step:
    """Hugging Face's model and loss, torch's optimizer; rank 0 alone.

    Args:
        seq_len: the longest sequence.
        config: of the model.
        fused: AdamW's kernel, as in ds4d.
    """
    if dist.get_rank():
        return lambda batches: None
    model = plain_model(seq_len, config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=fused)

    def step(batches: list[torch.Tensor]) -> float:
        total = 0.0
        for ids in batches:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / len(batches)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def everybody() -> dict[str, Step]:
    return {
        PLAIN: plain(),
        OURS: ds4d(0, tp=RANKS, sequence_parallel=False),
        OURS_SEQUENCE: ds4d(0, tp=RANKS, sequence_parallel=True),
        AUTOTP: raw_deepspeed(
            0,
            gradient_accumulation_steps=SEQUENCES,
            tensor_parallel={"autotp_size": RANKS},
        ),
    }


def batches(
    generator: torch.Generator, sequences: int = SEQUENCES, seq_len: int = SEQ_LEN
) -> list[torch.Tensor]:
    return [torch.randint(4096, (1, seq_len), generator=generator) for _ in range(sequences)]


def main() -> None:
    args = arguments(__doc__.splitlines()[0]).parse_args()
    seconds = cpu_seconds(everybody, batches, rounds=args.rounds, steps=args.steps, same_data=True)

    def ratio(one: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds[one], seconds[other]))

    result = [
        {
            "name": name,
            "cpu_seconds": statistics.median(values),
            "over_plain": ratio(name, PLAIN),
            "over_autotp": ratio(name, AUTOTP),
        }
        for name, values in seconds.items()
    ]
    if args.json:
        print(json.dumps(result, indent=2))
        return
    table = Table("", "CPU s a step", "over plain", "over AutoTP", title="tensor parallelism")
    for row in result:
        cells = [row["cpu_seconds"], row["over_plain"], row["over_autotp"]]
        table.add_row(row["name"], *(f"{cell:.3f}" for cell in cells))
    Console().print(table)


if __name__ == "__main__":
    main()

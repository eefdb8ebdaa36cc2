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

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.overhead import MODEL, OPTIMIZER, SEQ_LEN, SEQUENCES, plain_model
from benchmarks.turns import RANKS, Step, arguments, cpu_seconds

PLAIN, AUTOTP = "one plain process", "DeepSpeed AutoTP, tp 2"
OURS, OURS_SEQUENCE = "ds4d, tp 2", "ds4d, tp 2, sequence parallel"


def plain() -> Step:
    """Hugging Face's model and loss, torch's optimizer; rank 0 alone."""
    if dist.get_rank():
        return lambda batches: None
    model = plain_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)

    def step(batches: list[torch.Tensor]) -> None:
        for ids in batches:
            (model(input_ids=ids, labels=ids, use_cache=False).loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def autotp() -> Step:
    """DeepSpeed's own tensor parallelism for Hugging Face models."""
    import deepspeed
    from deepspeed.utils import groups

    groups.mpu = None
    model = plain_model()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": SEQUENCES,
            "gradient_clipping": 1.0,
            "tensor_parallel": {"autotp_size": RANKS},
            "zero_optimization": {"stage": 0},
            "steps_per_print": 10**9,
        },
    )

    def step(batches: list[torch.Tensor]) -> None:
        for ids in batches:
            engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
            engine.step()

    return step


def ds4d(sequence_parallel: bool) -> Step:
    """The same through ds4d's engine."""
    from ds4d import attention
    from ds4d.config.load import load
    from ds4d.data.batch import IGNORE, MicroBatch
    from ds4d.engine import Engine
    from ds4d.mesh import Mesh
    from ds4d.model.build import build_model
    from ds4d.model.config import hf_config
    from ds4d.tensor_parallel.state import TensorParallel

    run = load(
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": SEQUENCES,
            "optimizer": OPTIMIZER,
            "gradient_clipping": 1.0,
            "zero_optimization": {"stage": 0},
            "ds4d": {
                "model": {"config": MODEL},
                "data": {
                    "seq_len": SEQ_LEN,
                    "packing": "concat",
                    "tokenizer": {"vocab_size": 4096},
                    "train": {"type": "python_stdlib"},
                },
                "parallel": {"tp": RANKS, "sequence_parallel": sequence_parallel},
                "training": {"steps": 1000},
            },
        },
        world_size=RANKS,
    )
    mesh = Mesh.create(run.parallel)

    def build(partition):
        return build_model(
            run.model,
            config=hf_config(run.model),
            dtype=torch.float32,
            device="cpu",
            seed=0,
            attn_implementation=attention.register(),
            partition=partition,
            tp=TensorParallel(mesh.group("tp"), run.parallel.sequence_parallel),
        )

    engine = Engine.create(run, mesh, build, device=torch.device("cpu"), total_steps=1000)
    positions = torch.arange(SEQ_LEN)[None]
    last = torch.full((1, 1), IGNORE)

    def step(batches: list[torch.Tensor]) -> None:
        engine.train_step(
            [MicroBatch(ids, torch.cat([ids[:, 1:], last], 1), positions) for ids in batches]
        )

    return step


def everybody() -> dict[str, Step]:
    return {PLAIN: plain(), OURS: ds4d(False), OURS_SEQUENCE: ds4d(True), AUTOTP: autotp()}


def batches(generator: torch.Generator) -> list[torch.Tensor]:
    return [torch.randint(4096, (1, SEQ_LEN), generator=generator) for _ in range(SEQUENCES)]


def main() -> None:
    args = arguments(__doc__.splitlines()[0])
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

"""What tensor parallelism costs: CPU seconds a step over those of one plain process, in one run.

    python -m benchmarks.tensor_parallel [--rounds 6] [--steps 2] [--json]

Two gloo ranks, one thread each; model and batch of ``benchmarks.overhead``. The work is the same
for everyone, so a ratio over 1 is communication and what both ranks do alike. One plain Hugging
Face process is on rank 0 alone. Contestants take turns in the same two processes, so that a busy
machine slows all alike; the figure is CPU time summed over both ranks, the ratio the median over
rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from benchmarks.overhead import MODEL, OPTIMIZER, SEQ_LEN, SEQUENCES, Step, plain_model

RANKS = 2
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


def measure(rank: int, store: str, rounds: int, steps: int, answers: mp.Queue) -> None:
    """One rank: build everybody, then rounds of turns."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), DS_ACCELERATOR="cpu",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29998",
    )  # fmt: skip
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    deepspeed.init_distributed("gloo", verbose=False)
    contestants: dict[str, Step] = {
        PLAIN: plain(), OURS: ds4d(False), OURS_SEQUENCE: ds4d(True), AUTOTP: autotp()
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):  # the first is a warm-up
        for name, step in contestants.items():
            batches = [
                torch.randint(4096, (1, SEQ_LEN), generator=generator) for _ in range(SEQUENCES)
            ]
            dist.barrier()
            start = time.process_time()
            for _ in range(steps):
                step(batches)
            used = torch.tensor((time.process_time() - start) / steps)
            dist.all_reduce(used)
            if turn:
                seconds[name].append(used.item())
    if rank == 0:
        answers.put(seconds)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps a turn")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    context = mp.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        workers = mp.start_processes(
            measure,
            (os.path.join(folder, "store"), args.rounds, args.steps, answers),
            nprocs=RANKS,
            join=False,
            start_method="spawn",
        )
        seconds = answers.get()
        while not workers.join():
            pass

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

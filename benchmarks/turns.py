"""Contestants in the same two gloo ranks take turns, so that a busy machine slows all alike."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2
Step = Callable[[list[torch.Tensor]], None]
Build = Callable[[], dict[str, Step]]  # a module's function: everybody, in the order of turns
Batches = Callable[[torch.Generator], list[torch.Tensor]]


def arguments(about: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps a turn")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def cpu_seconds(
    build: Build, batches: Batches, *, rounds: int, steps: int, same_data: bool
) -> dict[str, list[float]]:
    """CPU seconds of a step, summed over both ranks, by contestant and round.

    Args:
        batches: what a rank feeds in a step.
        same_data: to both ranks.
    """
    context = mp.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        workers = mp.start_processes(
            _rank,
            (store, build, batches, rounds, steps, same_data, answers),
            nprocs=RANKS,
            join=False,
            start_method="spawn",
        )
        seconds = answers.get()
        while not workers.join():
            pass
    return seconds


def _rank(rank, store, build, batches, rounds, steps, same_data, answers) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), DS_ACCELERATOR="cpu",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29999",
    )  # fmt: skip
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    deepspeed.init_distributed("gloo", verbose=False)
    contestants = build()
    generator = torch.Generator().manual_seed(0 if same_data else rank)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):  # the first is a warm-up
        for name, step in contestants.items():
            fed = batches(generator)
            dist.barrier()
            start = time.process_time()
            for _ in range(steps):
                step(fed)
            used = torch.tensor((time.process_time() - start) / steps)
            dist.all_reduce(used)
            if turn:
                seconds[name].append(used.item())
    if rank == 0:
        answers.put(seconds)
    dist.barrier()
    dist.destroy_process_group()

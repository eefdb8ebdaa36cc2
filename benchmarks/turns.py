"""Contestants in the same two gloo ranks take turns, so that a busy machine slows all alike."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2
# an optimizer step; on rank 0 it gives its loss, or what else somebody looks at
Step = Callable[[list[torch.Tensor]], Any]
Build = Callable[[], dict[str, Step]]  # a module's function: everybody, in the order of turns
Batches = Callable[[torch.Generator], list[torch.Tensor]]


@dataclass(frozen=True)
class Turn:
    """One contestant's steps in one round, all on the same data; seconds are those of a step.

    Attributes:
        cpu_seconds: of both ranks together, all threads.
        spread: how much more CPU time than the mean the busiest rank needed.
        wall_seconds: until the slower rank was through.
        idle: share of both ranks' wall time in which the main thread had nothing to compute.
            Waiting for a core that others use is not idleness.
        results: what each step gave on rank 0.
    """

    cpu_seconds: float
    spread: float
    wall_seconds: float
    idle: float
    results: tuple[Any, ...]


def arguments(about: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps a turn")
    parser.add_argument("--json", action="store_true")
    return parser


def cpu_seconds(
    build: Build, batches: Batches, *, rounds: int, steps: int, same_data: bool
) -> dict[str, list[float]]:
    """CPU seconds of a step, summed over both ranks, by contestant and round."""
    turns = measure(build, batches, rounds=rounds, steps=steps, same_data=same_data)
    return {name: [turn.cpu_seconds for turn in its[1:]] for name, its in turns.items()}


def measure(
    build: Build, batches: Batches, *, rounds: int, steps: int, same_data: bool
) -> dict[str, list[Turn]]:
    """By contestant, its turns; the first, before the rounds, is a warm-up.

    Args:
        batches: what a rank feeds in a step; everybody gets the same in a round.
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
        while answers.empty():
            workers.join(timeout=1)  # raises what a rank has raised
        turns = answers.get()
        while not workers.join():
            pass
    return turns


def become_rank(rank: int, store: str, ranks: int = RANKS) -> None:
    """Make this process one of some gloo ranks that meet in a file."""
    sys.stdout = sys.stderr  # libraries greet; the result is the parent's to print
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), DS_ACCELERATOR="cpu",
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29999",
    )  # fmt: skip
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    deepspeed.init_distributed("gloo", verbose=False)


def _rank(rank, store, build, batches, rounds, steps, same_data, answers) -> None:
    become_rank(rank, store)
    contestants = build()
    turns: dict[str, list[Turn]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, step in contestants.items():
            seed = number if same_data else number * RANKS + rank
            fed = batches(torch.Generator().manual_seed(seed))
            turns[name].append(_turn(step, fed, steps))
    if rank == 0:
        answers.put(turns)
    dist.barrier()
    dist.destroy_process_group()


def _turn(step: Step, fed: list[torch.Tensor], steps: int) -> Turn:
    dist.barrier()
    wall, cpu, busy = time.perf_counter(), time.process_time(), _main_thread_busy()
    results = tuple(step(fed) for _ in range(steps))
    wall = time.perf_counter() - wall
    used = torch.tensor([time.process_time() - cpu, _main_thread_busy() - busy])
    longest = torch.tensor([*used, wall])
    dist.all_reduce(used)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    (cpu, busy), (most, _, wall) = used.tolist(), longest.tolist()
    return Turn(
        cpu / steps,
        most * RANKS / cpu - 1,
        wall / steps,
        max(0.0, 1 - busy / (RANKS * wall)),
        results,
    )


def _main_thread_busy() -> float:
    """Seconds this thread has been on a core or in the queue for one."""
    with open("/proc/thread-self/schedstat") as file:
        running, queued, _ = map(int, file.read().split())
    return (running + queued) * 1e-9

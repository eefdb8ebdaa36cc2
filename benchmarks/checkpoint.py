"""Seconds of a checkpoint: ds4d, at once and beside the training, against torch's own DCP.

    python -m benchmarks.checkpoint [--rounds 5] [--layers 16] [--folder DIR] [--json]

Two gloo ranks, one thread each. The weights and both moments of a llama in fp32 (16 layers: 0.9
GB), of which each rank holds a half: for ds4d as ZeRO-1 cuts them, for DCP as DTensors. Everybody
flushes to the disk. The contestants take turns; seconds are those of the slower rank, ratios are
medians over the rounds of ds4d / DCP. Of a save beside the training, the stall is what counts; the
thread is waited for before the next turn. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from benchmarks.turns import RANKS, become_rank

MODEL = {
    "model_type": "llama", "vocab_size": 16384, "hidden_size": 640, "intermediate_size": 1728,
    "num_attention_heads": 10, "num_key_value_heads": 10, "tie_word_embeddings": False,
}  # fmt: skip
KINDS = ("weight", "exp_avg", "exp_avg_sq")
PLAIN, AT_ONCE, BESIDE = "DCP", "ds4d", "ds4d beside the training"
GOALS = {AT_ONCE: 1.2, BESIDE: 0.1}


def shapes(layers: int) -> dict[str, torch.Size]:
    from transformers import AutoConfig

    from ds4d.model.meta import logical_model

    config = AutoConfig.for_model(**MODEL, num_hidden_layers=layers)
    parameters = logical_model(config).named_parameters()
    return {f"{kind}/{name}": p.shape for name, p in parameters for kind in KINDS}


def for_ds4d(shapes: dict[str, torch.Size]) -> dict[str, Any]:
    """This rank's half of all elements in a row, as boxes on flat memory."""
    from ds4d.checkpoint.logical import LogicalTensor, Piece, boxes_of_range

    half = sum(shape.numel() for shape in shapes.values()) // RANKS
    left, at, state = half * dist.get_rank(), 0, {}
    for name, shape in shapes.items():
        count = shape.numel()
        start, stop = (min(max(edge - at, 0), count) for edge in (left, left + half))
        flat, pieces = torch.rand(stop - start), []
        for offsets, sizes in boxes_of_range(shape, start, stop):
            size = torch.Size(sizes).numel()
            pieces.append(Piece(offsets, flat[:size].view(sizes)))
            flat = flat[size:]
        state[name] = LogicalTensor(tuple(shape), torch.float32, tuple(pieces))
        at += count
    return state


def for_dcp(shapes: dict[str, torch.Size]) -> dict[str, Any]:
    """This rank's half of the rows of each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (RANKS,))
    return {
        name: DTensor.from_local(torch.rand(shape[0] // RANKS, *shape[1:]), mesh, [Shard(0)])
        for name, shape in shapes.items()
    }


def slowest(seconds: float) -> float:
    longest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)


def compare(rank: int, store: str, folder: Path, rounds: int, layers: int, answers: Any) -> None:
    become_rank(rank, store)
    import torch.distributed.checkpoint as dcp

    from ds4d.checkpoint.saver import Saver
    from ds4d.mesh import Mesh

    wanted = shapes(layers)
    mine, theirs = for_ds4d(wanted), for_dcp(wanted)
    savers = {
        AT_ONCE: Saver(folder / "at once", keep=1),
        BESIDE: Saver(folder / "beside", keep=1, group=Mesh.second_world(timeout_seconds=600)),
    }
    facts: dict[str, list[float]] = {name: [] for name in (PLAIN, *savers)}
    for turn in range(rounds + 1):  # the first warms up
        for name in facts:
            dist.barrier()
            started = time.perf_counter()
            if name == PLAIN:
                dcp.save(theirs, checkpoint_id=folder / f"dcp-{turn}")
            else:
                savers[name].save(turn, mine, extra={}, rank_state={})
            seconds = slowest(time.perf_counter() - started)
            if name != PLAIN:
                savers[name].wait()
            elif rank == 0:
                shutil.rmtree(folder / f"dcp-{turn}")
            if turn:
                facts[name].append(seconds)
    if rank == 0:
        sizes = {name: savers[name].take_saved().bytes for name in savers}
        answers.put((facts, 4 * sum(shape.numel() for shape in wanted.values()), sizes))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--folder", help="on the disk to be measured (default: the temporary one)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        given = (f"{folder}/store", Path(folder), args.rounds, args.layers, answers)
        mp.start_processes(compare, given, nprocs=RANKS, start_method="spawn")
        seconds, tensor_bytes, file_bytes = answers.get()
    ratios = {
        name: statistics.median(a / b for a, b in zip(seconds[name], seconds[PLAIN]))
        for name in GOALS
    }
    if args.json:
        found = {"seconds": seconds, "ratios": ratios}
        print(json.dumps({**found, "tensor_bytes": tensor_bytes, "file_bytes": file_bytes}))
        return
    table = Table("save", "seconds", "ratio to DCP", "goal", box=None)
    for name, times in seconds.items():
        ratio = f"{ratios[name]:.3f}" if name in ratios else ""
        goal = f"at most {GOALS[name]}" if name in GOALS else ""
        table.add_row(name, f"{statistics.median(times):.3f}", ratio, goal)
    Console().print(table)
    print(f"{tensor_bytes:,} bytes of tensors; ds4d's files have {file_bytes[AT_ONCE]:,}")


if __name__ == "__main__":
    main()

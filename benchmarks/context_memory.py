"""How much memory long sequences need: of one plain process, and of each rank of cp 4.

    python -m benchmarks.context_memory [--tokens 4096 8192 16384 32768] [--limit-mib N] [--json]

A Llama of one layer, one sample a step, in fp32, one thread a rank. The plain process is Hugging
Face's model with sdpa, which does not hold the scores either. Each measurement has new processes.
The figure is by how much the resident memory of the rank that needs most grows in a step: its peak
over what was there before.

With a limit no process may map more than that on top of what it has before the step, the system
refuses the rest, and the table says who trained all the same.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import tempfile
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from benchmarks.turns import become_rank

MIB = 2**20
CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 352,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
    "tie_word_embeddings": False,
}  # fmt: skip
# ranks, ``ds4d.context``; None: plain
CONTESTANTS = {
    "one plain process": (1, None),
    "ds4d, cp 4, ring": (4, {"method": "ring"}),
    "ds4d, cp 4, ulysses": (4, {"method": "ulysses"}),
}


def growth_mib(name: str, tokens: int, limit_mib: int | None) -> float | None:
    """Of the rank that needs most; None: the limit was too low for some rank."""
    ranks, _ = CONTESTANTS[name]
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (str(Path(folder) / "store"), name, tokens, limit_mib, answers)
        workers = [context.Process(target=_rank, args=(r, *arguments)) for r in range(ranks)]
        for worker in workers:
            worker.start()
        found: list[float | None] = []
        running = {worker.sentinel: worker for worker in workers}
        while running and None not in found:
            for sentinel in wait(list(running)):
                if running.pop(sentinel).exitcode:
                    raise RuntimeError(f"{name}, {tokens} tokens: a rank failed, see above")
                found.append(answers.get())
        for worker in running.values():  # they wait for one that has given up
            worker.kill()
    return None if None in found else max(found)


def _rank(rank: int, store: str, name: str, tokens: int, limit_mib: int | None, answers) -> None:
    ranks, context = CONTESTANTS[name]
    become_rank(rank, store, ranks)
    from benchmarks.overhead import ds4d
    from benchmarks.tensor_parallel import batches, plain

    if context is None:
        step = plain(seq_len=tokens, config=CONFIG, fused=True)
    else:
        step = ds4d(0, sequences=1, seq_len=tokens, config=CONFIG, context=context, cp=ranks)
    (ids,) = batches(torch.Generator().manual_seed(0), 1, tokens)
    ids %= CONFIG["vocab_size"]
    dist.barrier()
    if limit_mib is not None:
        allowed = _status("VmSize") + limit_mib * MIB
        resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = _status("VmRSS")
    try:
        step([ids])
    except RuntimeError as error:  # of this rank's memory, or another rank has ended
        if limit_mib is None:
            raise
        print(f"{name}, {tokens} tokens, rank {rank}: {str(error)[:100]}")
        answers.put(None)
    else:
        answers.put((_status("VmHWM") - before) / MIB)
    os._exit(0)  # the groups need not part in order


def _status(key: str) -> int:
    return int(Path("/proc/self/status").read_text().partition(f"{key}:")[2].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 8192, 16384, 32768])
    parser.add_argument("--limit-mib", type=int, help="a process may grow by no more")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    os.environ["MALLOC_ARENA_MAX"] = "1"  # else each thread reserves addresses that it never uses
    result = {
        name: {tokens: growth_mib(name, tokens, args.limit_mib) for tokens in args.tokens}
        for name in CONTESTANTS
    }
    if args.json:
        print(json.dumps({"limit_mib": args.limit_mib, "growth_mib": result}, indent=2))
        return
    limit = "" if args.limit_mib is None else f", limited to {args.limit_mib} MiB"
    table = Table("tokens", *CONTESTANTS, title=f"MiB that a rank grows by in a step{limit}")
    for tokens in args.tokens:
        cells = (result[name][tokens] for name in CONTESTANTS)
        table.add_row(str(tokens), *("too much" if c is None else f"{c:.0f}" for c in cells))
    Console().print(table)


if __name__ == "__main__":
    main()

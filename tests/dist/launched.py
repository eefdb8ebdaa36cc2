"""A rank for ``test_launch.py``: does what its first argument says, in the frame of run_rank."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
import warnings
from pathlib import Path

from ds4d.launch import runtime
from ds4d.monitor.screen import say


def raise_on_1(rank: runtime.Rank) -> None:
    if rank.launch.rank == 1:
        raise ArithmeticError("rank 1 stumbles")


def kill_1(rank: runtime.Rank) -> None:
    if rank.launch.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def exit_1(rank: runtime.Rank) -> None:
    if rank.launch.rank == 1:
        os._exit(0)


def meet(rank: runtime.Rank) -> None:
    import torch
    import torch.distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    timeout = dist.distributed_c10d._get_default_timeout("gloo").total_seconds()
    say(f"sum {total.item():.0f}, {torch.get_num_threads()} thread, timeout {timeout:.0f} s")


def abort_in_teardown(rank: runtime.Rank) -> None:
    """As a library does whose threads outlive it: when the interpreter clears its modules."""
    atexit.register((rank.output / "an-exit-handler-ran").touch)

    class Library:
        def __del__(self, abort=os.abort):
            abort()

    sys.modules["a_library"] = Library()


def noise(rank: runtime.Rank) -> None:
    print("print noise")
    warnings.warn("warning noise")
    os.write(1, b"native noise\n")


def wrong_input(rank: runtime.Rank) -> None:
    from ds4d.data.errors import DataError

    raise DataError("corpus.txt is empty")


def wait(rank: runtime.Rank) -> None:
    (rank.output / f"waits-{rank.launch.rank}").touch()
    time.sleep(300)


def save_on_sigterm(rank: runtime.Rank) -> None:
    stop = []
    signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
    (rank.output / f"waits-{rank.launch.rank}").touch()
    while not stop:
        time.sleep(0.05)
    (rank.output / f"saved-{rank.launch.rank}").touch()


def body(rank: runtime.Rank) -> int:
    steps = sys.argv[1].split(",")
    if "meet" in steps:
        rank.init_distributed(60)
    for step in steps:
        globals()[step](rank)
    return 0


if __name__ == "__main__":
    sys.exit(runtime.run_rank(body, output=Path(sys.argv[2])))

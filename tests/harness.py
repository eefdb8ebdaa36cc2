"""Run a function on several gloo ranks, in worker processes that are started once.

``run_distributed(fn, world_size, **kwargs)`` calls ``fn(**kwargs)`` on every rank with
``torch.distributed`` initialised and returns the results by rank. Workers are forked from one
server that has torch, DeepSpeed and transformers imported, live until pytest ends, and are reused
by every case; each case gets a fresh process group. A case that raises on a rank, loses a worker
or outlives its time limit fails with the rank's traceback or the stacks of all ranks; workers that
may be stuck in a collective are killed and replaced, so the next case starts clean.

``fn`` must be a module-level function of a test module, its arguments and result picklable.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).resolve().parent.parent
MOST_THREADS = 100  # DeepSpeed keeps engines for ever, and with them gloo's threads
GRACE_SECONDS = 3.0  # how long the other ranks may go on after one has failed
PRELOAD = ["torch", "deepspeed", "transformers.modeling_utils", "transformers.models.llama"]


class RankFailure(AssertionError):
    """A rank raised, died or hung; the message has its traceback."""


@dataclass
class _Worker:
    process: Any
    pipe: Connection
    stacks: Path

    @property
    def threads(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/task"))

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


_workers: list[_Worker] = []
_context = None
_scratch = None


def run_distributed(
    fn: Callable[..., Any], world_size: int, *, timeout: float = 120.0, **kwargs: Any
) -> list[Any]:
    """Call ``fn(**kwargs)`` on ``world_size`` ranks; return what each rank returned.

    Raises:
        RankFailure: a rank raised, exited or did not finish in ``timeout`` seconds.
    """
    workers = _get_workers(world_size)
    with tempfile.TemporaryDirectory(prefix="ds4d-case-") as folder:
        for rank, worker in enumerate(workers):
            worker.pipe.send((fn.__module__, fn.__qualname__, kwargs, rank, world_size, folder))
        results, failures = _collect(workers, time.monotonic() + timeout, timeout)
    if failures:
        _workers[:] = [w for w in _workers if w.process.is_alive()]
        raise RankFailure("\n".join(failures))
    return [results[rank] for rank in range(world_size)]


def _collect(workers: list[_Worker], deadline: float, timeout: float):
    results: dict[int, Any] = {}
    failures: list[str] = []
    waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                ok, value = pipe.recv()
            except EOFError:
                workers[rank].process.join(5)
                code, log = workers[rank].process.exitcode, workers[rank].stacks.with_suffix(".log")
                ok, value = False, f"the worker exited with code {code}:\n{log.read_text()[-2000:]}"
            if ok:
                results[rank] = value
            else:
                failures.append(f"rank {rank} of {len(workers)}: {value}")
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if not ready:  # out of time: say where each stuck rank stands, then replace it
            stuck = sorted(waiting.values())
            if not failures:
                failures.append(f"no result from ranks {stuck} in {timeout:.0f} s")
                failures += [f"rank {rank} stands at:\n{_stack(workers[rank])}" for rank in stuck]
            for rank in stuck:
                workers[rank].kill()
            break
    return results, failures


def _stack(worker: _Worker) -> str:
    os.kill(worker.process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    return worker.stacks.read_text()


def _get_workers(count: int) -> list[_Worker]:
    global _context, _scratch
    if _context is None:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        _context = mp.get_context("forkserver")
        _context.set_forkserver_preload(PRELOAD)
        _scratch = tempfile.TemporaryDirectory(prefix="ds4d-workers-")
    _workers[:] = [w for w in _workers if w.process.is_alive()]
    for worker in [w for w in _workers if w.threads > MOST_THREADS]:
        worker.kill()
        _workers.remove(worker)
    while len(_workers) < count:
        ours, theirs = _context.Pipe()
        stacks = Path(_scratch.name) / f"stacks-{time.monotonic_ns()}"
        process = _context.Process(target=_serve, args=(theirs, stacks), daemon=True)
        process.start()
        theirs.close()
        _workers.append(_Worker(process, ours, stacks))
    return _workers[:count]


def _serve(pipe: Connection, stacks: Path) -> None:
    faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=True)
    with open(stacks.with_suffix(".log"), "w") as log:  # the libraries' chatter
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.path.insert(0, str(ROOT))
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # DeepSpeed collects garbage for every number that it prints
    while True:
        try:
            module, name, kwargs, rank, world_size, folder = pipe.recv()
        except EOFError:
            return
        try:
            fn = getattr(importlib.import_module(module), name)
            _enter(rank, world_size, folder)
            answer = (True, fn(**kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        _leave()
        pipe.send(answer)


def _enter(rank: int, world_size: int, folder: str) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="29400",
    )  # fmt: skip
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    timeout = datetime.timedelta(seconds=100)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
    deepspeed.init_distributed("gloo", verbose=False)


def _leave() -> None:
    """Forget the case: DeepSpeed keeps its communicator, the user's mpu and the running numbers
    of parameters and modules, which it compares across ranks, in globals. ZeRO-3 also replaces
    torch's linear function, after which gradients come in another order than on ranks that have
    not run it; ZeRO-2 would reduce them with each other."""
    import torch.distributed as dist
    import torch.nn.functional as F
    from deepspeed.comm import comm
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import (
        Init,
        InsertPostInitMethodToModuleSubClasses,
    )
    from deepspeed.utils import groups

    F.linear = getattr(InsertPostInitMethodToModuleSubClasses, "linear_bk", F.linear)
    groups.mpu = None
    comm.cdb = None
    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def close() -> None:
    """Stop all workers; the next case starts new ones."""
    while _workers:
        _workers.pop().kill()

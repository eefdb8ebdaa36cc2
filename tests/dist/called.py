"""Functions that ``test_call.py`` calls on ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist


def echo(*args, device, mesh, **kwargs):
    print("noise")
    os.write(1, b"native noise\n")
    total = torch.ones(1, device=device)
    dist.all_reduce(total, group=mesh.group("tp"))
    return mesh.rank, int(total), args, kwargs


def refuse(*, device, mesh):
    from ds4d.data.errors import DataError

    raise DataError("corpus.txt is empty")


def stumble(*, device, mesh):
    if mesh.rank == 1:
        raise ArithmeticError("rank 1 stumbles")
    dist.barrier()


def wait(folder: Path, *, device, mesh):
    (folder / f"waits-{mesh.rank}").touch()
    time.sleep(300)

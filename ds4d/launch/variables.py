"""Who am I: the variables that launchers leave in a rank's environment, read once and checked.

Launchers speak different dialects. One table says which variables each of them sets for rank,
world size and local rank; whatever was found is written back in torch's dialect, which DeepSpeed
reads too. No variable at all means a world of one process; half a set is refused by name, since
guessing the other half ends in a hang or in two ranks that both think they are rank 0.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import NamedTuple


class LaunchError(ValueError):
    """The job was started in a way that cannot work; the message says what to change."""


class _Dialect(NamedTuple):
    """What one family of launchers calls things. ``proof``: any of these variables shows that it
    started us. ``has_mpi``: the ranks can agree on a meeting point among themselves."""

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: tuple[str, ...]
    proof: tuple[str, ...]
    has_mpi: bool = False


# In this order: srun may set PMI_* too, and mpirun inside a Slurm job sees SLURM_*.
# A Slurm batch script itself has SLURM_PROCID, only srun sets SLURM_STEP_NUM_TASKS.
_DIALECTS = (
    _Dialect(
        name="deepspeed / torchrun",
        rank="RANK",
        world_size="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world_size=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        proof=("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ),
    _Dialect(
        name="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        world_size="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        proof=("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        has_mpi=True,
    ),
    _Dialect(
        name="Slurm",
        rank="SLURM_PROCID",
        world_size="SLURM_STEP_NUM_TASKS",
        local_rank="SLURM_LOCALID",
        local_world_size=("SLURM_STEP_TASKS_PER_NODE",),
        proof=("SLURM_STEP_NUM_TASKS",),
    ),
    _Dialect(
        name="MPICH",
        rank="PMI_RANK",
        world_size="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world_size=("MPI_LOCALNRANKS",),
        proof=("PMI_RANK", "PMI_SIZE"),
        has_mpi=True,
    ),
)

LOCALHOST = "127.0.0.1"
_FIX = (
    "start the job with `ds4d train CONFIG` or `deepspeed launch/train.py CONFIG`, "
    "or unset them to run one process"
)


@dataclass(frozen=True)
class Launch:
    """This process's place in the job. ``address`` and ``port`` are None where MPI ranks have yet
    to agree on them."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str | None
    port: int | None

    def export(self, environ: MutableMapping[str, str] = os.environ) -> None:
        """Write torch's and DeepSpeed's variables."""
        environ.update(
            RANK=str(self.rank), WORLD_SIZE=str(self.world_size), LOCAL_RANK=str(self.local_rank),
            LOCAL_WORLD_SIZE=str(self.local_world_size),
        )  # fmt: skip
        if self.address is not None:
            environ["MASTER_ADDR"] = self.address
        if self.port is not None:
            environ["MASTER_PORT"] = str(self.port)


def read_launch(environ: Mapping[str, str] = os.environ) -> Launch:
    """Find this process's rank and the meeting point.

    Raises:
        LaunchError: a set of variables is incomplete or contradicts itself.
    """
    address = environ.get("MASTER_ADDR") or None
    port = _integer(environ, "MASTER_PORT", 1, 65535) if environ.get("MASTER_PORT") else None
    dialect = next((d for d in _DIALECTS if any(map(environ.get, d.proof))), None)
    if dialect is None:
        return Launch(0, 1, 0, 1, address or LOCALHOST, port or free_port())
    _refuse_partial_set(environ, dialect)
    world_size = _integer(environ, dialect.world_size, 1)
    rank = _integer(environ, dialect.rank, 0, world_size - 1)
    local_rank = _integer(environ, dialect.local_rank, 0, world_size - 1)
    if world_size == 1:
        address, port = address or LOCALHOST, port or free_port()
    local_world_size = _local_world_size(environ, dialect, local_rank)
    return Launch(rank, world_size, local_rank, local_world_size, address, port)


def free_port() -> int:
    """A TCP port that nobody listens on now. The kernel hands out the next one to the next
    caller, so two jobs that start at once get different ones."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        return sock.getsockname()[1]


def _refuse_partial_set(environ: Mapping[str, str], dialect: _Dialect) -> None:
    wanted = [dialect.rank, dialect.world_size, dialect.local_rank]
    if not dialect.has_mpi and environ.get(dialect.world_size) != "1":
        wanted += ["MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in wanted if not environ.get(name)]
    if missing:
        found = [f"{name}={environ[name]}" for name in wanted if environ.get(name)]
        raise LaunchError(
            f"incomplete {dialect.name} variables: found {', '.join(found)}, "
            f"missing {', '.join(missing)}; {_FIX}"
        )


def _local_world_size(environ: Mapping[str, str], dialect: _Dialect, local_rank: int) -> int:
    for name in dialect.local_world_size:
        count = re.match(r"\d+", environ.get(name, ""))  # Slurm writes "2(x3)"
        if count:
            return max(int(count.group()), local_rank + 1)
    return local_rank + 1


def _integer(environ: Mapping[str, str], name: str, low: int, high: int = 2**31) -> int:
    text = environ[name]
    if not (re.fullmatch(r"[0-9]+", text) and low <= int(text) <= high):
        allowed = f"{low} to {high}" if high < 2**31 else f"{low} or more"
        raise LaunchError(f"{name}={text!r} must be a whole number, {allowed}; {_FIX}")
    return int(text)

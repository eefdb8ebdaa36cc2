"""A rank's process: which device, how many threads, where output goes, how it ends.

``run_rank(body, output=...)`` is the frame of every distributed command:

1. the launcher's variables are read (``launch_variables``);
2. stdout and stderr go to the rank's log (``rank_log``); rank 0 keeps the screen;
3. the environment is made ready for imports of torch and DeepSpeed, which come only now;
4. ``body(rank)`` runs, and calls ``rank.init_distributed()`` when it wants process groups;
5. an error is reported once for the whole job (``failure``), and the process ends at once;
6. else it ends when Python's own exit handlers have run.
"""

from __future__ import annotations

import atexit
import ctypes
import glob
import os
import platform
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from ds4d.launch import failure, rank_log
from ds4d.launch.variables import Launch, LaunchError, read_launch
from ds4d.monitor import screen

if TYPE_CHECKING:
    import torch

_RECORDED_PACKAGES = (
    "ds4d", "torch", "deepspeed", "transformers", "accelerate", "datasets", "tokenizers",
)  # fmt: skip
STALE_LOCK_SECONDS = 60.0
GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Rank:
    """This process in its job: its place, its device, and the run folder."""

    launch: Launch
    device: torch.device
    output: Path

    def init_distributed(self, timeout_seconds: float) -> None:
        """Make the world's process group; every later group gets the same timeout.

        Collective: the world.

        Raises:
            LaunchError: the port is taken.
        """
        _init_distributed(self.launch, timedelta(seconds=timeout_seconds))


def run_rank(body: Callable[[Rank], int], *, output: Path) -> int:
    """Run ``body`` as one rank of a job.

    Returns:
        the exit code of ``body``. When it raises, the error is reported and the process ends here
        with 1 or 2: interpreter shutdown could hang in collectives of ranks that are gone.
    """
    try:
        launch = read_launch()
        logs = rank_log.make_folder(output)
    except LaunchError as error:
        print(f"ds4d: {error}", file=sys.stderr)
        return failure.WRONG_INPUT
    ending = _Ending()
    atexit.register(ending.run)  # first, so that it is the last to run
    user_screen, user_errors = rank_log.redirect(logs, launch.rank)
    screen.use(user_screen if launch.rank == 0 else sys.stdout, user_screen)
    try:
        prepare_environment(launch)
        code = body(Rank(launch, choose_device(launch), output))
        _leave_distributed()
    except SystemExit:
        raise
    except BaseException as error:
        code = failure.report(error, launch=launch, logs=logs, screen=user_errors)
        rank_log.end(code)
        os._exit(code)
    rank_log.end(code)
    ending.code = code
    return code


class _Ending:
    """Ends the process with ``code``, where that is known, before the libraries' threads are torn
    down in no order: gloo's abort a finished run now and then."""

    code: int | None = None

    def run(self) -> None:
        if self.code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.code)


def end_quietly() -> None:
    """Of a process that is not ours: take process groups down when it ends, before libraries'
    threads are torn down in no order."""
    atexit.register(_leave_distributed)


def run_folder(config: str | Path, output: str | Path | None) -> Path:
    """The run folder: ``--output``, or ``runs/`` and the name of the configuration file."""
    return Path(output) if output else Path("runs") / Path(config).stem


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank has held: on the device, or on CPU of the process (resident)."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def visible_gpus() -> tuple[str, ...]:
    """What CUDA_VISIBLE_DEVICES would list to name the GPUs that this process may use."""
    if os.environ.get("DS_ACCELERATOR", "cuda") != "cuda":
        return ()
    if not any(Path(driver).exists() for driver in GPU_DRIVERS):
        return ()  # importing torch takes seconds
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(named.split(",")[:count]) if named else tuple(map(str, range(count)))


def quiet_libraries() -> None:
    """For commands that are one process and print a result: no bars, no guesses about devices."""
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if visible_gpus() else "cpu")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()


def versions() -> dict[str, str]:
    """What this run was made with, for the run folder."""
    found = {"python": platform.python_version()}
    for package in _RECORDED_PACKAGES:
        found[package] = metadata.version(package)
    return found


# -- before torch is imported ---------------------------------------------------------------


def prepare_environment(launch: Launch) -> None:
    """Everything that must be in the environment before torch or DeepSpeed is imported."""
    launch.export()
    os.environ.setdefault("OMP_NUM_THREADS", str(cores() // launch.local_world_size or 1))
    _die_with_launcher()
    if launch.local_rank == 0:
        remove_stale_locks()


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _die_with_launcher() -> None:
    """Ask the kernel for SIGTERM when DeepSpeed's launcher dies: if that is killed it cannot end
    its ranks, and they would go on for ever."""
    try:
        launched = "deepspeed.launcher.launch" in psutil.Process(os.getppid()).cmdline()
    except psutil.Error:  # the parent is in another container
        return
    if launched:
        signal_on_parent_death(signal.SIGTERM)


def signal_on_parent_death(signum: int) -> None:
    """Have the kernel send this process a signal when its parent dies (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signum)


def remove_stale_locks() -> None:
    """Remove locks of builds that were killed: whoever builds the same extension would wait for
    them without a word. A lock is alive while its build runs (ninja works in that folder)."""
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or "~/.cache/torch_extensions"
    locks = [Path(p) for p in glob.glob(os.path.expanduser(f"{root}/**/lock"), recursive=True)]
    if not locks:
        return
    building = set()
    for process in psutil.process_iter(["name", "cwd"]):
        if process.info["name"] == "ninja":
            building.add(process.info["cwd"])
    for lock in locks:
        try:
            old = time.time() - lock.stat().st_mtime > STALE_LOCK_SECONDS
            if old and str(lock.parent.resolve()) not in building:
                lock.unlink()
                print(f"removed the stale lock {lock}")
        except OSError:
            pass  # its owner removed it meanwhile, or it is another user's


# -- torch and DeepSpeed --------------------------------------------------------------------


def choose_device(launch: Launch) -> torch.device:
    """The rank's CUDA device where there is one, else the CPU; DeepSpeed is told the same.

    ``DS_ACCELERATOR`` in the environment overrides it, as DeepSpeed documents.

    Raises:
        LaunchError: more ranks on this host than visible devices.
    """
    import torch

    kind = os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"].split(",")[0]))
    if kind != "cuda":
        return torch.device(kind) if kind == "cpu" else torch.device(kind, launch.local_rank)
    visible = torch.cuda.device_count()
    if 1 < visible < launch.local_world_size:  # 1: Slurm may show each task only its own
        raise LaunchError(
            f"{launch.local_world_size} ranks on {socket.gethostname()}, but {visible} GPUs are "
            f"visible (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}): "
            f"start {visible} ranks there, or set DS_ACCELERATOR=cpu"
        )
    device = torch.device("cuda", launch.local_rank % visible)
    torch.cuda.set_device(device)
    return device


def _init_distributed(launch: Launch, timeout: timedelta) -> None:
    import deepspeed
    import torch.distributed as dist
    from torch.distributed import distributed_c10d as c10d

    # DeepSpeed would compile this op at start-up, on every host, for inference_all_reduce only.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # Groups made without a timeout (all of DeepSpeed's) take torch's default, not the world's.
    c10d.default_pg_timeout = c10d.default_pg_nccl_timeout = timeout
    if launch.address is None or launch.port is None:
        _meet_over_mpi(launch)
    try:
        deepspeed.init_distributed(timeout=timeout, auto_mpi_discovery=False, verbose=False)
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        port = os.environ["MASTER_PORT"]
        raise LaunchError(
            f"port {port} on this host is in use, perhaps by another job: choose another with "
            f"`deepspeed --master_port N launch/train.py ...` (before the script) or MASTER_PORT=N;"
            f" `ds4d train` finds a free one by itself"
        ) from error


def _meet_over_mpi(launch: Launch) -> None:
    from deepspeed.comm.comm import mpi_discovery

    mpi_discovery(distributed_port=launch.port or 29500, verbose=False)
    found = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if found != (launch.rank, launch.world_size):
        raise LaunchError(
            f"the MPI variables say rank {launch.rank} of {launch.world_size}, the MPI library "
            f"(mpi4py) says rank {found[0]} of {found[1]}: start with the mpirun of the MPI that "
            f"mpi4py uses, or set MASTER_ADDR and MASTER_PORT"
        )


def _leave_distributed() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()

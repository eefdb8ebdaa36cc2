"""Call a function on several ranks of this machine and return what rank 0 returned.

For commands that print a result: whoever calls prints it, as if the function had run here. What
the ranks say on the way goes to stderr. The arguments and the result travel as files in a folder
of the call's own, so text of any kind arrives as it is. The folder also has the ranks' logs; it is
kept when they failed.
"""

from __future__ import annotations

import pickle
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ds4d.config.types import ContextConfig, ParallelConfig
from ds4d.launch import runtime
from ds4d.launch.failure import INTERRUPTED
from ds4d.launch.launcher import Job, check_gpus, run_job
from ds4d.launch.runtime import visible_gpus
from ds4d.launch.variables import LaunchError

T = TypeVar("T")
CALL = "call.pickle"
RESULT = "result.pickle"
STDERR = 2
TIMEOUT_SECONDS = 1800.0  # of a collective, as in training


def call_on_ranks(
    function: Callable[..., T],
    *args: Any,
    parallel: ParallelConfig,
    context: ContextConfig = ContextConfig(),
    device: str | None,
    **kwargs: Any,
) -> T:
    """``function(*args, **kwargs, device=..., mesh=...)`` on ranks of this machine.

    Args:
        function: of a module; it, its arguments and its result can be pickled.
        parallel: how many ranks, and what each is in the mesh.
        context: how ranks along cp stand to each other.
        device: "cuda", where each rank takes its own GPU, or "cpu"; None: cuda where there is one.

    Raises:
        LaunchError: the machine has no place for so many ranks; nothing was started.
        SystemExit: with the job's exit code; the ranks have said on stderr what went wrong.
    """
    gpus = _gpus(device, parallel.world_size)
    folder = Path(tempfile.mkdtemp(prefix="ds4d-"))
    (folder / CALL).write_bytes(pickle.dumps((parallel, context, function, args, kwargs)))
    job = Job((str(folder),), parallel.world_size, gpus, module=__name__, stdout=STDERR)
    code = run_job(job)
    result = pickle.loads((folder / RESULT).read_bytes()) if code == 0 else None
    if code in (0, INTERRUPTED):
        shutil.rmtree(folder)
    if code != 0:
        raise SystemExit(code)
    return result


def _gpus(device: str | None, num_ranks: int) -> tuple[str, ...]:
    """Names of the GPUs to run on; none: the CPU."""
    if device not in (None, "cpu", "cuda"):
        raise LaunchError(f"--device {device}: several ranks take cuda, each its own, or cpu")
    gpus = () if device == "cpu" else visible_gpus()
    if device == "cuda" and not gpus:
        raise LaunchError("--device cuda: no GPU is visible here")
    check_gpus(num_ranks, gpus, "start fewer ranks, or run with --device cpu")
    return gpus


def main() -> int:
    """One rank of the call; returns the exit code."""
    folder = Path(sys.argv[1])

    def body(rank: runtime.Rank) -> int:
        parallel, context, function, args, kwargs = pickle.loads((folder / CALL).read_bytes())
        from ds4d.mesh import Mesh  # torch

        rank.init_distributed(TIMEOUT_SECONDS)
        mesh = Mesh.create(parallel, context, timeout_seconds=TIMEOUT_SECONDS)
        result = function(*args, **kwargs, device=rank.device, mesh=mesh)
        if mesh.rank == 0:
            (folder / RESULT).write_bytes(pickle.dumps(result))
        return 0

    return runtime.run_rank(body, output=folder)


if __name__ == "__main__":
    sys.exit(main())

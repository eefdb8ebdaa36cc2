"""The ranks of a script: who this process is, and what Accelerate's own state says of it.

``num_processes`` is dp, for scripts compute batch sizes, schedules and shares of data from it.
``process_index`` stays the rank in the world, so that one rank is the main process and writes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType

from ds4d.accelerate.settings import ScriptFile
from ds4d.launch import runtime
from ds4d.launch.variables import read_launch
from ds4d.mesh import Mesh

TIMEOUT_SECONDS = 1800.0  # of a collective, where neither file nor script says more


@dataclass(frozen=True)
class Processes:
    """Made once a process.

    Attributes:
        file: the script's.
        device: of this rank.
        mesh: its place in the layout.
    """

    file: ScriptFile
    device: torch.device
    mesh: Mesh


_processes: Processes | None = None


def processes() -> Processes | None:
    """Those of this process; None: ds4d has not begun here."""
    return _processes


def begin(file: ScriptFile, *, timeout_seconds: float = TIMEOUT_SECONDS) -> Processes:
    """Make process groups by the launcher's variables (none: a world of one), and tell Accelerate.
    A second call only tells Accelerate again, whose state may have been reset.

    Raises:
        LaunchError: half a set of variables, or fewer devices than ranks.
        ConfigError: the layout does not fit the world.

    Collective: the world.
    """
    global _processes
    if _processes is None:
        launch = read_launch()
        parallel, context = file.layout(launch.world_size)
        runtime.prepare_environment(launch)
        device = runtime.choose_device(launch)
        training = file.content["ds4d"].get("training", {})
        seconds = training.get("process_group_timeout_seconds", timeout_seconds)
        runtime.Rank(launch, device, None).init_distributed(seconds)
        mesh = Mesh.create(parallel, context, timeout_seconds=seconds)
        _processes = Processes(file, device, mesh)
        runtime.end_quietly()
    _tell_accelerate(_processes)
    return _processes


def _tell_accelerate(these: Processes) -> None:
    # With its "use_cpu" Accelerate would drop DeepSpeed, and with it this layout, without a word.
    os.environ.pop("ACCELERATE_USE_CPU", None)
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState._shared_state.update(
        _cpu=these.device.type == "cpu",
        backend="nccl" if these.device.type == "cuda" else "gloo",
        debug=False,
        device=these.device,
        distributed_type=DistributedType.DEEPSPEED,
        fork_launched=False,
        local_process_index=int(os.environ["LOCAL_RANK"]),
        num_processes=these.mesh.parallel.dp,
        process_index=these.mesh.rank,
    )

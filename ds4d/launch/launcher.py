"""Start a job on this machine, or on the hosts of a hostfile, and end it whole.

The file of a training job is checked here, in one process, before anything starts. On one host the
ranks are started by DeepSpeed's per-host launcher (``deepspeed.launcher.launch``): what the
``deepspeed`` command would start too, but its exit code is exact (the command turns a killed
launcher into 0) and CUDA_VISIBLE_DEVICES is honoured, UUIDs included. With a hostfile it is the
``deepspeed`` command.

The job runs in a session of its own. SIGTERM and Ctrl-C are passed on as SIGTERM to its ranks,
which leave, and save where they train; a second one, or the end of the launcher, ends whatever is
left.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from ds4d.config.errors import ConfigError
from ds4d.config.load import load
from ds4d.config.notes import matrices_over_hosts
from ds4d.launch import rank_log
from ds4d.launch.failure import FAILURE, INTERRUPTED, WRONG_INPUT
from ds4d.launch.runtime import signal_on_parent_death, visible_gpus
from ds4d.launch.variables import LOCALHOST, LaunchError, free_port
from ds4d.run_lock import refuse_locked

WORKER = "ds4d.launch.worker"
_LAUNCH = "deepspeed.launcher.launch"
_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}


@dataclass(frozen=True)
class Job:
    """What to start: a module that calls ``runtime.run_rank``, its arguments, and where.

    Attributes:
        gpus: names of this host's GPUs; none: its CPU is used.
        hostfile: run there instead of on this host.
        address, port: where rank 0 listens; None: found.
        stdout: the file descriptor that what the ranks say goes to; None: this process's stdout.
    """

    args: tuple[str, ...]
    num_ranks: int
    gpus: tuple[str, ...] = ()
    hostfile: Path | None = None
    address: str | None = None
    port: int | None = None
    module: str = WORKER
    stdout: int | None = None

    def command(self) -> list[str]:
        """The launcher's command line. Its own words are switched off: the ranks speak."""
        port = self.port or free_port()
        if self.hostfile is None:
            devices = self.gpus[: self.num_ranks] or list(range(self.num_ranks))
            hosts = json.dumps({"localhost": devices}).encode()
            where = [
                _LAUNCH,
                f"--world_info={base64.urlsafe_b64encode(hosts).decode()}",
                f"--master_addr={self.address or LOCALHOST}",
                "--no_local_rank",
            ]
        else:
            where = ["deepspeed.launcher.runner", f"--hostfile={self.hostfile}"]
            where += [f"--master_addr={self.address}"] if self.address else []
        quiet = [f"--master_port={port}", "--log_level=critical", "--module", self.module]
        return [sys.executable, "-m", *where, *quiet, *self.args]

    def environment(self) -> dict[str, str]:
        """The launcher's environment."""
        on_cpu = self.hostfile is None and not self.gpus
        return dict(os.environ, DS_ACCELERATOR="cpu") if on_cpu else dict(os.environ)


def plan_job(
    config: Path,
    *,
    overrides: Sequence[str] = (),
    output: Path,
    resume: str | None = None,
    nproc: int | None = None,
    hostfile: Path | None = None,
) -> Job:
    """Check the file for the number of ranks it will run on, and say what to start.

    Raises:
        ConfigError: everything that is wrong with the file.
        LaunchError: what is wrong with ``nproc``, ``hostfile`` or ``output``.
        FolderInUse: another run uses ``output``.
    """
    gpus, hosts = visible_gpus(), {}
    if hostfile is not None:
        hosts = read_hostfile(hostfile)
        num_ranks = sum(hosts.values())
    else:
        num_ranks = nproc or default_num_ranks(config, overrides, len(gpus))
        check_gpus(
            num_ranks,
            gpus,
            "lower --nproc or the degrees in ds4d.parallel, or set DS_ACCELERATOR=cpu to train on "
            "the CPU",
        )
    run = load(config, overrides=overrides, world_size=num_ranks)
    if hosts and (note := matrices_over_hosts(run.parallel, hosts)):  # the ranks do not know them
        print(f"ds4d: note: {note}", file=sys.stderr)
    rank_log.make_folder(output)
    refuse_locked(output)
    args = [str(config), f"--output={output.absolute()}"]
    args += [word for override in overrides for word in ("--set", override)]
    args += [f"--resume={resume}"] if resume else []
    return Job(tuple(args), num_ranks, gpus, hostfile)


def check_gpus(num_ranks: int, gpus: Sequence[str], fix: str) -> None:
    """
    Raises:
        LaunchError: there are GPUs, but not one for each rank.
    """
    if gpus and num_ranks > len(gpus):
        raise LaunchError(f"{num_ranks} ranks, but {len(gpus)} GPUs are visible here: {fix}")


def default_num_ranks(config: Path, overrides: Sequence[str], num_gpus: int) -> int:
    """All GPUs where the file's degrees allow it; else, and on CPU, as few ranks as the file
    needs (dp "auto" counts as 1)."""
    needed = load(config, overrides=overrides).parallel.world_size
    if num_gpus <= needed:
        return needed
    try:
        load(config, overrides=overrides, world_size=num_gpus)
    except ConfigError:
        return needed
    return num_gpus


def read_hostfile(path: Path) -> dict[str, int]:
    """Slots by host, as DeepSpeed reads them.

    Raises:
        LaunchError: no such file, or a line that DeepSpeed would refuse.
    """
    if not path.is_file():
        raise LaunchError(f"--hostfile {path}: no such file")
    from deepspeed.launcher.runner import fetch_hostfile

    try:
        return dict(fetch_hostfile(str(path)))
    except ValueError as error:
        raise LaunchError(f"--hostfile {path}: {error}; lines are HOST slots=N") from error


def run_job(job: Job) -> int:
    """Run the job to its end, whatever happens to this process.

    Returns:
        0 done, 2 wrong input, 130 ended by Ctrl-C, 1 any failure.
    """
    with _Supervisor(job.command(), job.environment(), job.stdout) as supervisor:
        code = supervisor.wait()
    if code in (0, WRONG_INPUT):
        return code
    if supervisor.interrupted:
        return INTERRUPTED
    killed_by = -code if code < 0 else 256 - code
    if killed_by > 1 and killed_by in iter(signal.Signals):  # 255 is ssh's word for any failure
        name = signal.Signals(killed_by).name
        print(f"ds4d: a process of the job was ended by {name}", file=sys.stderr)
    return FAILURE


class _Supervisor:
    """The launcher as a child: passes signals on, leaves no process behind."""

    def __init__(self, command: list[str], environment: dict[str, str], stdout: int | None) -> None:
        self.interrupted = False  # by Ctrl-C
        self._asked = 0
        ignored = {s for s in _SIGNALS if signal.getsignal(s) == signal.SIG_IGN}  # nohup, cmd &
        self._previous = {s: signal.signal(s, self._pass_on) for s in _SIGNALS - ignored}
        self._child = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            start_new_session=True,
            preexec_fn=lambda: signal_on_parent_death(signal.SIGTERM),
        )

    def __enter__(self) -> _Supervisor:
        return self

    def wait(self) -> int:
        return self._child.wait()

    def __exit__(self, *_: object) -> None:
        self._kill_all()
        self._child.wait()
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _pass_on(self, signum: int, _frame: object) -> None:
        self.interrupted |= signum == signal.SIGINT
        self._asked += 1
        if self._asked > 1:
            self._kill_all()
            return
        print("ds4d: asked to stop; again to stop at once", file=sys.stderr)
        ranks = self._ranks()
        for process in ranks or [psutil.Process(self._child.pid)]:
            process.send_signal(signal.SIGTERM)

    def _ranks(self) -> list[psutil.Process]:
        """The ranks on this host: DeepSpeed's launcher would end them one after another, each
        with 30 s to save what takes all of them together."""
        children = psutil.Process(self._child.pid).children(recursive=True)
        return [process for process in children if _is_rank(process)]

    def _kill_all(self) -> None:
        try:
            os.killpg(self._child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def _is_rank(process: psutil.Process) -> bool:
    """A child of the launcher. (Grandchildren are data workers of a rank, which ends them.)"""
    try:
        return _LAUNCH in process.parent().cmdline()
    except (psutil.Error, AttributeError):
        return False

"""``OUTPUT/logs/rank-NNNNN.log``: where a rank's stdout and stderr go, by file descriptor, so that
native libraries, warnings and prints of DeepSpeed are caught too.

The first line of a run in it names the process, the last one its exit code: a log without a last
line, of a process that is gone, is that of a rank that was killed.
"""

from __future__ import annotations

import faulthandler
import os
import re
import socket
import sys
import time
from pathlib import Path
from typing import TextIO

import psutil

from ds4d.launch.variables import LaunchError

_START = re.compile(r"^==== .* pid (\d+) on (\S+)$", re.MULTILINE)
_END = re.compile(r"^==== .* exit code \d+$")
_TAIL_BYTES = 1 << 16


def make_folder(output: Path) -> Path:
    """The log folder of a run folder.

    Raises:
        LaunchError: it cannot be made or written to.
    """
    logs = output / "logs"
    try:
        logs.mkdir(parents=True, exist_ok=True)
        if not os.access(logs, os.W_OK):
            raise PermissionError(13, os.strerror(13), str(logs))
    except OSError as error:
        raise LaunchError(f"cannot write to the run folder {output}: {error}") from error
    return logs


def redirect(logs: Path, rank: int) -> tuple[TextIO, TextIO]:
    """Send stdout and stderr to the rank's log; return files on what they were before."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = [os.fdopen(os.dup(fd), "w", buffering=1, errors="replace") for fd in (1, 2)]
    log = os.open(_path(logs, rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()
    print(f"==== {time.strftime('%F %T')} pid {os.getpid()} on {socket.gethostname()}", flush=True)
    return before[0], before[1]


def end(code: int) -> None:
    """The last line: this rank ends by its own will."""
    sys.stderr.flush()
    print(f"==== {time.strftime('%F %T')} exit code {code}", flush=True)


def vanished(logs: Path, world_size: int, *, patience_seconds: float = 0.0) -> list[int]:
    """Ranks of this host that are gone without a last line. A process that is being killed loses
    its connections a moment before it is gone: look again until one is found, or out of patience.
    """
    deadline = time.monotonic() + patience_seconds
    while True:
        found = [rank for rank in range(world_size) if _has_vanished(_path(logs, rank))]
        if found or time.monotonic() >= deadline:
            return found
        time.sleep(0.05)


def _path(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank:05d}.log"


def _has_vanished(log: Path) -> bool:
    try:
        with open(log, "rb") as file:
            head = file.read(_TAIL_BYTES)
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            tail = file.read()
    except OSError:
        return False
    starts = _START.findall((head + tail).decode(errors="replace"))
    last = tail.decode(errors="replace").rstrip().rpartition("\n")[2]
    if not starts or starts[-1][1] != socket.gethostname() or _END.match(last):
        return False
    try:
        return psutil.Process(int(starts[-1][0])).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

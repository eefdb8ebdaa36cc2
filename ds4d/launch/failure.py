"""One report of a failed job on the screen, however many ranks fail.

Ranks that fail because another one did come later than it: they notice a closed connection only
when it has ended, and it ends after it has reported. So the first rank of a host that creates the
job's report file speaks, the others stay in their logs. What a rank says when its peer vanished
without a word (killed, out of memory) is one line, not a traceback of a collective.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import TextIO

import psutil

from ds4d.launch import rank_log
from ds4d.launch.variables import Launch

WRONG_INPUT = 2
FAILURE = 1
INTERRUPTED = 130

# Errors written for people: the message is enough, a traceback would hide it. By name, so that a
# command that fails early need not import torch to say so.
_FOR_PEOPLE = {
    "ds4d.config.errors.ConfigError": WRONG_INPUT,
    "ds4d.data.errors.DataError": WRONG_INPUT,
    "ds4d.launch.variables.LaunchError": WRONG_INPUT,
    "ds4d.checkpoint.errors.WrongPath": WRONG_INPUT,
    "ds4d.checkpoint.errors.CheckpointError": FAILURE,
    "ds4d.trainer.NonFiniteError": FAILURE,
}

# What gloo, NCCL, the store and shared memory say on the ranks that lost a peer.
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "remote process exited or there was a network error",
    "NCCL communicator was aborted",
    "ended, or left the group",
)


def report(error: BaseException, *, launch: Launch, logs: Path, screen: TextIO) -> int:
    """Write an error to this rank's log and, from the first rank that fails, to the screen.

    Returns:
        the exit code: 2 for wrong input, 130 for Ctrl-C, 1 for any other failure.
    """
    full = "".join(traceback.format_exception(error))
    print(full, file=sys.stderr, flush=True)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    who = f"rank {launch.rank} of {launch.world_size} on {socket.gethostname()}"
    code = exit_code_for_people(error)
    if code is not None:
        text = f"ds4d: {error}"
    elif _lost_peer(error):
        gone = rank_log.vanished(logs, launch.world_size, patience_seconds=2)
        peer = f"rank {', '.join(map(str, gone))}" if gone else "a rank of another host"
        text = (
            f"ds4d: {who} lost contact with {peer}, which ended without an error message (killed? "
            f"out of memory?): {error}"
        )
    else:
        text = f"ds4d: {who} failed:\n{full.rstrip()}"
    if _is_first(launch, logs, text):
        print(f"\n{text}\nds4d: the logs of all ranks are in {logs}", file=screen, flush=True)
    return FAILURE if code is None else code


def exit_code_for_people(error: BaseException) -> int | None:
    """The exit code that goes with an error that people can read; None for any other error."""
    names = (f"{kind.__module__}.{kind.__qualname__}" for kind in type(error).__mro__)
    code = next((_FOR_PEOPLE[name] for name in names if name in _FOR_PEOPLE), None)
    return WRONG_INPUT if code is None and _is_refusal(error) else code


def _is_refusal(error: BaseException) -> bool:
    """A ValueError from a raise statement of ds4d: by the house rule, something a user has set.
    (Not one that Python raises inside ds4d, such as zip's for unequal lengths: that is a bug.)"""
    if not isinstance(error, ValueError) or error.__traceback__ is None:
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    return frame.f_globals.get("__name__", "").startswith("ds4d.") and line.startswith("raise ")


def _lost_peer(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST_PEER)


def _is_first(launch: Launch, logs: Path, text: str) -> bool:
    """Whether no rank of this job on this host has reported yet. All local ranks have the same
    parent, and no other job's ranks have it."""
    if launch.local_world_size == 1:
        return True
    try:
        parent = psutil.Process(os.getppid())
        job = f"{socket.gethostname()}-{parent.pid}-{parent.create_time():.0f}"
        with open(logs / f"failure-{job}.txt", "x") as file:
            file.write(f"{time.strftime('%F %T')}\n{text}\n")
    except FileExistsError:
        return False
    except (OSError, psutil.Error):  # cannot tell: better said twice than not at all
        pass
    return True

"""One run, or one command that changes it, at a time in a run folder.

The lock is the kernel's, on a file: it goes with the process that holds it, however that ends, and
no child inherits it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

log = logging.getLogger(__name__)

LOCK = "run.lock"
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}  # some network file systems


class FolderInUse(ValueError):
    """Another process uses the run folder."""


@contextmanager
def locked(output: Path) -> Iterator[None]:
    """Hold the run folder, which must be there.

    Raises:
        FolderInUse: with who holds it.
        ValueError: nothing can be written there.
    """
    try:
        handle = os.open(output / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ValueError(f"cannot write to the run folder: {error}") from None
    try:
        _take(handle, output)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)


def refuse_locked(output: Path) -> None:
    """
    Raises:
        FolderInUse: somebody holds the folder now.
    """
    try:
        handle = os.open(output / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:  # none, or in a folder of others that can only be read
        return
    try:
        _take(handle, output)
    finally:
        os.close(handle)


def _take(handle: int, output: Path) -> None:
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
        raise FolderInUse(
            f"{output} is in use by {holder}: wait for its end, or give another folder"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        log.warning("%s: two runs there would not be noticed: no locks on this disk", output)

"""A folder of finished results that many processes and hosts share.

An entry is made by whoever takes its lock first; the others wait on the lock, not in a collective,
so no time limit can hit them, and a lock goes with its process, so a killed maker is followed by
the next. An entry is written into a temporary folder, flushed, and renamed: under its own name it
is always complete. Hosts with folders of their own each make it once.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, Iterator

from filelock import FileLock, Timeout

from ds4d.data.errors import CacheError, DataError
from ds4d.durable import flush

PATIENCE_SECONDS = 5.0  # how long to wait for a lock before saying so
POLL_SECONDS = 0.1


def default_root() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ds4d"


def digest(value: Any) -> str:
    """A short name for a JSON value: equal values, equal names."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:24]


class Cache:
    def __init__(self, root: str | Path | None, *, say: Callable[[str], None]) -> None:
        self.root = Path(root).expanduser() if root else default_root()
        self.say = say

    def entry(self, name: str, make: Callable[[Path], None]) -> Path:
        """The folder ``name``, made by ``make(folder)`` if it is not there yet.

        Raises:
            DataError: what ``make`` raised; those who waited for it raise the same without
                trying again.
            CacheError: the folder cannot be written.
        """
        folder = self.root / name
        if folder.is_dir():
            return folder
        before = self._failure(name)
        with self.lock(name):
            if folder.is_dir():
                return folder
            failure = self._failure(name)
            if failure and failure != before:
                raise DataError(failure["message"])
            try:
                self._make(folder, make)
            except DataError as error:
                note = {"id": uuid.uuid4().hex, "message": str(error)}
                write_json(self.root / f"{name}.failed", note)
                raise
        return folder

    def _failure(self, name: str) -> dict[str, str] | None:
        return read_json(self.root / f"{name}.failed")

    def _make(self, folder: Path, make: Callable[[Path], None]) -> None:
        for left in self.root.glob(f"{folder.name}.making-*"):  # by a maker that was killed
            shutil.rmtree(left, ignore_errors=True)
        making = self.root / f"{folder.name}.making-{uuid.uuid4().hex[:8]}"
        try:
            making.mkdir()
            make(making)
            for path in [*making.iterdir(), making]:
                flush(path)
            making.rename(folder)
            flush(self.root)
        except OSError as error:
            free = shutil.disk_usage(self.root).free
            raise CacheError(
                f"ds4d.data.cache_dir: writing in {making} failed: {error.strerror or error}; "
                f"{free:,} bytes are free there. Make room or set another folder"
            ) from None
        finally:
            shutil.rmtree(making, ignore_errors=True)

    @contextmanager
    def lock(self, name: str) -> Iterator[None]:
        path = self.root / f"{name}.lock"
        lock = FileLock(path, poll_interval=POLL_SECONDS)
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            try:
                lock.acquire(timeout=PATIENCE_SECONDS)
            except Timeout:
                self.say(f"waiting for another process that works on it ({path})")
                lock.acquire()
        except (OSError, NotImplementedError) as error:
            raise CacheError(
                f"ds4d.data.cache_dir: cannot write and lock files in {self.root}: "
                f"{getattr(error, 'strerror', None) or error}; set it to a folder where you can"
            ) from None
        try:
            yield
        finally:
            lock.release()


def read_json(path: Path) -> Any:
    """The content of a file that ``write_json`` wrote; None where there is none that is whole."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def write_json(path: Path, value: Any) -> None:
    """Write a file at once: readers see the old content or the new."""
    fresh = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        fresh.write_text(json.dumps(value))
        fresh.replace(path)
    except OSError as error:
        raise CacheError(f"ds4d.data.cache_dir: cannot write {path}: {error.strerror}") from None

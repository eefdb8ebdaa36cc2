"""Files and folders that are whole or absent, whatever happens to the process or the machine."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ds4d.durable import flush

TRASH = ".tmp-"  # a name that starts so may be deleted by whoever finds it
READ_BYTES = 1 << 24


@dataclass(frozen=True)
class FileRecord:
    """What a file must be: its size and the xxh3-128 of its bytes, in hex."""

    name: str
    bytes: int
    xxh3: str


class DurableFile:
    """A new file, hashed as it is written and on the disk once closed.

    Raises:
        OSError: with the file's path, which Python leaves out when a write fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._hash = xxhash.xxh3_128()
        self._bytes = 0
        self._file = open(path, "xb")

    def __enter__(self) -> "DurableFile":
        return self

    def __exit__(self, *error: object) -> None:
        try:
            self._file.close()
        except OSError as failed:
            if error == (None, None, None):
                raise self._named(failed) from None

    def write(self, data: Any) -> int:
        try:
            self._file.write(data)
        except OSError as failed:
            raise self._named(failed) from None
        self._hash.update(data)
        size = memoryview(data).nbytes
        self._bytes += size
        return size

    def finish(self) -> FileRecord:
        """Flush to the disk; nothing may be written after."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as failed:
            raise self._named(failed) from None
        return FileRecord(self.path.name, self._bytes, self._hash.hexdigest())

    def _named(self, error: OSError) -> OSError:
        return OSError(error.errno, error.strerror, str(self.path))


def write_bytes(path: Path, data: bytes) -> FileRecord:
    with DurableFile(path) as file:
        file.write(data)
        return file.finish()


def write_json(path: Path, value: Any, *, indent: int | None = None) -> FileRecord:
    return write_bytes(path, (json.dumps(value, indent=indent) + "\n").encode())


def replace_text(path: Path, text: str) -> None:
    """Give a file a new content in one instant."""
    temp = temp_beside(path)
    write_bytes(temp, text.encode())
    os.replace(temp, path)
    flush(path.parent)


def checksum(path: Path, *, watch: Callable[[int], Any] = lambda _: None) -> str:
    """The xxh3-128 of a file, as ``FileRecord`` has it.

    Args:
        watch: called with the bytes of each block that has been read.
    """
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            watch(len(block))
    return digest.hexdigest()


def damage(folder: Path, record: FileRecord, found: str) -> str:
    """What to say of a file whose checksum is ``found``."""
    what = f"its checksum is {found}, {record.xxh3} was written"
    return f"{folder / record.name} is damaged: {what}"


def temp_beside(path: Path) -> Path:
    """A new name in the same folder, so that a rename to ``path`` is one instant."""
    return path.parent / f"{TRASH}{path.name}-{uuid.uuid4().hex[:8]}"


def discard(folder: Path) -> None:
    """Remove a folder; a crash on the way never leaves half of it under its name."""
    trash = temp_beside(folder)
    os.rename(folder, trash)
    shutil.rmtree(trash)

"""What a file holds, as a hash; unchanged files are not read again.

A file counts as unchanged when size, modification time, status-change time and inode are what they
were when it was hashed, as git does for its index: the status-change time is set by the system on
every write and cannot be set back. A file that changed less than two seconds before it was hashed
is not remembered, since a second write could carry the same times.
"""

from __future__ import annotations

import hashlib
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Sequence

from ds4d.data.cache import Cache, digest, read_json, write_json
from ds4d.data.errors import CacheError, DataError
from ds4d.data.files import open_data

HASHING_THREADS = 4
CLOCK_GRAIN_SECONDS = 2.0

Stamp = list[int]


def content_hashes(files: Sequence[Path], cache: Cache) -> list[str]:
    """The SHA-256 of each file's content; only the first process on a cache reads the files."""
    names = [str(path.absolute()) for path in files]
    stamps = [_stamp(path) for path in files]
    record = f"files-{digest(names)}"
    known = _known(cache, record, names, stamps)
    if None not in known:
        return known
    try:
        with cache.lock(record):
            return _hash_unknown(files, names, stamps, cache, record)
    except CacheError:  # a cache that can only be read still serves what it holds
        return _hash_all(files, stamps)


def _known(
    cache: Cache, record: str, names: list[str], stamps: list[Stamp]
) -> list[str | None]:
    past = read_json(cache.root / f"{record}.json") or {}
    entries = [past.get(name, (None, None)) for name in names]
    return [content if seen == now else None for (seen, content), now in zip(entries, stamps)]


def _hash_unknown(
    files: Sequence[Path], names: list[str], stamps: list[Stamp], cache: Cache, record: str
) -> list[str]:
    known = _known(cache, record, names, stamps)
    unknown = [i for i, content in enumerate(known) if content is None]
    started = time.time()
    fresh = _hash_all([files[i] for i in unknown], [stamps[i] for i in unknown])
    for i, content in zip(unknown, fresh):
        known[i] = content
    settled = [_settled(stamp, started) for stamp in stamps]
    entries = zip(names, stamps, known, settled)
    write_json(
        cache.root / f"{record}.json", {name: (stamp, h) for name, stamp, h, old in entries if old}
    )
    return known


def _hash_all(files: Sequence[Path], stamps: Sequence[Stamp]) -> list[str]:
    with ThreadPoolExecutor(HASHING_THREADS) as pool:
        return list(pool.map(_hash, files, stamps))


def _hash(path: Path, stamp: Stamp) -> str:
    with open_data(path) as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    if _stamp(path) != stamp:
        raise DataError(f"{path}: changed while it was read; start again when it is finished")
    return content


def _stamp(path: Path) -> Stamp:
    try:
        stat = path.stat()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _settled(stamp: Stamp, now: float) -> bool:
    return max(stamp[1], stamp[2]) / 1e9 < now - CLOCK_GRAIN_SECONDS

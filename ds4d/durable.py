"""Making what was written survive a power cut."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk. A file's own fsync
    does not make its name durable: flush its folder too."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

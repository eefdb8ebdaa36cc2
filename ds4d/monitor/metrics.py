"""``metrics.jsonl``: one JSON object a step, one curve a file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class MetricsFile:
    """Appends steps; every line is on disk's way when ``write`` returns, so that a killed run
    loses none. Numbers that are not finite become null: JSON has no NaN.

    Args:
        path: the file. What an earlier run wrote for steps after ``start`` is cut, a line that was
            cut short too; with ``start`` 0 an earlier run's file is kept as ``*.old``.
        start: the step that this run continues from.
        last: that step's object, written if the run was killed between its checkpoint and its line.
    """

    def __init__(
        self, path: Path, *, start: int, last: Mapping[str, Any] | None = None
    ) -> None:
        self._path = path
        lacks_last = path.exists() and self._cut(start) == start - 1
        self._file = open(path, "a", encoding="utf-8")
        if lacks_last and last is not None:
            self.write(last)

    def write(self, metrics: Mapping[str, Any]) -> None:
        finite = {key: _finite(value) for key, value in metrics.items()}
        self._file.write(json.dumps(finite, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()

    def _cut(self, start: int) -> int:
        """The last step that is left."""
        if start == 0:
            if self._path.stat().st_size:
                os.replace(self._path, self._path.with_name(self._path.name + ".old"))
            return start
        kept = [entry for entry in read_metrics(self._path) if entry["step"] <= start]
        temporary = self._path.with_name(self._path.name + ".tmp")
        temporary.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
        os.replace(temporary, self._path)
        return kept[-1]["step"] if kept else 0


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a file; a last line that was cut short is left out."""
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value

"""What is wrong with a file, said all at once and for people."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Problem:
    """Attributes:
    path: dotted key, "" for the whole file.
    message: what is there, what is allowed, what to write instead.
    line: where the key stands in the file, where that is known.
    """

    path: str
    message: str
    line: int | None = None

    def __str__(self) -> str:
        where = "" if self.line is None else f"line {self.line}: "
        return where + (f"{self.path}: {self.message}" if self.path else self.message)


class ConfigError(ValueError):
    """A file that cannot be run; ``problems`` has everything that is wrong with it."""

    def __init__(self, problems: Sequence[Problem], *, name: str = "the config") -> None:
        self.problems = list(problems)
        self.name = name
        count = len(self.problems)
        head = f"{name}: {count} problem{'s' if count != 1 else ''}"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in self.problems)]))

    def __reduce__(self):
        return _rebuild, (self.problems, self.name)


def _rebuild(problems: list[Problem], name: str) -> ConfigError:
    return ConfigError(problems, name=name)


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that ``word`` was probably meant to be."""
    by_lower = {k.lower(): k for k in known}
    if match := difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.7):
        return by_lower[match[0]]
    return None


def show(value: Any, limit: int = 80) -> str:
    """A value as it would stand in the file, not too long."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= limit else text[: limit - 4] + " ..."

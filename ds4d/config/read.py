"""From a file and overrides to a plain dict. Nothing is judged here but the form of the text.

Files are JSON with comments and trailing commas, which DeepSpeed reads too. It reads more, Hjson,
where a forgotten comma can turn two keys into one text: that is an error here.
"""

from __future__ import annotations

import copy
import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ds4d.config.errors import ConfigError, Problem, show

_STRING = r'(?P<string>"(?:\\.|[^"\\\n])*")'
COMMENT = re.compile(_STRING + r"|//[^\n]*|#[^\n]*|/\*.*?\*/", re.DOTALL)
TRAILING_COMMA = re.compile(_STRING + r"|,(?=\s*[}\]])")
# What a file without comments is made of, coarsely: enough to follow its braces.
TOKEN = re.compile(_STRING + r"|(?P<mark>[{}\[\],:])|[^\s{}\[\],:\"]+")


@dataclass
class Document:
    """A file as read.

    Attributes:
        content: the JSON object.
        name: for messages: the path, or what the caller is called.
        path: None when it came as a dict.
        lines: dotted key -> the lines on which it stands.
    """

    content: dict[str, Any]
    name: str = "the config"
    path: Path | None = None
    lines: Mapping[str, list[int]] = field(default_factory=dict)

    def line(self, path: str) -> int | None:
        """The line of a key, or of the nearest key around it."""
        while path:
            if path in self.lines:
                return self.lines[path][-1]
            path = path.rpartition(".")[0]
        return None


def read(source: str | Path | Mapping[str, Any]) -> Document:
    """Read a file, or copy a dict.

    Raises:
        ConfigError: no file, not UTF-8, a syntax error, a key that stands twice in one object.
    """
    if isinstance(source, Mapping):
        return Document(copy.deepcopy(dict(source)))
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError([Problem("", f"cannot be read: {error.strerror}")], name=str(path))
    except UnicodeDecodeError as error:
        raise ConfigError([Problem("", f"not UTF-8 at byte {error.start}")], name=str(path))
    lines = key_lines(text)
    twice: list[str] = []
    content = _parse(text, str(path), twice)
    if twice:
        raise ConfigError(_duplicates(twice, lines), name=str(path))
    if not isinstance(content, dict):
        problem = Problem("", f"must hold one object {{ ... }}, not {show(content)}")
        raise ConfigError([problem], name=str(path))
    return Document(content, str(path), path, lines)


def _parse(text: str, name: str, twice: list[str]) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = {}
        for key, value in pairs:
            if key in result:
                twice.append(key)
            result[key] = value
        return result

    try:
        return json.loads(
            _plain(text),
            object_pairs_hook=unique,
            parse_constant=_no_number,
            parse_float=_finite,
        )
    except json.JSONDecodeError as error:
        shown = text.split("\n")[error.lineno - 1].strip()
        message = f"column {error.colno}: not JSON: {error.msg}" + (f": {shown}" if shown else "")
        raise ConfigError([Problem("", message, error.lineno)], name=name) from None
    except ValueError as error:
        raise ConfigError([Problem("", str(error))], name=name) from None


def _plain(text: str) -> str:
    """Comments and trailing commas become blanks, so that every place keeps its line and column."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match["string"] else re.sub(r"[^\n]", " ", match[0])

    return TRAILING_COMMA.sub(blank, COMMENT.sub(blank, text))


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number in JSON")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"{text} is too large for a number")
    return value


def _duplicates(names: list[str], lines: Mapping[str, list[int]]) -> list[Problem]:
    problems = []
    for name in dict.fromkeys(names):
        places = {p: n for p, n in lines.items() if p.split(".")[-1] == name and len(n) > 1}
        for path, numbers in (places or {name: []}).items():
            where = f" (lines {', '.join(map(str, numbers))})" if numbers else ""
            problems.append(Problem(path, f"stands more than once{where}; keep one"))
    return problems


def key_lines(text: str) -> dict[str, list[int]]:
    """Dotted key -> the lines on which it stands; list items are keys too (0, 1, ...).

    For messages: it follows marks and strings only, and takes any text.
    """
    lines: dict[str, list[int]] = defaultdict(list)
    stack: list[list[Any]] = []  # [prefix, is_object, key or index of what is being read]
    last: tuple[str, int] = ("", 1)
    line, seen = 1, 0
    text = _plain(text)
    for token in TOKEN.finditer(text):
        line += text.count("\n", seen, token.start())
        seen = token.start()
        if not token["mark"]:
            last = (token[0].strip('"'), line)
        elif token["mark"] == ":" and stack and stack[-1][1]:
            stack[-1][2] = last[0]
            lines[_join(*stack[-1][::2])].append(last[1])
        elif token["mark"] in ("{", "["):
            prefix = _join(*stack[-1][::2]) if stack else ""
            stack.append([prefix, token["mark"] == "{", "" if token["mark"] == "{" else 0])
        elif token["mark"] in ("}", "]") and stack:
            stack.pop()
        elif token["mark"] == "," and stack and not stack[-1][1]:
            stack[-1][2] += 1
    return dict(lines)


def _join(prefix: str, key: str | int) -> str:
    return f"{prefix}.{key}" if prefix else str(key)


def override(content: dict[str, Any], assignments: Sequence[str]) -> list[Problem]:
    """Set ``dotted.key=value`` in place; a value that is not JSON is text."""
    problems = []
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        if not equals or not path:
            problems.append(Problem(assignment, "an override is written dotted.key=value"))
            continue
        *parents, last = path.split(".")
        holder: Any = content
        for index, key in enumerate(parents):
            holder = holder.setdefault(key, {})
            if not isinstance(holder, dict):
                where = ".".join(parents[: index + 1])
                problems.append(Problem(path, f"{where} is {show(holder)}, which has no keys"))
                break
        else:
            holder[last] = _value(text)
    return problems


def _value(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number, parse_float=_finite)
    except ValueError:
        return text

"""The only way from a file to a ``RunConfig``: read, compare with the schema, judge, resolve."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds4d.config import (  # noqa: F401  (the checks enter rules)
    checks,
    checks_context,
    checks_deepspeed,
    checks_pipeline,
    validate,
)
from ds4d.config.draft import Draft
from ds4d.config.errors import ConfigError, Problem
from ds4d.config.read import Document, override, read
from ds4d.config.resolve import resolve, resolved
from ds4d.config.rules import apply_rules
from ds4d.config.types import RunConfig

__all__ = ["load", "resolved"]


def load(
    source: str | Path | Mapping[str, Any],
    *,
    overrides: Sequence[str] = (),
    world_size: int | None = None,
) -> RunConfig:
    """Read and judge a file, and fill in all that it leaves open.

    Args:
        source: a file, or its content as a dict.
        overrides: ``dotted.key=value``, the value as JSON or else text.
        world_size: ranks of the run; None: as many as the file's own degrees need.

    Raises:
        ConfigError: everything that is wrong with the file.
    """
    document = read(source)
    problems = override(document.content, overrides)
    problems += validate.find_problems(document.content)
    draft = Draft(document.content, world_size)
    problems += apply_rules(draft, {problem.path for problem in problems})
    if problems:
        raise ConfigError(_in_file_order(problems, document, overrides), name=document.name)
    return resolve(draft, document.path)


def _in_file_order(
    problems: Sequence[Problem], document: Document, overrides: Sequence[str]
) -> list[Problem]:
    """With their lines; what an override has set stands on none."""
    overridden = {assignment.partition("=")[0] for assignment in overrides}
    placed = [
        Problem(p.path, p.message, None if p.path in overridden else document.line(p.path))
        for p in problems
    ]
    return sorted(placed, key=lambda p: p.line or 0)

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
from ds4d.config.fit import fit_degrees
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
    hosts: Mapping[str, int] | None = None,
) -> RunConfig:
    """Read and judge a file, and fill in all that it leaves open.

    Args:
        source: a file, or its content as a dict.
        overrides: ``dotted.key=value``, the value as JSON or else text.
        world_size: ranks of the run; None: as many as the file's own degrees need.
        hosts: names with the number of ranks on each, in the order of ranks; they make
            ``world_size``, and a note where a layout is dear on them.

    Raises:
        ConfigError: everything that is wrong with the file.
    """
    world_size = sum(hosts.values()) if hosts else world_size
    document = read(source)
    problems = override(document.content, overrides)
    problems += validate.find_problems(document.content)
    broken = {problem.path for problem in problems}
    draft = Draft(fit_degrees(document.content, world_size, broken), world_size, hosts)
    problems += apply_rules(draft, broken)
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

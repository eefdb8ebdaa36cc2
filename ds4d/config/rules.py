"""The table of rules: what ``checks.py`` and its neighbours enter, and how it is applied.

A rule looks at a ``Draft`` and yields a ``Problem`` for each thing that cannot be run as asked. It
is skipped when the form of a key that it reads is wrong, for it would only repeat that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ds4d.config.draft import Draft
from ds4d.config.errors import Problem

Problems = Iterator[Problem]
Check = Callable[[Draft], Problems]


@dataclass(frozen=True)
class Rule:
    check: Check
    reads: tuple[str, ...]


RULES: list[Rule] = []


def rule(*reads: str) -> Callable[[Check], Check]:
    """Enter a rule into the table, with the keys that it reads."""

    def enter(check: Check) -> Check:
        RULES.append(Rule(check, reads))
        return check

    return enter


def apply_rules(draft: Draft, broken: Iterable[str]) -> list[Problem]:
    """What the rules find, each once; rules that read a broken key are left out."""
    broken = list(broken)
    problems: list[Problem] = []
    for entry in RULES:
        if not any(_overlap(path, key) for path in broken for key in entry.reads):
            problems += entry.check(draft)
    return list(dict.fromkeys(problems))


def _overlap(one: str, other: str) -> bool:
    """Equal, or one inside the other; "" is the whole file."""
    short, long = sorted((one, other), key=len)
    return not short or f"{long}.".startswith(f"{short}.")

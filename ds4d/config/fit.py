"""Degrees that the file leaves open: with ``"auto"`` for tp, pp or cp, one file runs on any number
of ranks, in as many of these axes as the ranks, the model and the batch allow."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from ds4d.config.draft import AUTO, Draft
from ds4d.config.rules import apply_rules

# Ties between axes go to the first.
AXES = ("tp", "pp", "cp", "dp")


def fit_degrees(
    content: Mapping[str, Any], world_size: int | None, broken: set[str]
) -> Mapping[str, Any]:
    """The file with a number for each "auto" of tp, pp and cp.

    The ranks that the other degrees leave are taken apart into primes, and each prime goes to the
    open axis with the smallest degree that the rules then accept: 8 ranks are 2 x 2 x 2 of a model
    that can be cut in every way. What no axis accepts is left to dp, or to the rules to refuse.

    Args:
        world_size: None: not known; one rank is taken for each "auto".
        broken: keys of a wrong form.
    """
    draft = Draft(content, world_size)
    if "ds4d.parallel" in broken or AUTO not in (draft.degree(axis) for axis in AXES[:3]):
        return content
    if any(key.startswith("ds4d.parallel.") for key in broken):
        return content
    degrees = {axis: draft.degree(axis) for axis in AXES}
    open_axes = [axis for axis in AXES if degrees[axis] == AUTO]
    degrees |= dict.fromkeys(open_axes, 1)
    rest, remainder = divmod(world_size or 1, prod(degrees.values()))
    if not remainder:
        known = _problems(content, degrees, broken)
        for prime in _primes(rest):
            for axis in sorted(open_axes, key=degrees.get):
                larger = degrees | {axis: degrees[axis] * prime}
                if _problems(content, larger, broken) <= known:
                    degrees = larger
                    break
    if draft.degree("dp") == AUTO:
        degrees["dp"] = AUTO
    return _with_degrees(content, degrees)


def _problems(content: Mapping[str, Any], degrees: Mapping[str, int], broken: set[str]) -> set[Any]:
    """What the rules say of a run on just as many ranks."""
    return set(apply_rules(Draft(_with_degrees(content, degrees), prod(degrees.values())), broken))


def _with_degrees(content: Mapping[str, Any], degrees: Mapping[str, Any]) -> Mapping[str, Any]:
    filled = copy.deepcopy(dict(content))
    filled["ds4d"]["parallel"] = {**filled["ds4d"]["parallel"], **degrees}
    return filled


def _primes(number: int) -> Iterator[int]:
    """Of a number, the smallest first."""
    factor = 2
    while number > 1:
        while number % factor:
            factor += 1
        yield factor
        number //= factor

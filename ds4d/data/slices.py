"""A part of the documents: ``"95%:"``, ``":1000"``, ``"10%:20%"``, ``"-100:"``."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from ds4d.data.errors import DataError

_BOUND = re.compile(r"\s*(?:(-?\d+)|(\d+(?:\.\d+)?)\s*%)?\s*")


def slice_bounds(key: str, text: str | None, count: int) -> tuple[int, int]:
    """First document and the one behind the last, of ``count`` documents.

    A percentage is rounded down, so that ``":95%"`` and ``"95%:"`` share no document and miss none.

    Args:
        key: dotted path of the source, for the errors.
    """
    if text is None:
        return 0, count
    bounds = [_BOUND.fullmatch(part) for part in text.split(":")]
    if len(bounds) != 2 or not all(bounds):
        allowed = "'START:STOP', each a number, a percentage or nothing, as '95%:' or ':1000'"
        raise DataError(f"{key}.slice: {text!r} is no slice; write {allowed}")
    start, stop = (_position(bound, default, count) for bound, default in zip(bounds, (0, count)))
    if start >= stop:
        raise DataError(f"{key}.slice: {text!r} leaves none of the {count} documents")
    return start, stop


def _position(bound: re.Match, default: int, count: int) -> int:
    number, percent = bound.groups()
    if number is not None:
        position = int(number)
        return max(0, min(count, position + count if position < 0 else position))
    if percent is not None:
        return min(count, math.floor(Fraction(percent) * count / 100))
    return default

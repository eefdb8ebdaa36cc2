"""Rope of a small model: its lists fit the small heads, and it is stretched as much as it was."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from transformers import PreTrainedConfig

ORIGINAL = "original_max_position_embeddings"
ORIGINAL_POSITIONS = 32  # few, so that a short sequence goes beyond them


def ropes_of(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """Rope parameters, one dict or one of each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or ([rope] if rope else [])


def head_dim_that_fits(config: PreTrainedConfig, least: int) -> int:
    """The least size whose rotary part is even, too, and has a pair for each of its sections."""
    ropes: list[dict[str, Any]] = [*ropes_of(config), {}]
    outer = getattr(config, "partial_rotary_factor", None) or 1.0

    def fits(size: int) -> bool:
        parts = [int(size * (rope.get("partial_rotary_factor") or outer)) for rope in ropes]
        pairs = [len(rope.get("mrope_section") or [0]) for rope in ropes]
        return all(p % 2 == 0 and p >= 2 * n for p, n in zip(parts, pairs, strict=True))

    return next(filter(fits, (least, 2 * least, 4 * least, 8 * least)), least)


def few_positions(config: PreTrainedConfig, small: dict[str, Any], *, most: int) -> None:
    """Rope that was stretched from fewer positions: both smaller, their ratio as it was."""
    before = getattr(config, "max_position_embeddings", None)
    stretched = [rope for rope in ropes_of(config) if rope.get(ORIGINAL)]
    if before is None or not stretched:
        return
    ratio = Fraction(before, min(int(rope[ORIGINAL]) for rope in stretched))
    few = min(before, max(most, round(ORIGINAL_POSITIONS * ratio)))
    positions = "max_position_embeddings"
    small[config.attribute_map.get(positions, positions)] = few
    rope = small["rope_parameters"]
    for one in [rope, *(value for value in rope.values() if isinstance(value, dict)), small]:
        if original := one.get(ORIGINAL):
            original = round(Fraction(few * int(original), before))
            one[ORIGINAL] = max(1, original)


def small_rope(rope: dict[str, Any], head_size: Callable[[int], int]) -> dict[str, Any]:
    """Rope parameters whose lists fit the small head.

    Args:
        head_size: of a size of heads, the small one.
    """
    small: dict[str, Any] = {}
    for name, value in rope.items():
        if isinstance(value, dict):
            small[name] = small_rope(value, head_size)
        elif name in ("short_factor", "long_factor"):
            count = head_size(2 * len(value)) // 2
            small[name] = [value[i * len(value) // count] for i in range(count)]
        elif name == "mrope_section":
            small[name] = _sections(value, head_size(2 * sum(value)) // 2)
        else:
            small[name] = value
    return small


def _sections(sections: list[int], total: int) -> list[int]:
    """Each at least 1, together ``total``, as nearly as they were to each other."""
    few = [max(1, value * total // sum(sections)) for value in sections]
    while sum(few) != total:
        step = 1 if sum(few) < total else -1
        short = [
            size * total - now * sum(sections) for size, now in zip(sections, few, strict=True)
        ]
        few[max(range(len(few)), key=lambda i: (step * short[i], few[i]))] += step
    return few

"""Which layers of a config stay when it is made small: of each kind the first.

A layer's kind is all that the config says about it: its entry in every list of one entry a layer,
on which side of each threshold it is, whether an index list names it, where it is in a period. A
kind that is in such a list can be picked from anywhere; one that only a period makes cannot, and
then the layers from the first to the last needed all stay.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

MOST_KINDS = 12
TWICE = "hybrid"  # a kind whose layers share weights with each other

COUNT = re.compile(
    r"num_hidden_layers|n_layers?|num_layers|num_blocks|(num_)?(en|de)coder_layers|depth"
    r"|num_(full|hash)_layers"
)
# Layers before this number are of one kind, those from it on of another.
THRESHOLDS = (
    "first_k_dense_replace", "num_dense_layers", "max_window_layers", "moe_layer_start_index",
    "loop_layer_index_start", "loop_layer_index_end",
)  # fmt: skip
LAST_INDEX = ("moe_layer_end_index",)
FROM_THE_END = ("num_kv_shared_layers",)
# One after the other they are all layers.
SPANS = ("n_input_layers", "n_recurrent_layers", "n_output_layers")
INDICES = re.compile(
    r".*layer(s|er)?_(ids|indices|idxs)|full_attn_idxs|mlp_only_layers|moe_layers"
    r"|cross_attention_layers"
)
# Period -> the field with its offset.
PERIODS = {
    "attn_layer_period": "attn_layer_offset",
    "expert_layer_period": "expert_layer_offset",
    "decoder_sparse_step": None,
    "moe_layer_interval": None,
    "moe_every_n_layers": None,
}
CYCLES = ("block_types",)  # lists that start anew when they are through
NOT_A_LAYER_EACH = re.compile(
    r".*_token_ids?|.*tokens|.*_multipliers|architectures|.*shape|.*_dim|L_bp_cycles|mrope_section"
)


def layer_lists(fields: dict[str, Any], count: int) -> dict[str, list[Any]]:
    """The fields that have one entry a layer."""
    return {
        name: list(value)
        for name, value in fields.items()
        if isinstance(value, (list, tuple))
        and len(value) == count
        and not NOT_A_LAYER_EACH.fullmatch(name)
        and not INDICES.fullmatch(name)
        and name not in CYCLES
    }


def layers_that_stay(fields: dict[str, Any], count: int, at_least: int) -> list[int]:
    """Indices of layers, ascending; one is there several times if there are too few.

    Args:
        count: layers of the config.
        at_least: how many to give; more where there are more kinds.
    """
    lists = layer_lists(fields, count)
    kinds = [_kind(fields, lists, i, count) for i in range(count)]
    if len(set(kinds)) > MOST_KINDS:  # sizes or rates of their own: the kinds that have names do
        named = {name: row for name, row in lists.items() if not isinstance(row[0], (int, float))}
        kinds = [_kind(fields, named, i, count) for i in range(count)]
    first = sorted({kinds.index(kind) for kind in kinds} | _second(lists))
    if any(_is_period(fields, name) for name in PERIODS) or any(fields.get(n) for n in CYCLES):
        wanted = max(first[-1] + 1, at_least)
        return list(range(wanted))
    others = [i for i in range(count) if i not in first]
    picked = first + others[: max(0, at_least - len(first))]
    return sorted(picked + [i % count for i in range(at_least - len(picked))])


def _second(lists: dict[str, list]) -> set[int]:
    """The second layer of the kind that is wanted twice."""
    return {
        [i for i, entry in enumerate(row) if entry == TWICE][1]
        for row in lists.values()
        if row.count(TWICE) > 1
    }


def _is_period(fields: dict[str, Any], name: str) -> bool:
    return isinstance(fields.get(name), int) and fields[name] > 1


def _kind(fields: dict[str, Any], lists: dict[str, list], i: int, count: int) -> tuple:
    marks: list[Any] = [repr(row[i]) for row in lists.values()]
    marks += [i < fields[name] for name in THRESHOLDS if isinstance(fields.get(name), int)]
    marks += [i <= fields[name] for name in LAST_INDEX if isinstance(fields.get(name), int)]
    marks += [i < count - fields[name] for name in FROM_THE_END if fields.get(name)]
    marks += [i in value for name, value in fields.items() if _is_indices(name, value)]
    marks += [
        (i - (fields.get(offset) or 0 if offset else -1)) % fields[name] == 0
        for name, offset in PERIODS.items()
        if _is_period(fields, name)
    ]
    marks += [fields[name][i % len(fields[name])] for name in CYCLES if fields.get(name)]
    marks += [i < end for end in _ends(fields)]
    marks.append(repr(_own(fields, i)))
    return tuple(marks)


def _is_indices(name: str, value: Any) -> bool:
    return bool(INDICES.fullmatch(name)) and isinstance(value, (list, tuple))


def _ends(fields: dict[str, Any]) -> list[int]:
    spans = [fields[name] for name in SPANS if isinstance(fields.get(name), int)]
    return [sum(spans[: n + 1]) for n in range(len(spans))]


def _own(fields: dict[str, Any], i: int) -> Any:
    """What ``per_layer_config`` says about layer i; its keys may be "05"."""
    own = fields.get("per_layer_config") or {}
    return next((value for key, value in own.items() if int(key) == i), None)


def cut_layers(fields: dict[str, Any], count: int, stay: Sequence[int]) -> dict[str, Any]:
    """The fields about layers, for those of ``stay`` alone."""

    def ints(names: Sequence[str], change: Callable[[int], int]) -> dict[str, Any]:
        return {name: change(fields[name]) for name in names if isinstance(fields.get(name), int)}

    cut: dict[str, Any] = {
        name: [row[i] for i in stay] for name, row in layer_lists(fields, count).items()
    }
    cut |= ints(THRESHOLDS, lambda value: sum(i < value for i in stay))
    cut |= ints(
        LAST_INDEX, lambda value: sum(i <= value for i in stay) - 1 if value >= 0 else value
    )
    cut |= ints(FROM_THE_END, lambda value: sum(i >= count - value for i in stay))
    starts = [0, *_ends(fields)]
    for name, start in zip(SPANS, starts, strict=False):
        if name in fields:
            cut[name] = sum(start <= i < start + fields[name] for i in stay)
    for name, value in fields.items():
        if _is_indices(name, value):
            cut[name] = [n for n, i in enumerate(stay) if i in value]
        elif COUNT.fullmatch(name) and isinstance(value, int):
            cut[name] = len(stay)
    if fields.get("per_layer_config"):
        own = {n: _own(fields, i) for n, i in enumerate(stay)}
        cut["per_layer_config"] = {n: value for n, value in own.items() if value is not None}
    return cut

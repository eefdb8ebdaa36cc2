"""What the mask functions of transformers mean.

transformers composes a mask out of closures (``masking_utils.py``): causal AND window AND packed
sequences AND ... All closures that one factory returns share one code object; by it the known ones
are told apart and read. What is not known stays a function that is evaluated: slower, never
different.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from types import CodeType

import torch
from transformers import masking_utils as hf


@dataclass(frozen=True)
class Pattern:
    """What is known about a mask function without evaluating it. Indices are global ones.

    Attributes:
        causal: a visible key never stands after its query.
        window: a visible key stands fewer than this many tokens before its query.
        segments: int [B, S]: a visible key has its query's number (packed sequences).
        exact: the mask is the three above and nothing else; if False it must be evaluated, and the
            three are bounds that hold all the same.
    """

    causal: bool = False
    window: int | None = None
    segments: torch.Tensor | None = None
    exact: bool = True


UNKNOWN = Pattern(exact=False)


def describe(mask_function: Callable) -> Pattern:
    """What is known about one of transformers' mask functions."""
    code = getattr(mask_function, "__code__", None)
    names, read = _READERS.get(code, ((), None))
    if read is None or code.co_freevars != names:
        return UNKNOWN
    return read(*(cell.cell_contents for cell in mask_function.__closure__ or ()))


def of_whole(mask_function: Callable, positions: torch.Tensor | None) -> Callable:
    """The mask function of a whole sequence, given that of some of its tokens.

    Args:
        positions: int64 [B, S], of the whole; None: they count up. Packed sequences, which follow
            from them, are left out: they are known as documents.

    Raises:
        ValueError: it is made from tensors that nobody knows the whole of.
    """
    base = _without_tokens(mask_function) or hf.bidirectional_mask_function
    if positions is None or describe(base).exact:
        return base
    return hf.remap_positions_for_packed_sequence(base, positions)


def _without_tokens(mask_function: Callable) -> Callable | None:
    """A mask function without what it knows of single tokens. None: nothing else is left."""
    name = _NAMES.get(getattr(mask_function, "__code__", None))
    inside = [cell.cell_contents for cell in getattr(mask_function, "__closure__", None) or ()]
    if name == "packed_sequence_mask_function":
        return None
    if name == "remap_positions_for_packed_sequence":
        return _without_tokens(inside[0])
    if name == "and_masks":
        parts = [part for each in inside[0] if (part := _without_tokens(each)) is not None]
        return hf.and_masks(*parts) if parts else None
    if name is None and any(isinstance(each, torch.Tensor) for each in inside):
        raise ValueError(
            "ds4d.parallel.cp: this model makes an attention mask from the tokens of one rank "
            f"({getattr(mask_function, '__qualname__', mask_function)})"
        )
    return mask_function


def _both(a: Pattern, b: Pattern) -> Pattern:
    windows = [w for w in (a.window, b.window) if w is not None]
    return Pattern(
        causal=a.causal or b.causal,
        window=min(windows, default=None),
        segments=a.segments if b.segments is None else b.segments,
        exact=a.exact and b.exact and (a.segments is None or b.segments is None),
    )


def _and(mask_functions: tuple[Callable, ...]) -> Pattern:
    return reduce(_both, map(describe, mask_functions))


def _chunked(chunk_size: int, left_padding: torch.Tensor) -> Pattern:
    return Pattern(window=chunk_size, exact=False)  # two tokens of a chunk are closer than its size


def _remap(mask_function: Callable, position_ids: torch.Tensor) -> Pattern:
    # Within a packed sequence positions count as indices do, so causality and windows, which are
    # about distances, are the same in both; transformers always adds the sequences' own mask.
    return describe(mask_function)


_CAUSAL = hf.causal_mask_function

# A mask function or the factory of one, what to call the factory with to see its closure's code,
# the names that the closure captures (in Python's order: by the alphabet), and their reader.
_KNOWN: tuple[tuple[str, tuple | None, tuple[str, ...], Callable[..., Pattern]], ...] = (
    ("causal_mask_function", None, (), lambda: Pattern(causal=True)),
    ("bidirectional_mask_function", None, (), Pattern),
    ("and_masks", (_CAUSAL,), ("mask_functions",), _and),
    ("sliding_window_overlay", (1,), ("sliding_window",), lambda size: Pattern(window=size)),
    ("chunked_overlay", (1, None), ("chunk_size", "left_padding"), _chunked),
    (
        "packed_sequence_mask_function",
        (None,),
        ("packed_sequence_mask",),
        lambda numbers: Pattern(segments=numbers),
    ),
    (  # not in every version that ds4d runs with
        "remap_positions_for_packed_sequence",
        (_CAUSAL, None),
        ("mask_function", "position_ids"),
        _remap,
    ),
)


def _code(name: str, arguments: tuple | None) -> CodeType:
    function = getattr(hf, name)
    return (function if arguments is None else function(*arguments)).__code__


_CODES = {name: _code(name, arguments) for name, arguments, *_ in _KNOWN if hasattr(hf, name)}
_READERS = {_CODES[name]: (names, read) for name, _, names, read in _KNOWN if name in _CODES}
_NAMES = {code: name for name, code in _CODES.items()}

"""The words in which a blueprint says what a Hugging Face architecture is made of.

Letters: E hidden size, H heads, K key/value heads, D head dim, F inner size, V vocabulary, t ranks.

A *plan* gives a style to paths of modules or parameters of the causal language model, with ``*``
for every number ("model.layers.*.mlp.up_proj") and ``**`` for any beginning. The styles are
transformers' own (its ``base_model_tp_plan``), and a few that its plans have no word for:

    colwise                 output features, one equal stretch a rank (heads stay whole)
    colwise_gather_output   the same, put together again behind it
    packed_colwise          [gate | up]: each half is cut by itself
    qkv_colwise             [q | k | v]: each is cut by heads
    grouped_colwise         [(q ... q, k, v) of the first group | ...]: whole groups of heads
    rowwise                 input features; the outputs are summed over the ranks
    rowwise_split_input     the same behind what was put together
    vocabulary              rows of the embedding, one stretch a rank (also of the head)
    by_head                 a parameter [H | K, ...] of the attention, cut by heads
    norm_over_heads         an RMS norm over all heads at once: its mean spans the ranks
    replicate               whole on every rank
    Cut(dim, blocks, unit)  a parameter, cut along dim in each of its blocks (weights of experts)
    experts                 a module of experts: its output is summed over the ranks
    shared_by_ranks         a parameter that all ranks add to a sum: each adds 1 / t
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Cut:
    """A parameter cut along ``dim``, separately in each of ``blocks`` equal blocks.

    Attributes:
        unit: neighbours that stay together (gate and up columns that alternate).
    """

    dim: int
    blocks: int = 1
    unit: int = 1


Style = str | Cut
# A style may depend on the config.
Plan = Mapping[str, Style | Callable[[Any], Style]]


def _heads(config: Any) -> tuple[int, int]:
    heads = config.num_attention_heads
    return heads, getattr(config, "num_key_value_heads", None) or heads


@dataclass(frozen=True)
class Blueprint:
    """A family, as data.

    Attributes:
        model_types: of transformers' configs that it is for.
        plan: entries that are added to transformers' own plan, or take the place of its entries.
        heads: of a config: (H, K).
        per_head_inputs: arguments of the attention that are made for all heads at once (alibi),
            with the dim, of size [anything *] H, that heads are in; left alone where it is 1.
        divided: attributes of the attention besides counts of heads that are 1 / t on a rank.
        attention_dropout: names of the modules that drop attention weights, where the attention
            does not go through transformers' interface.
        whole_after: the module after which the model takes for granted that its hidden states have
            the shape of its inputs: from there on every rank has all tokens again.
        why_not_scattered: why its residual stream can't be cut along the sequence.
        query_scale: of (an attention, int64 [s] or [B, s] places of tokens in their document): what
            it multiplies its queries with, fp32 of that shape, where it takes the places from the
            shape of its input, which may be several documents, or a part of a sequence; None:
            nothing.
        why_not: of (config, t): a sentence why it can't be cut so, or None.
    """

    model_types: tuple[str, ...]
    plan: Plan = field(default_factory=dict)
    heads: Callable[[Any], tuple[int, int]] = _heads
    per_head_inputs: Mapping[str, int] = field(default_factory=dict)
    divided: tuple[str, ...] = ()
    attention_dropout: tuple[str, ...] = ()
    whole_after: str | None = None
    why_not_scattered: str | None = None
    query_scale: Callable[[Any, Any], Any] | None = None
    why_not: Callable[[Any, int], str | None] = lambda config, tp: None

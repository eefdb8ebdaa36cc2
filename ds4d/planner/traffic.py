"""What ranks send in a step, by the formulas (shared/formulas.md, 2.4). Pure.

Letters: T tokens of all micro-batches of a step that a rank's cp place has, E hidden size, N = T E e
bytes of their hidden states, t ranks of tp, r places in the ring and u ranks of ulysses (cp = r u),
a attention heads, k key/value heads, d numbers in each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from ds4d.config.layout import ulysses_size
from ds4d.config.types import RunConfig

FP32 = 4  # bytes


@dataclass(frozen=True)
class Held:
    """What one rank has.

    Attributes:
        tokens: T.
        hidden, heads, key_heads, head_dim: E, a, k, d of the whole model; heads 0: not known.
        itemsize: e, of hidden states.
        embedding, head: features of these, E in most models; 0: another stage has them.
        fused: the head computes its loss itself, without logits.
        layers, blocks: how many; a block is an attention or an MLP. Layers 0: not known how often
            they are called.
        boundaries: sends of a hidden state for each micro-batch, there and back.
        onward: those there.
        looks: forward passes of a step that are followed by no backward passes.
        tied: numbers in its copy of a weight that another stage has, too.
        partial: numbers whose gradients are summed over tp once a step.
    """

    tokens: int
    hidden: int
    heads: int
    key_heads: int
    head_dim: int
    itemsize: int
    embedding: int
    head: int
    fused: bool
    layers: int
    blocks: int
    boundaries: int
    onward: int
    looks: int
    tied: int
    partial: int

    @property
    def n(self) -> int:
        return self.tokens * self.hidden * self.itemsize


def bytes_sent(run: RunConfig, held: Held) -> Counter:
    """Bytes that a rank sends at most in a step, by ``comm``'s purposes, each collective taken as a
    ring. What masks and documents save is not counted off; DeepSpeed's own reductions over dp x cp
    and a few numbers for norms are not in it."""
    needs = {OF_LAYERS: held.layers, OF_HEADS: held.heads, OF_LOGITS: held.fused}
    unknown = [what for purposes, has in needs.items() if not has for what in purposes]
    known = (what for what in FORMULAS if what not in unknown)
    return Counter({what: int(FORMULAS[what](run, held)) for what in known})


def _block(run: RunConfig, held: Held) -> float:
    """4 N (t - 1) / t for each block; with the sequence cut 5 N (t - 1) / t; 2 of these there.
    Recomputed whole layers sum the exits of their blocks once more, but for the last."""
    t, cut = run.parallel.tp, run.parallel.sequence_parallel
    passes = held.blocks * ((5 if cut else 4) + 2 * held.looks)
    if run.recompute == "full":
        passes += (held.blocks - held.layers) * (1 if cut else 2)
    return passes * held.n * (t - 1) / t


def _end(has: str, *, there: int) -> Callable[[RunConfig, Held], float]:
    """2 N (t - 1) / t: a sum one way, or, with the sequence cut, a gather and a scattered sum.

    Args:
        there: of the 2, where the sequence is whole; else it is 1.
    """

    def formula(run: RunConfig, held: Held) -> float:
        t = run.parallel.tp
        passes = 2 + held.looks * (1 if run.parallel.sequence_parallel else there)
        return passes * held.tokens * getattr(held, has) * held.itemsize * (t - 1) / t

    return formula


def _loss(run: RunConfig, held: Held) -> float:
    """A maximum and a sum of two numbers for each token; label smoothing sums a third."""
    t, numbers = run.parallel.tp, 3 + (run.training.label_smoothing > 0)
    tokens = held.tokens * (1 + held.looks)
    return numbers * FP32 * tokens * 2 * (t - 1) / t if held.head else 0


def _pipeline(run: RunConfig, held: Held) -> float:
    """N for each boundary and direction; a shard of it where the sequence is cut."""
    parts = run.parallel.tp if run.parallel.sequence_parallel else 1
    return (held.boundaries + held.looks * held.onward) * held.n / parts


def _tied(run: RunConfig, held: Held) -> float:
    """A ring of two; and one of all of dp x cp, where these are more than two."""
    data = run.parallel.dp * run.parallel.cp
    passes = 1 + (2 * (data - 1) / data if data > 2 else 0)
    return held.tied * FP32 * passes


def _partial(run: RunConfig, held: Held) -> float:
    t = run.parallel.tp
    return held.partial * FP32 * 2 * (t - 1) / t


def _ring(run: RunConfig, held: Held) -> float:
    """(r - 1) KV, and again in the backward pass, for they are not kept; KV = 2 T (k / t) d e a
    layer."""
    places = run.parallel.cp // ulysses_size(run.parallel.cp, run.context)
    again = (3 if run.recompute == "full" else 2) + held.looks
    return again * (places - 1) * _keys(run, held)


def _ring_back(run: RunConfig, held: Held) -> float:
    """(r - 1) KV of gradients."""
    places = run.parallel.cp // ulysses_size(run.parallel.cp, run.context)
    return (places - 1) * _keys(run, held)


def _keys(run: RunConfig, held: Held) -> float:
    """Of all layers. Fewer key heads than ranks are repeated."""
    ranks = run.parallel.tp * ulysses_size(run.parallel.cp, run.context)
    shared = max(held.key_heads, min(ranks, held.heads))
    width = 2 * shared / run.parallel.tp * held.head_dim
    return held.layers * held.tokens * width * held.itemsize


def _heads(run: RunConfig, held: Held) -> float:
    """T (a / t) d e (2 + 2 k / a) (u - 1) / u a layer, and as much back."""
    u = ulysses_size(run.parallel.cp, run.context)
    queries = 2 * held.layers * held.tokens * held.heads / run.parallel.tp * held.head_dim
    there = (queries * held.itemsize + _keys(run, held)) * (u - 1) / u
    return there * ((3 if run.recompute == "full" else 2) + held.looks)


FORMULAS: dict[str, Callable[[RunConfig, Held], float]] = {
    "block": _block,
    "embedding": _end("embedding", there=2),
    "head": _end("head", there=0),
    "loss": _loss,
    "pipeline": _pipeline,
    "tied weights": _tied,
    "replicated gradients": _partial,
    "context": _ring,
    "context gradients": _ring_back,
    "heads": _heads,
}
OF_LAYERS = ("block",)
OF_LOGITS = ("head", "loss")
OF_HEADS = ("context", "context gradients", "heads")

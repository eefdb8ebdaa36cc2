"""What ranks of a ring compute together: every visible pair of a query and a key once, no other."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from ds4d.attention import visible
from ds4d.attention.pairs import Pair, Seen, pair
from ds4d.attention.visible import block_mask, blocks
from ds4d.context_parallel import zigzag

S, B = 96, 2
DOCUMENTS = {
    "one": (),
    "two": (50, 46, 96),
    "many": (3, 40, 5, 1, 47, 70, 2, 2, 2, 20),
    "short": (*[4] * 24, *[3] * 32),
}
WINDOWS = (None, 1, 7, 30)
CUTS = {
    "zigzag": zigzag(S, 4),
    "dealt": (
        ((0, 8), (64, 80)), ((8, 16), (80, 96)), ((16, 24), (40, 48), (56, 64)),
        ((24, 40), (48, 56)),
    ),
    "not in order": (((90, 96), (0, 18)), ((40, 50), (18, 32)), ((32, 40), (50, 66)), ((66, 90),)),
}  # fmt: skip


def _seen(lengths, window, general=False, split=False, causal=True) -> Seen:
    return Seen(B, 4, S, causal, window, lengths, general, split)


def _definition(seen: Seen) -> torch.Tensor:
    """bool [B, S, S]"""
    i = torch.arange(S)
    mask = (i <= i[:, None]) if seen.causal else torch.ones(S, S, dtype=torch.bool)
    if seen.window is not None:
        mask = mask & (i > i[:, None] - seen.window)
    mask = mask.expand(B, S, S)
    if seen.lengths:
        lengths = torch.tensor(seen.lengths)
        ids = torch.arange(len(lengths)).repeat_interleave(lengths).view(B, S)
        mask = mask & (ids[:, :, None] == ids[:, None, :])
    return mask & _odd(mask) if seen.general else mask


def _odd(mask: torch.Tensor) -> torch.Tensor:
    i = torch.arange(S)
    return (i[:, None] + 2 * i) % 3 != 0


def _general(seen: Seen):
    def general(rows, queries, keys):
        whole = _odd(_definition(seen._replace(general=False))) & _definition(
            seen._replace(general=False, lengths=())
        )
        return whole[slice(*rows), None, slice(*queries), slice(*keys)]

    return general


def _held(spans) -> torch.Tensor:
    return torch.cat([torch.arange(*span) for span in spans])


def _counted(found: Pair, queries, keys, seen: Seen) -> torch.Tensor:
    """int [B, S, S]: how often each pair of tokens is computed."""
    q_tokens = _held(queries)
    k_tokens = _held(keys)
    k_tokens = torch.cat([k_tokens[start:stop] for start, stop in [*found.keys, (0, 0)]])
    counts = torch.zeros(B, S, S, dtype=torch.int)
    general = _general(seen) if seen.general else None
    for block in found.blocks:
        q, k = q_tokens[slice(*block.queries)], k_tokens[slice(*block.keys)]
        mask = block_mask(block, general, torch.device("cpu"))
        mask = torch.ones(len(q), len(k), dtype=torch.bool) if mask is None else mask
        mask = mask.broadcast_to(block.rows[1] - block.rows[0], 1, len(q), len(k))[:, 0]
        counts[slice(*block.rows), q[:, None], k] += mask.int()
    return counts


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    for cached in (pair, blocks):
        cached.cache_clear()
    monkeypatch.setattr(visible, "SCORES", 2**13)
    yield
    for cached in (pair, blocks):
        cached.cache_clear()


CASES = list(itertools.product(CUTS, DOCUMENTS, WINDOWS, (False, True), (False, True)))


@pytest.mark.parametrize("cut, documents, window, general, split", CASES)
def test_every_visible_pair_is_computed_once(cut, documents, window, general, split):
    spans = CUTS[cut]
    seen = _seen(DOCUMENTS[documents], window, general, split)
    counts = sum(_counted(pair(q, k, seen), q, k, seen) for q in spans for k in spans)
    assert torch.equal(counts, _definition(seen).int())


@pytest.mark.parametrize("cut, documents, window, general, split", CASES)
def test_with_all_keys_too(cut, documents, window, general, split):
    whole = ((0, S),)
    seen = _seen(DOCUMENTS[documents], window, general, split)
    assert all(pair(q, whole, seen).keys == whole for q in CUTS[cut])  # counted from the first
    counts = sum(_counted(pair(q, whole, seen), q, whole, seen) for q in CUTS[cut])
    assert torch.equal(counts, _definition(seen).int())


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_without_causality(documents):
    spans = CUTS["zigzag"]
    seen = _seen(DOCUMENTS[documents], None, causal=False)
    counts = sum(_counted(pair(q, k, seen), q, k, seen) for q in spans for k in spans)
    assert torch.equal(counts, _definition(seen).int())


@pytest.mark.parametrize("seed", range(40))
def test_any_cut_and_any_documents(seed):
    pick = random.Random(seed)
    places = pick.choice([2, 3, 4])
    borders = sorted(pick.sample(range(1, S), pick.randint(places, 11)))
    stretches = list(zip([0, *borders], [*borders, S]))
    pick.shuffle(stretches)
    spans = [tuple(stretches[place::places]) for place in range(places)]
    lengths = ()
    if pick.random() < 0.8:
        lengths = tuple(
            b - a for _ in range(B)
            for a, b in itertools.pairwise(
                [0, *sorted(pick.sample(range(1, S), pick.randint(0, 12))), S]
            )
        )  # fmt: skip
    seen = _seen(lengths, pick.choice([None, 1, 3, 20, 200]), pick.random() < 0.3)
    counts = sum(_counted(pair(q, k, seen), q, k, seen) for q in spans for k in spans)
    assert torch.equal(counts, _definition(seen).int())


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("documents", DOCUMENTS)
@pytest.mark.parametrize("cut", CUTS)
def test_only_keys_that_are_seen_are_sent(cut, documents, window):
    spans, seen = CUTS[cut], _seen(DOCUMENTS[documents], window)
    visible_at_all = _definition(seen).any(0)  # in some row
    for q, k in itertools.permutations(spans, 2):
        wanted = pair(q, k, seen).keys
        held = _held(k)
        sent = [token for start, stop in wanted for token in held[start:stop].tolist()]
        expected = [token for token in held.tolist() if visible_at_all[_held(q), token].any()]
        assert sent == expected


def test_the_first_block_of_a_query_is_marked():
    seen = _seen(DOCUMENTS["many"], 30)
    for spans in CUTS["dealt"]:
        done = set()
        for block in pair(spans, spans, seen).blocks:
            places = {(r, q) for r in range(*block.rows) for q in range(*block.queries)}
            assert block.first == (not places & done)
            done |= places


def test_blocks_are_few_and_large():
    """Under a causal mask: the diagonal, then one rectangle with each other rank (formulas.md 3)."""
    spans = zigzag(S, 4)
    for here, there in itertools.product(range(4), repeat=2):
        found = pair(spans[here], spans[there], _seen((), None))
        (block,) = found.blocks
        size, half = S // 4, S // 8
        expected = {
            True: ((0, size), (0, size)),
            here > there: ((0, size), (0, half)),
            here < there: ((half, size), (0, size)),
        }
        key = (block.queries, block.keys)
        if here == there:
            assert block.is_plain_causal and key == expected[True]
        else:
            assert block.is_whole and key in (expected[here > there], expected[here < there])
            assert key == (((0, size), (0, half)) if here > there else ((half, size), (0, size)))


@pytest.mark.parametrize("ring", [2, 4])
@pytest.mark.parametrize("lengths", [(), (1500, 2596), (100,) * 40 + (96,)], ids=str)
def test_no_two_blocks_of_a_rank_begin_at_the_same_place(ring, lengths):
    """Else they would drop the same weights."""
    cut = zigzag(4096, ring)
    seen = Seen(1, 8, 4096, True, None, lengths, general=False, split=True)
    for here in cut:
        found = [block for there in cut for block in pair(here, there, seen).blocks]
        places = {
            (block.rows[0], block.queries[0] + block.origin[0], block.keys[0] + block.origin[1])
            for block in found
        }
        assert len(places) == len(found) > 1

"""How layers are shared out over the stages of a pipeline (cases B13, F05)."""

from __future__ import annotations

import random
from itertools import combinations, pairwise

import pytest
from transformers import (
    BertLMHeadModel,
    DeepseekV3Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
)

from ds4d.config.load import load
from ds4d.model.config import hf_config
from ds4d.pipeline.actions import Placement
from ds4d.pipeline.costs import (
    BYTES_PER_ELEMENT,
    FLOPS_PER_BYTE,
    ModelCosts,
    model_costs,
)
from ds4d.pipeline.partition import cut, even_ranks, make_split, split_of
from ds4d.pipeline.stack import layer_stack
from tests.unit.config_files import changed
from tests.unit.model_families import FAMILIES, fields

SIZES = dict(
    vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip


def counts(bounds) -> list[int]:
    return [stop - start for start, stop in bounds]


# -- the cut ----------------------------------------------------------------------------------


def best_by_trying(costs, parts, first, last):
    """(largest, sum of squares, starts and end) of the best of all cuts."""
    tried = []
    for inner in combinations(range(1, len(costs)), parts - 1):
        ends = [0, *inner, len(costs)]
        pieces = [sum(costs[start:stop]) for start, stop in pairwise(ends)]
        pieces[0] += first
        pieces[-1] += last
        tried.append((max(pieces), sum(piece**2 for piece in pieces), ends))
    return min(tried)


def loads(bounds, costs, placement, first, last):
    pieces = [sum(costs[start:stop]) for start, stop in bounds]
    pieces[0] += first
    pieces[-1] += last
    of_rank = [0.0] * placement.ranks
    for place, piece in zip(placement.places, pieces, strict=True):
        of_rank[place.rank] += piece
    return max(of_rank)


def test_the_chunks_of_a_rank_are_weighed_together():
    draw = random.Random(0)
    best = 0
    for _ in range(200):
        placement = draw.choice([Placement.loop(2, 2), Placement.vee(2), Placement.loop(2, 3)])
        costs = [draw.choice([1, 2]) for _ in range(draw.randint(placement.stages, 9))]
        ends = dict(first=draw.choice([0, 0.5]), last=draw.choice([0, 2]))
        even = cut(costs, placement.stages, **ends)
        found = even_ranks(even, costs, placement, **ends)
        assert sum(counts(found)) == len(costs) and min(counts(found)) > 0
        assert [stop for _, stop in found[:-1]] == [start for start, _ in found[1:]]
        before, after = (loads(b, costs, placement, *ends.values()) for b in (even, found))
        assert after <= before
        every = combinations(range(1, len(costs)), placement.stages - 1)
        tried = [tuple(pairwise([0, *inner, len(costs)])) for inner in every]
        best += after == min(loads(b, costs, placement, *ends.values()) for b in tried)
    assert best >= 180  # edges moved one at a time mostly find what is best


def test_no_cut_is_better():
    draw = random.Random(0)
    for _ in range(1000):
        costs = [draw.choice([0.5, 1, 2, 3]) for _ in range(draw.randint(1, 9))]
        parts = draw.randint(1, len(costs))
        first, last = draw.choice([0, 1, 5]), draw.choice([0, 2, 30])
        found = cut(costs, parts, first=first, last=last)
        ends = best_by_trying(costs, parts, first, last)[-1]
        assert [0, *(stop for _, stop in found)] == ends, (costs, parts, first, last)


@pytest.mark.parametrize("count", range(1, 41))
def test_every_layer_once_and_equal_layers_evenly(count):
    for parts in range(1, count + 1):
        found = cut([0.1] * count, parts)  # sums of 0.1 are not what they seem
        assert [layer for piece in found for layer in range(*piece)] == list(range(count))
        sizes = counts(found)
        assert len(found) == parts and min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
        assert sizes == sorted(sizes)  # the first stages hold the most activations


@pytest.mark.parametrize("count, parts", [(3, 4), (1, 2), (0, 1)])
def test_an_empty_stage_is_refused(count, parts):
    with pytest.raises(ValueError, match=f"{count} layers cannot fill {parts} stages"):
        cut([1.0] * count, parts)


def test_a_large_cut_is_quick_and_exact():
    costs = [1e13 + index % 3 * 1e12 / 7 for index in range(200)]
    for parts in (4, 67, 200):
        found = cut(costs, parts, first=1e15, last=1e14)
        assert found[0] == (0, 1) and sum(counts(found)) == 200 and len(found) == parts


# -- the costs --------------------------------------------------------------------------------


def test_a_layer_costs_its_flops_and_bytes():
    h, f, s, kv = 64, 128, 32, 32
    costs = model_costs(LlamaConfig(**SIZES), seq_len=s)
    matrices = [(h, h), (kv, h), (kv, h), (h, h), (f, h), (f, h), (h, f)]
    flops = sum(2 * s * rows * columns for rows, columns in matrices)
    attention = 4 * h * s**2 / 2
    moved = sum(rows * columns + s * (rows + columns) for rows, columns in matrices)
    expected = flops + attention + moved * BYTES_PER_ELEMENT * FLOPS_PER_BYTE
    assert costs.layers == pytest.approx([expected] * 4, rel=1e-12)
    assert costs.path == "model.layers"


@pytest.mark.parametrize("tied", [False, True])
def test_head_and_embedding(tied):
    h, v, s = 64, 128, 32
    costs = model_costs(LlamaConfig(**SIZES, tie_word_embeddings=tied), seq_len=s)
    per_element = BYTES_PER_ELEMENT * FLOPS_PER_BYTE
    assert costs.first == (v * h + 2 * h * s) * per_element
    assert costs.last == 2 * h * v * s + (v * h + (h + v) * s) * per_element


def test_learned_positions_are_looked_up_too():
    sizes = dict(hidden_size=64, num_attention_heads=4, ffn_dim=128, num_hidden_layers=2)
    config = OPTConfig(**sizes, vocab_size=128, word_embed_proj_dim=64, max_position_embeddings=32)
    assert model_costs(config, seq_len=8).first > model_costs(LlamaConfig(**SIZES), seq_len=8).first


def test_the_embedding_is_small_in_a_large_model():
    config = LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=4,
        num_attention_heads=64, num_key_value_heads=8,
    )  # fmt: skip
    costs = model_costs(config, seq_len=8192)
    assert 0 < costs.first < 0.05 * costs.layers[0]
    assert 1.0 < costs.last / costs.layers[0] < 1.3  # by FLOPs alone 1.07


def test_a_larger_micro_batch_reads_the_weights_once():
    one, two = (model_costs(LlamaConfig(**SIZES), seq_len=8, sequences=n) for n in (1, 2))
    assert one.first < two.first < 2 * one.first
    assert one.layers[0] < two.layers[0] < 2 * one.layers[0]


def test_full_recompute_repeats_layers_and_not_the_head():
    plain, selective, full = (
        model_costs(LlamaConfig(**SIZES), seq_len=8, recompute=kind)
        for kind in ("none", "selective", "full")
    )
    assert selective == plain
    assert full.layers == pytest.approx([cost * 4 / 3 for cost in plain.layers])
    assert (full.first, full.last) == (plain.first, plain.last)


def test_only_visited_experts_count_and_dense_layers_differ():
    sizes = dict(
        **{**SIZES, "num_key_value_heads": 4}, moe_intermediate_size=64, n_routed_experts=8,
        n_shared_experts=1, first_k_dense_replace=2, n_group=1, topk_group=1, q_lora_rank=None,
        kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16,
    )  # fmt: skip
    one, two = (
        model_costs(DeepseekV3Config(**sizes, num_experts_per_tok=n), seq_len=1024) for n in (1, 2)
    )
    dense, expert = one.layers[0], one.layers[2]
    assert one.layers == (dense, dense, expert, expert) and dense != expert
    assert two.layers[:2] == one.layers[:2]
    products = 3 * 64 * 64 * 2 * 1024
    features = 1024 * (64 + 128 + 64 + 64) * BYTES_PER_ELEMENT * FLOPS_PER_BYTE
    assert two.layers[2] - expert == pytest.approx(products + features)


def pairs_by_hand(s: int, window: int) -> float:
    return window * s - window**2 / 2


@pytest.mark.parametrize("s", [16, 64])
def test_windows(s):
    """Each of mistral's layers slides; of gemma 3's, those that layer_types says."""
    pair = 4 * 64
    wide, narrow = (
        model_costs(MistralConfig(**SIZES, sliding_window=window), seq_len=s)
        for window in (None, 32)
    )
    saved = pairs_by_hand(s, s) - pairs_by_hand(s, min(s, 32))
    assert wide.layers[0] - narrow.layers[0] == pytest.approx(pair * saved, abs=1e-3)
    kinds = ["sliding_attention", "full_attention"] * 2
    mixed = model_costs(
        Gemma3TextConfig(**SIZES, head_dim=16, sliding_window=8, layer_types=kinds), seq_len=s
    ).layers
    saved = pairs_by_hand(s, s) - pairs_by_hand(s, 8)
    assert mixed[1] - mixed[0] == mixed[3] - mixed[2] == pytest.approx(pair * saved)


def test_heads_of_other_sizes_in_some_layers():
    """Gemma 4's full attention has larger heads than its sliding one."""
    sizes = {**SIZES, "vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 0}
    config = Gemma4TextConfig(
        **sizes, head_dim=16, global_head_dim=32, num_kv_shared_layers=0, sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    short, long = (model_costs(config, seq_len=s).layers for s in (2, 4))
    # attention grows with the square: what is left of four times the cost of half the tokens
    quadratic = [(b - 2 * a) for a, b in zip(short, long, strict=True)]
    difference = quadratic[1] - quadratic[0]
    weights = 64 * (2 * 4 * 16 + 2 * 2 * 16)  # read once, however many tokens
    assert difference == pytest.approx(
        2 * 4 * (32 - 16) * 2 * (4**2 - 2 * 2**2) / 2 - weights * BYTES_PER_ELEMENT * FLOPS_PER_BYTE
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_stack_of_equal_layers(family):
    config = load(changed(ds4d__model__config=file_fields(family), ds4d__data__packing="none"))
    costs = model_costs(hf_config(config.model), seq_len=16)
    assert len(costs.layers) == 2 and costs.layers[0] == costs.layers[1] > 0
    assert costs.first > 0 and costs.last > 0


def file_fields(family: str) -> dict:
    sized = {"model_type": family.removesuffix("-tied"), "vocab_size": 512}
    return {**fields(family), **sized}


def test_a_model_without_a_stack_is_refused_in_words():
    from transformers import BertConfig

    config = BertConfig(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, is_decoder=True)
    model = BertLMHeadModel(config)
    assert layer_stack(model)[0] == "bert.encoder.layer"
    model.bert.encoder.layer = model.bert.encoder.layer[0]
    with pytest.raises(ValueError, match="bert has no list of num_hidden_layers modules"):
        layer_stack(model)


# -- the split --------------------------------------------------------------------------------

EQUAL = ModelCosts("model.layers", (1.0,) * 8, first=0.5, last=1.5)


def test_what_a_split_tells():
    split = make_split(EQUAL, Placement.loop(2, 2))
    assert split.counts == (2, 2, 3, 1) and split.bounds[2] == (4, 7)
    assert split.costs == (2.5, 2.0, 3.0, 2.5)
    assert split.rank_costs == (5.5, 4.5)
    assert split.imbalance == pytest.approx(5.5 / 5.0 - 1)
    folded = make_split(EQUAL, Placement.vee(2))
    assert folded.rank_costs == (5.0, 5.0) and folded.imbalance == 0


def pipeline(pp: int, layers: int, **more) -> dict:
    return changed(
        **{
            "ds4d__parallel": {"pp": pp}, "ds4d__model__config__num_hidden_layers": layers,
            "gradient_accumulation_steps": 2 * pp, **more,
        }
    )  # fmt: skip


def file_split(*args, **more):
    run = load(pipeline(*args, **more))
    return split_of(run, hf_config(run.model, vocab_size=512))


def test_30_layers_on_4_ranks():
    split = file_split(4, 30)
    assert sum(split.counts) == 30 and set(split.counts) == {7, 8}


def test_5_layers_in_2_chunks_on_2_ranks():
    split = file_split(2, 5, ds4d__pipeline={"schedule": "interleaved", "chunks": 2})
    assert sorted(split.counts) == [1, 1, 1, 2]


def test_a_huge_vocabulary_makes_the_ends_lighter():
    sizes = {"ds4d__data__tokenizer": {"vocab_size": 200_000}}
    first, *middle, last = file_split(4, 24, **sizes).counts
    assert first < min(middle) and last == 1
    plain = file_split(4, 24).counts
    assert max(plain) - min(plain) <= 1


def test_recompute_gives_layers_back_to_the_last_stage():
    """The head weighs less beside layers that are computed twice."""
    sizes = {"ds4d__data__tokenizer": {"vocab_size": 20_000}}
    plain = file_split(2, 24, **sizes).counts
    recomputed = file_split(2, 24, **sizes, ds4d__recompute="full").counts
    assert plain[1] < recomputed[1] < 12


def test_dense_layers_before_experts():
    """Stages of one cost, not of one number."""
    heavy = ModelCosts("model.layers", (3.0, 3.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0), 0.0, 0.0)
    assert make_split(heavy, Placement.loop(2, 1)).counts == (2, 6)

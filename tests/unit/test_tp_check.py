"""What can't be cut over tp ranks is refused before anything starts, in words that help."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds4d.config.errors import ConfigError
from ds4d.config.load import load
from ds4d.tensor_parallel.arrange import kv_heads_of
from ds4d.tensor_parallel.shard import Shard, even, packed
from tests.tp_families import COMMON, FAMILIES, OWN_ATTENTION
from tests.unit.config_files import changed

ROOT = Path(__file__).resolve().parents[2]
SIZES = {name: value for name, value in COMMON.items() if not name.endswith("token_id")}


def file(model: dict, tp: int, *, parallel: dict | None = None, **more) -> dict:
    return changed(
        ds4d__model={"config": {**model, "vocab_size": 512}},
        ds4d__parallel={"tp": tp, **(parallel or {})},
        **{"ds4d__data__packing": "concat", "ds4d__data__seq_len": 32, **more},
    )


def problems(model: dict, tp: int, **more) -> str:
    with pytest.raises(ConfigError) as refused:
        load(file(model, tp, **more))
    return str(refused.value)


@pytest.mark.parametrize(
    "heads, kv_heads, tp, works",
    [(14, 2, 4, "1, 2, 7, 14"), (10, 5, 4, "1, 2, 5, 10"), (9, 3, 2, "1, 3, 9")],
)
def test_heads_that_do_not_divide(heads, kv_heads, tp, works):
    """Case B01: the sentence names heads, key/value heads, tp and what works."""
    config = {
        **SIZES, "model_type": "llama", "hidden_size": 8 * heads, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
    }  # fmt: skip
    message = problems(config, tp)
    assert f"tp: {tp}: this llama has {heads} heads and {kv_heads} key/value heads" in message
    assert message.endswith(f"tp can be {works}")


@pytest.mark.parametrize(
    "config, tp, words",
    [
        ({"model_type": "mamba", "hidden_size": 32, "vocab_size": 96}, 2,
         "model_type mamba has no tensor-parallel plan in transformers and no family file in ds4d; "
         "add a blueprint"),
        ({**SIZES, "model_type": "mixtral", "intermediate_size": 55, "num_local_experts": 4}, 2,
         "experts.gate_up_proj of this mixtral has 55 inner features, which do not divide by 2"),
        ({**SIZES, "model_type": "phi3", "intermediate_size": 55, "pad_token_id": 0}, 2,
         "mlp.gate_up_proj of this phi3 has 55 output features in each of its two blocks"),
        ({**SIZES, "model_type": "stablelm", "qk_layernorm": True}, 2, "qk_layernorm: true"),
        ({**SIZES, "model_type": "mixtral", "router_jitter_noise": 0.1}, 2, "router_jitter_noise"),
        ({**SIZES, "model_type": "axk1", "n_routed_experts": 4, "num_experts_per_tok": 2,
          "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}, 2,
         "post_mlp_layernorm of this axk1 stands beside experts"),
        ({**SIZES, "model_type": "olmo2"}, 4,
         "q_norm spans them all; tp can be 1, 2"),
        ({**SIZES, "model_type": "cohere", "use_qk_norm": True}, 4,
         "has one entry for each; tp can be 1, 2"),
        ({"model_type": "codegen", "n_embd": 96, "n_head": 12, "n_layer": 2, "rotary_dim": 8,
          "vocab_size": 96, "n_positions": 64}, 3, "tp can be 1, 2 or 4"),
        ({"model_type": "falcon", "hidden_size": 64, "num_attention_heads": 8, "num_kv_heads": 2,
          "new_decoder_architecture": True, "vocab_size": 96}, 4,
         "stand together in groups; tp can be 1, 2"),
        ({**SIZES, "model_type": "gpt2", "n_head": 4, "n_embd": 48, "add_cross_attention": True},
         2, "only self-attention is cut"),
    ],
)  # fmt: skip
def test_what_a_family_can_not_do(config, tp, words):
    config = {k: v for k, v in config.items() if config["model_type"] != "gpt2" or k in GPT2}
    assert words in problems(config, tp)


GPT2 = ("model_type", "n_head", "n_embd", "add_cross_attention", "vocab_size")


def test_a_length_that_rope_depends_on():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = {**FAMILIES["llama"], "rope_parameters": rope}
    assert not load(file(model, 2, ds4d__data__seq_len=33)).parallel.sequence_parallel
    assert load(file(model, 2, ds4d__data__seq_len=32)).parallel.sequence_parallel


@pytest.mark.parametrize("name", ["bloom", "falcon, groups"])
def test_sequence_parallelism_asked_for_where_it_can_not_be(name):
    message = problems(FAMILIES[name], 2, parallel={"sequence_parallel": True})
    assert "ds4d.parallel.sequence_parallel: true: " in message and "set it to false" in message


@pytest.mark.parametrize("name", FAMILIES)
def test_by_default_it_is_on_where_the_family_allows(name):
    run = load(file(FAMILIES[name], 3 if "9 heads" in name else 2))
    assert run.parallel.sequence_parallel == (name not in OWN_ATTENTION)
    told = any('sequence_parallel: "auto" is false here: ' in note for note in run.notes)
    assert told == (name in OWN_ATTENTION)


def test_zero_options_that_join_neighbouring_ranks():
    message = problems(
        FAMILIES["llama"], 2, zero_optimization={"stage": 3, "zero_hpz_partition_size": 2}
    )
    assert "zero_hpz_partition_size: 2 can't go with ds4d.parallel.tp 2" in message


def test_padding_needs_positions_too():
    """Learned ones; rotary positions go on."""
    model = {**FAMILIES["gpt2"], "n_positions": 33}
    asked = {"parallel": {"sequence_parallel": True}, "ds4d__data__seq_len": 33}
    assert "33 would be padded to 34, past 33 positions" in problems(model, 2, **asked)
    for name, expected in (("gpt2", False), ("llama", True)):
        sizes = {"gpt2": "n_positions", "llama": "max_position_embeddings"}
        run = load(file({**FAMILIES[name], sizes[name]: 33}, 2, ds4d__data__seq_len=33))
        assert run.parallel.sequence_parallel == expected


@pytest.mark.parametrize(
    "heads, kv_heads, ranks, expected",
    [
        (4, 2, 2, [(0,), (1,)]),
        (4, 1, 4, [(0,), (0,), (0,), (0,)]),
        (8, 2, 4, [(0,), (0,), (1,), (1,)]),
        (10, 5, 2, [(0, 0, 1, 1, 2), (2, 3, 3, 4, 4)]),
        (12, 4, 6, [(0,), (0, 1), (1,), (2,), (2, 3), (3,)]),
        (9, 3, 3, [(0,), (1,), (2,)]),
    ],
)
def test_the_key_heads_that_a_rank_looks_at(heads, kv_heads, ranks, expected):
    assert [kv_heads_of(heads, kv_heads, rank, ranks) for rank in range(ranks)] == expected


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7])
def test_stretches_cover_everything_once(ranks):
    shards = [even(0, 101, rank, ranks, padded=True) for rank in range(ranks)]
    assert [i for s in shards for a, b in s.ranges for i in range(a, b)] == list(range(101))
    assert len({s.local_size for s in shards}) == 1
    blocks = [packed(0, (4 * ranks, 2 * ranks), rank, ranks) for rank in range(ranks)]
    assert sorted(i for s in blocks for a, b in s.ranges for i in range(a, b)) == list(
        range(6 * ranks)
    )


def test_where_a_part_of_a_shard_lies():
    shard = Shard(0, 12, ((2, 4), (8, 11)), padding=1)
    assert list(shard.pieces(0, 6)) == [(0, 2, 2), (2, 8, 3)]
    assert list(shard.pieces(1, 2)) == [(0, 3, 1), (1, 8, 1)]
    assert list(shard.pieces(5, 1)) == []


def test_the_readme_shows_a_family_file_as_it_is():
    assert (ROOT / "models/persimmon.py").read_text() in (ROOT / "README.md").read_text()

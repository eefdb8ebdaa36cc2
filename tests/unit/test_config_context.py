"""Sharing sequences in the file: what is refused, what is resolved, what ``ds4d check`` shows."""

from __future__ import annotations

import pytest

from ds4d.config.load import load
from ds4d.config.report import as_dict, as_text
from tests.unit.config_files import changed, problems


def file(cp: int, method: str | None = None, ulysses: int | None = None, **more) -> dict:
    context = {"method": method, "ulysses_size": ulysses}
    return changed(
        ds4d__parallel={"cp": cp},
        ds4d__context={key: value for key, value in context.items() if value is not None},
        **more,
    )


def heads(number: int, keys: int) -> dict:
    return {
        "ds4d__model__config__num_attention_heads": number,
        "ds4d__model__config__hidden_size": 8 * number,
        "ds4d__model__config__num_key_value_heads": keys,
    }


REFUSED = {
    "heads that do not divide": (
        file(4, "ulysses", **heads(6, 6)),
        {"ds4d.context.method": "4 ranks can't share 6 attention heads evenly; set "
                                'ds4d.context.method "hybrid" with ds4d.context.ulysses_size 2'},
    ),
    "heads that nobody can share": (
        file(2, "ulysses", **heads(9, 3)),
        {"ds4d.context.method": "2 ranks can't share 9 attention heads evenly; set "
                                'ds4d.context.method "ring"'},
    ),
    "heads of a tp rank": (
        file(4, "ulysses", ds4d__parallel__tp=2, **heads(4, 2)),
        {"ds4d.context.method": "4 ranks can't share 4 / ds4d.parallel.tp 2 = 2 attention heads"},
    ),
    "hybrid of a prime": (
        file(3, "hybrid"),
        {"ds4d.context.method": '"hybrid": ds4d.parallel.cp 3 is no product of two; use "ring"'},
    ),
    "hybrid that does not go in": (
        file(8, "hybrid", 3),
        {"ds4d.context.ulysses_size": "3 does not go into ds4d.parallel.cp 8: it can be 2 or 4"},
    ),
    "hybrid with heads that do not divide": (
        file(8, "hybrid", 4, **heads(6, 2)),
        {"ds4d.context.ulysses_size": "4 ranks can't share 6 attention heads evenly; set "
                                      'ds4d.context.method "hybrid" with ds4d.context.ulysses_size'
                                      " 2"},
    ),
    "hybrid without any size": (
        file(4, "hybrid", **heads(9, 3)),
        {"ds4d.context.method": '"hybrid": no part of ds4d.parallel.cp 4 shares the 9 attention'},
    ),
    "a size for another method": (
        file(4, "ring", 2),
        {"ds4d.context.ulysses_size": '2 is for ds4d.context.method "hybrid", not "ring"'},
    ),
    "a model with a state": (
        file(2, ds4d__model={"config": {"model_type": "mamba"}}, ds4d__data__packing="concat"),
        {"ds4d.parallel.cp": "2: MambaForCausalLM has its own attention code"},
    ),
    "a model with convolutions beside attention": (
        file(
            2,
            ds4d__model={"config": {"model_type": "recurrent_gemma"}},
            ds4d__data__packing="concat",
        ),
        {"ds4d.parallel.cp": "2: model_type recurrent_gemma is another model on parts of a sequence"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    content, expected = REFUSED[case]
    found = problems(content)
    assert found.keys() == expected.keys()
    for key, text in expected.items():
        assert text in found[key]


@pytest.mark.parametrize(
    "cp, method, asked, resolved, ring, ulysses",
    [
        (4, "ring", None, None, [[0, 1, 2, 3]], [[0], [1], [2], [3]]),
        (4, "ulysses", None, None, [[0], [1], [2], [3]], [[0, 1, 2, 3]]),
        (4, "hybrid", None, 2, [[0, 2], [1, 3]], [[0, 1], [2, 3]]),
        (8, "hybrid", None, 4, [[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (8, "hybrid", 2, 2, [[0, 2, 4, 6], [1, 3, 5, 7]], [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_groups(cp, method, asked, resolved, ring, ulysses):
    run = load(file(cp, method, asked, **heads(8, 2)), world_size=cp)
    assert run.context.ulysses_size == resolved
    groups = as_dict(run)["groups"]
    assert (groups["ring"], groups["ulysses"]) == (ring, ulysses)


@pytest.mark.parametrize(
    "method, text",
    [
        ("ring", "ring of 4 ranks, 26 of 101 tokens each, padded to 104"),
        ("ulysses", "4 ranks exchange heads, 26 of 101 tokens each, padded to 104"),
        ("hybrid", "ring of 2 groups of 2 ranks that exchange heads, 26 of 101 tokens each"),
    ],
)
def test_what_check_shows(method, text):
    run = load(file(4, method, ds4d__data__seq_len=101), world_size=4)
    assert f"context    {text}" in as_text(run)


def test_sizes_without_effect_are_noted():
    run = load(file(1, "ulysses"), world_size=1)
    assert "ds4d.context.method has no effect: ds4d.parallel.cp is 1" in run.notes


@pytest.mark.parametrize(
    "cp, length, method, asked, exchange",
    [
        (2, 64, "ring", None, "p2p"),
        (4, 64, "ring", None, "all_gather"),
        (4, 2048, "ring", "auto", "all_gather"),
        (4, 2049, "ring", None, "p2p"),
        (4, 64, "ring", "p2p", "p2p"),
        (4, 64, "hybrid", None, "p2p"),
        (2, 64, "ring", "all_gather", "all_gather"),
    ],
)
def test_how_keys_travel(cp, length, method, asked, exchange):
    content = file(
        cp,
        method,
        ds4d__data__seq_len=length,
        ds4d__model__config__max_position_embeddings=4096,
        **({} if asked is None else {"ds4d__context__exchange": asked}),
    )
    assert load(content, world_size=cp).context.exchange == exchange

"""A part of the zoo: types that have each needed something. docs/zoo.md says what comes out, so that
the page stays true; ``python -m tests.zoo`` tries all types and writes it."""

from __future__ import annotations

import pytest

from tests.harness import ROOT
from tests.zoo.table import read
from tests.zoo.trials import EXACT, REFUSED, try_type

PAGE = read((ROOT / "docs" / "zoo.md").read_text())
SOME = {
    "axk2": ["1 rank"],  # an indexer that picks keys, and learns nothing
    "bart": ["tp 2", "pp 2"],  # attention to an encoder that is not there
    "bert": ["tp 2", "pp 2"],  # rows behind the attention; a head's bias in two places
    "biogpt": ["tp 2", "cp 2"],  # its tokenizer wants a package
    "blt": ["1 rank"],  # frozen weights, queries that see joined tokens
    "ctrl": ["tp 2"],  # an attention that is given its input three times
    "deepseek_v4": ["1 rank", "tp 2"],  # keys that are made of several tokens
    "doge": ["1 rank"],  # learned masks
    "dory": ["cp 2"],  # vectors that begin with small numbers
    "dots3_note_text": ["tp 2"],  # heads that differ from layer to layer
    "emu3": ["tp 2"],  # a text model's own config
    "fuyu": ["tp 2", "pp 2"],
    "gemma3n_text": ["tp 2", "cp 2"],  # gates that are cut off by the mean of all
    "gemma4_assistant": ["1 rank"],  # no model by itself
    "git": ["1 rank", "pp 2"],  # a table of its own for attention
    "glm4_moe_lite": ["tp 2"],  # a shared expert that no plan has
    "got_ocr2": ["pp 2"],  # a vision tower with parameters of its own
    "inkling_text": ["pp 2"],  # weights that stay in fp32
    "inkling2_text": ["tp 2", "pp 2"],  # a norm in the embedding; a plan that cuts across halves
    "llama4_text": ["pp 2", "cp 2"],  # queries scaled by places in documents
    "lfm2": ["tp 2"],  # convolutions beside attention
    "minimax_m3_vl_text": ["tp 2"],
    "modernbert-decoder": ["tp 2", "cp 2"],
    "nemotron_h": ["tp 2", "cp 2"],
    "olmo_hybrid": ["tp 2"],  # attention that is put together again
    "prophetnet": ["1 rank"],
    "qwen3_5_text": ["pp 2"],  # a state that makes much of rounding
}


@pytest.mark.parametrize("name", SOME)
def test_as_the_page_says(name):
    found = {o.column: o for o in try_type(name, SOME[name])}
    assert {column: o.outcome for column, o in found.items()} == {
        column: PAGE[name, column] for column in SOME[name]
    }, [o.why for o in found.values()]


def test_the_page_has_no_third_value():
    assert set(PAGE.values()) == {EXACT, REFUSED}

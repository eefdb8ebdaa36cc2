"""Packed documents: attention stays inside each of them, exactly (cases B08 and B11)."""

import pytest
import torch

from ds4d.attention.documents import PADDING, Documents
from ds4d.attention.mask import LazyMask
from tests.unit.attention_models import (
    CONFIGS,
    assert_same_gradients,
    build,
    config,
    gradients,
    loss_of,
    tokens,
)

# Rows of document lengths: tiny neighbours (which share a block), long ones, one that fills a row.
ROWS = [[24, 40], [3, 1, 5, 2, 9, 4, 17, 1, 22], [64]]
LENGTH = 64


def _ids(rows: list[list[int]]) -> torch.Tensor:
    return torch.stack(
        [torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in rows]
    )


def _positions(rows: list[list[int]]) -> torch.Tensor:
    return torch.stack([torch.cat([torch.arange(n) for n in row]) for row in rows])


def _packed(rows: list[list[int]]) -> dict:
    documents = Documents.from_ids(_ids(rows))
    return {"position_ids": _positions(rows), "documents": documents, "use_cache": False}


def _pieces(x: torch.Tensor, rows: list[list[int]]) -> list[torch.Tensor]:
    return [piece for row, lengths in zip(x, rows) for piece in row.split(lengths)]


@pytest.mark.parametrize("family", CONFIGS)
def test_each_document_is_as_if_alone(family):
    """Logits and gradients of the packed rows are those of "eager" given one document at a time."""
    ids = tokens(len(ROWS), LENGTH)
    ours, alone = build(config(family), "ds4d").train(), build(config(family), "eager").train()
    counted = _ids(ROWS) == _ids(ROWS).roll(-1, dims=1)
    counted[:, -1] = False
    logits = ours(input_ids=ids, **_packed(ROWS)).logits
    loss_of(logits, ids, counted).backward()
    for piece, expected in zip(_pieces(ids, ROWS), _pieces(logits, ROWS)):
        own = alone(input_ids=piece[None], use_cache=False).logits
        torch.testing.assert_close(expected, own[0], rtol=1e-5, atol=2e-6)
        if len(piece) > 1:
            loss = loss_of(own, piece[None], torch.ones(1, len(piece), dtype=torch.bool))
            (loss * (len(piece) - 1) / counted.sum()).backward()
    assert_same_gradients(gradients(ours), gradients(alone))


@pytest.mark.parametrize("positions", ["restarting", "running on"])
@pytest.mark.parametrize("family", CONFIGS)
def test_changing_one_document_leaves_the_others_bit_for_bit(family, positions):
    """With positions that run on, transformers can't guess the documents: ours must do it."""
    rows = [[24, 40], [13, 5, 6, 40]]
    inputs = _packed(rows)
    if positions == "running on":
        inputs["position_ids"] = torch.arange(LENGTH).expand(2, -1)
    model, ids = build(config(family), "ds4d").eval(), tokens(2, LENGTH)
    changed = ids.clone()
    changed[:, 7] = (ids[:, 7] + 1) % 60 + 3  # in the first document of each row
    before, after = (model(input_ids=x, **inputs).logits for x in (ids, changed))
    for row, first in enumerate((24, 13)):
        assert torch.equal(before[row, first:], after[row, first:])
        assert not torch.equal(before[row, 7:first], after[row, 7:first])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", ["llama_gqa", "mistral", "gemma2", "gpt_oss"])
def test_padding_counts_for_nothing(family, side):
    ids, real = tokens(2, LENGTH), torch.ones(2, LENGTH, dtype=torch.bool)
    real[0, slice(44) if side == "left" else slice(20, None)] = False
    positions = torch.arange(LENGTH).expand(2, -1).clone()
    positions[0] = positions[0].roll(44) if side == "left" else positions[0]
    documents = Documents.from_ids(torch.where(real, 0, PADDING))
    model = build(config(family), "ds4d").eval()
    inputs = {"position_ids": positions, "documents": documents, "use_cache": False}
    logits = model(input_ids=ids, **inputs).logits
    alone = build(config(family), "eager").eval()
    for row in range(2):
        own = alone(input_ids=ids[row : row + 1, real[row]], use_cache=False).logits[0]
        torch.testing.assert_close(logits[row, real[row]], own, rtol=1e-5, atol=2e-6)
    assert logits.isfinite().all()


def test_documents_and_transformers_own_guess_cut_both():
    """Positions restart inside a document: as in plain transformers, attention is cut there too."""
    model, ids = build(config("llama_gqa"), "ds4d").eval(), tokens(1, LENGTH)
    inputs = {"position_ids": _positions([[24, 20, 20]]), "use_cache": False}
    coarse = Documents.from_ids(_ids([[24, 40]]))
    cut = model(input_ids=ids, documents=coarse, **inputs).logits
    assert torch.equal(cut, model(input_ids=ids, **inputs).logits)


@pytest.mark.parametrize("family", CONFIGS)
def test_documents_that_cover_the_positions_are_enough(family, monkeypatch):
    """As the loader makes them: the same attention, without asking the device for the guess."""
    rows = [[24, 20, 20]]
    ids, positions = _ids(rows), _positions(rows)
    assert not Documents.from_ids(_ids([[24, 40]]), positions).covers_positions
    covering = Documents.from_ids(ids, positions)
    assert covering.covers_positions
    model, inputs = build(config(family), "ds4d").eval(), dict(position_ids=positions)
    inputs |= {"input_ids": tokens(1, LENGTH), "use_cache": False}
    expected = model(documents=Documents.from_ids(ids), **inputs).logits
    monkeypatch.setattr(LazyMask, "_own_documents", property(lambda self: 1 / 0))
    assert torch.equal(model(documents=covering, **inputs).logits, expected)


def test_an_id_that_comes_back_is_another_document():
    model, ids = build(config("llama_gqa"), "ds4d").eval(), tokens(1, 12)
    inputs = {"position_ids": torch.arange(12)[None], "use_cache": False}
    back = Documents.from_ids(torch.tensor([[5] * 4 + [6] * 4 + [5] * 4]))
    other = Documents.from_ids(torch.tensor([[5] * 4 + [6] * 4 + [7] * 4]))
    logits = [model(input_ids=ids, documents=d, **inputs).logits for d in (back, other)]
    assert torch.equal(*logits)


def test_intersection_of_documents():
    a = Documents.from_ids(torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]]))
    b = Documents.from_ids(torch.tensor([[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1]]))
    both = a.intersect(b)
    assert both.lengths == (2, 1, 3, 4, 2) and both.bounds.tolist() == [0, 2, 3, 6, 10, 12]
    assert a.intersect(Documents.from_ids(torch.zeros(2, 6))) is a


def test_documents_with_a_cache_or_of_another_shape_are_refused():
    model, ids = build(config("llama_gqa"), "ds4d").eval(), tokens(1, 12)
    first = model(input_ids=ids, use_cache=True)
    documents = Documents.from_ids(torch.zeros(1, 12, dtype=torch.long))
    with pytest.raises(ValueError, match="use_cache=False"):
        model(input_ids=ids, cache=first.cache, documents=documents)
    with pytest.raises(ValueError, match=r"\[1, 12\] tokens, but the model was given \[1, 5\]"):
        model(input_ids=ids[:, :5], documents=documents, use_cache=False)

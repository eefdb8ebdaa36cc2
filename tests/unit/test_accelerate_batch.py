"""From the dict of a script to a micro-batch; and what a script gets back."""

from __future__ import annotations

import functools

import pytest
import torch

from ds4d.accelerate import calls
from ds4d.accelerate.batch import micro_batch, refused
from ds4d.accelerate.dealing import Share
from ds4d.accelerate.loader import Item, Window
from ds4d.accelerate.output import WITH_LABELS, Output, Shown, anchor
from ds4d.data.batch import IGNORE

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
LABELS = torch.tensor([[5, 6, 7, 8], [9, 10, IGNORE, IGNORE]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])


def made(*, counts=True, model_type="llama", **inputs):
    return micro_batch({"input_ids": IDS, **inputs}, model_type=model_type, counts=counts)


def test_labels_are_shifted():
    batch = made(labels=LABELS, attention_mask=MASK)
    assert batch.targets.tolist() == [[6, 7, 8, IGNORE], [10, IGNORE, IGNORE, IGNORE]]
    shifted = made(shift_labels=LABELS)
    assert shifted.targets.tolist() == LABELS.tolist()
    assert made().targets.eq(IGNORE).all()


def test_what_others_have_too_is_not_counted():
    batch = made(shift_labels=LABELS, counts=False)
    assert batch.targets.eq(IGNORE).all()
    assert LABELS[1, 0] == 9, "the script's own labels stay"


def test_padding_is_a_document_of_nothing():
    batch = made(attention_mask=MASK)
    assert batch.documents.ids.tolist() == [[0, 0, 0, 0], [0, 0, -1, -1]]
    assert not batch.documents.blind_padding
    assert made(attention_mask=torch.ones_like(MASK)).documents is None
    assert made(attention_mask=MASK.flip(1)).documents.blind_padding


def test_positions_count_up_or_by_the_mask():
    left = MASK.flip(1)
    assert made(attention_mask=left).position_ids.tolist() == [[0, 1, 2, 3]] * 2
    by_mask = made(attention_mask=left, model_type="opt").position_ids
    assert by_mask.tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    given = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])
    assert made(position_ids=given).position_ids.tolist() == given.tolist()


def test_masks_that_are_more_than_padding_are_refused():
    with pytest.raises(ValueError, match="zeros between ones"):
        made(attention_mask=torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]))
    with pytest.raises(ValueError, match="one number a token"):
        made(attention_mask=torch.ones(2, 1, 4, 4))


def test_arguments_that_ask_for_something_else_are_named():
    parameters = {"input_ids": None, "inputs_embeds": None, "token_type_ids": None}
    given = {
        "input_ids": IDS, "token_type_ids": IDS, "id": IDS, "use_cache": True,
        "output_hidden_states": True, "output_attentions": False, "cu_seq_lens_q": IDS,
    }  # fmt: skip
    assert refused(given, parameters) == [
        "token_type_ids", "output_hidden_states", "cu_seq_lens_q"
    ]  # fmt: skip
    assert "cu_seq_lens_q" not in refused(given | {"position_ids": IDS}, parameters)


class _Loader:
    def __init__(self, items):
        self.current = Window(items, last=False)


def test_a_call_is_recognised_by_its_tensors():
    batches = [{"input_ids": IDS + i, "labels": LABELS + i, "id": torch.arange(2)} for i in (0, 1)]
    host = [{key: value.clone() for key, value in batch.items()} for batch in batches]
    items = [Item(h, b, Share(2, None)) for h, b in zip(host, batches)]
    loaders = [_Loader([]), _Loader(items)]
    recognise = functools.partial(calls.recognise, training=True)
    call = recognise({"input_ids": batches[1]["input_ids"]}, loaders)
    assert (call.index, call.last, call.own) == (1, True, False)
    swapped = recognise(
        {"input_ids": batches[0]["input_ids"], "labels": batches[0]["input_ids"]}, loaders
    )
    assert dict(swapped.keys) == {"input_ids": "input_ids", "labels": "input_ids"}
    assert swapped.tensors(1)["labels"] is host[1]["input_ids"], "and so of the other batches"
    own = recognise({"input_ids": batches[0]["input_ids"], "labels": LABELS.clone()}, loaders)
    assert own.own and own.last and len(own.window.items) == 1
    batches[1]["labels"] = LABELS.clone()
    changed = recognise({k: batches[1][k] for k in ("input_ids", "labels")}, loaders)
    assert changed.own, "the script has put another tensor in the batch"
    batches[0]["labels"][0, 0] = 3
    written = recognise({k: batches[0][k] for k in ("input_ids", "labels")}, loaders)
    assert written.own and written.tensors(0)["labels"][0, 0] == 3, "or written into one"


def test_an_output_is_what_transformers_gives():
    asked = []

    def logits():
        asked.append(True)
        return torch.ones(1)

    output = Output(torch.tensor(2.0), logits)
    assert output.loss is output["loss"] is output[0] and not asked
    assert isinstance(output, dict) and "loss" in output and output.past_key_values is None
    assert output.logits is output["logits"] is output[1] and len(asked) == 1
    loss, last = output.to_tuple()
    assert loss == 2 and last is output.logits
    assert [key for key, _ in output.items()] == ["loss", "logits"]
    bare = Output(None, logits)
    assert bare.loss is None and bare[0] is bare.logits and "loss" not in bare
    with pytest.raises(AttributeError):
        output.nonsense


def test_logits_beside_a_loss_say_why_they_have_no_gradient():
    logits = Shown.apply(torch.ones(2), anchor(torch.device("cpu")))
    with pytest.raises(RuntimeError, match="without labels"):
        logits.sum().backward()
    assert "labels" in WITH_LABELS

"""Every packing and every policy for long documents: nothing lost without a count, and no target
or attention across documents. The reference is the text tokenised in one go."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch

from ds4d.config.types import SourceConfig
from ds4d.data import pack, tokenise
from ds4d.data.batch import IGNORE
from ds4d.data.errors import DataError
from ds4d.data.prepare import describe, prepare
from ds4d.data.sources import Document
from tests.unit.data_cases import prepare_tokens, prose, run_config, write_lines

LENGTHS = [1, 3, 60, 5, 700, 0, 33, 12, 2, 250]  # words a document


@pytest.fixture(scope="module")
def texts():
    return [prose(words, seed) for seed, words in enumerate(LENGTHS)]


def prepared(tmp_path, texts, **data):
    path = write_lines(tmp_path / "a.jsonl", [{"text": text} for text in texts])
    source = SourceConfig(type="jsonl", path=str(path))
    return prepare(run_config(tmp_path / "cache", source, **data), progress=False)


def reference(data, texts) -> list[list[int]]:
    """Ids a document, as Hugging Face gives them."""
    eos = data.tokenizer.eos_token_id
    return [data.tokenizer(text)["input_ids"] + [eos] for text in texts if text]


def targets_of(store) -> Counter:
    """(token, its target) of all samples."""
    pairs = Counter()
    for sample in map(store.__getitem__, range(len(store))):
        counted = sample.targets != IGNORE
        pairs.update(zip(sample.input_ids[counted].tolist(), sample.targets[counted].tolist()))
    return pairs


def runs(sample) -> list[tuple[list[int], list[int]]]:
    """(ids, positions) of each document of a sample."""
    ids = sample.document_ids
    ids = torch.zeros_like(sample.input_ids) if ids is None else ids
    return [
        (sample.input_ids[ids == i].tolist(), sample.position_ids[ids == i].tolist())
        for i in ids.unique().tolist()
        if i >= 0
    ]


@pytest.mark.parametrize("packing", ["documents", "none"])
@pytest.mark.parametrize("policy", ["split", "truncate", "drop"])
def test_documents_in_and_out(tmp_path, texts, packing, policy):
    data = prepared(tmp_path, texts, packing=packing, long_documents=policy)
    documents = reference(data, texts)
    keep_of_long = {"split": None, "truncate": 32, "drop": 0}[policy]
    kept = [document[:keep_of_long] if len(document) > 32 else document for document in documents]
    kept = [document for document in kept if document]

    report = data.report["train"]
    assert report["documents"] == len(texts) and report["empty_documents"] == 1
    assert report["tokens"] == sum(map(len, documents))
    assert report["kept_tokens"] == sum(map(len, kept))
    lost = report["tokens"] - report["kept_tokens"]
    assert report["truncated_tokens"] == lost * (policy == "truncate")
    assert report["dropped_tokens"] == lost * (policy == "drop")
    assert (lost > 0) == (policy != "split")

    wanted = Counter(pair for document in kept for pair in zip(document, document[1:]))
    assert targets_of(data.train) == wanted  # so a split loses no target, and none is invented
    assert report["target_tokens"] == sum(wanted.values())

    pieces = Counter()
    for sample in map(data.train.__getitem__, range(len(data.train))):
        found = runs(sample)
        assert packing == "documents" or len(found) == 1
        for ids, positions in found:
            assert positions == list(range(len(ids)))
            pieces[tuple(ids)] += 1
    spans = (range(0, max(len(document) - 1, 1), 32) for document in kept)
    assert pieces == Counter(tuple(d[at : at + 32]) for d, span in zip(kept, spans) for at in span)
    filled = sum(len(ids) * times for ids, times in pieces.items())
    assert report["padding_tokens"] == len(data.train) * 32 - filled


@pytest.mark.parametrize("seq_len", [7, 32, 100])
def test_concat_is_the_stream_cut_every_seq_len(tmp_path, texts, seq_len):
    data = prepared(tmp_path, texts, packing="concat", seq_len=seq_len)
    stream = [token for document in reference(data, texts) for token in document]
    inputs, targets = [], []
    for k in range(len(data.train)):
        sample = data.train[k]
        assert sample.document_ids is None or k == len(data.train) - 1
        counted = sample.targets != IGNORE
        inputs += sample.input_ids[counted].tolist()
        targets += sample.targets[counted].tolist()
        assert sample.position_ids[counted].tolist() == list(range(int(counted.sum())))
    assert inputs == stream[:-1] and targets == stream[1:]
    assert data.report["train"]["kept_tokens"] == len(stream)


def test_a_long_document_can_be_an_error(tmp_path, texts):
    with pytest.raises(DataError, match=r"a.jsonl: line 3: \d+ tokens are more than .*seq_len, 32"):
        prepared(tmp_path, texts, long_documents="error")
    assert prepared(tmp_path, texts[:2], long_documents="error").report["train"]["documents"] == 2


def test_dropping_everything_is_an_error(tmp_path, texts):
    with pytest.raises(DataError, match="all 1 documents .* are longer"):
        prepared(tmp_path, texts[4:5], long_documents="drop")


def test_empty_documents_alone_are_an_error(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).touch()
    source = SourceConfig(type="text", path=str(tmp_path / "*.txt"))
    with pytest.raises(DataError, match="data.train: is empty: no text in 2 documents .*a.txt"):
        prepare(run_config(tmp_path / "cache", source), progress=False)


def test_append_eos_can_be_left_out(tmp_path, texts):
    data = prepared(tmp_path, texts, packing="concat", append_eos=False)
    ids = torch.cat([data.train[i].input_ids for i in range(len(data.train))])
    assert not (ids[: data.report["train"]["tokens"]] == data.tokenizer.eos_token_id).any()
    assert data.report["train"]["tokens"] == sum(len(d) - 1 for d in reference(data, texts))


def test_best_fit_packs_well_in_flat_memory():
    chosen = random.Random(0)
    samples = []
    packer = pack.BestFit(512, samples.append)
    total = 0
    for _ in range(20_000):
        length = min(int(chosen.lognormvariate(5, 1.2)) + 2, 5000)
        packer.add(total, length)
        total += length
        assert len(packer.open) <= packer.OPEN_SAMPLES and len(packer.samples) == len(packer.open)
    packer.finish()
    filled = sum(piece.length for pieces in samples for piece in pieces)
    assert all(sum(piece.length for piece in pieces) <= 512 for pieces in samples)
    assert filled / (512 * len(samples)) > 0.99


def test_a_long_document_is_encoded_in_parts_as_if_whole(tmp_path, texts, monkeypatch):
    data = prepared(tmp_path, texts)
    text = "\n\n\n".join(f"def f{i}(x):\n    return x +  {i}\n" for i in range(300)) + prose(900, 1)
    whole = data.tokenizer(text)["input_ids"] + [data.tokenizer.eos_token_id]
    blocks = [text[i : i + 777] for i in range(0, len(text), 777)]
    monkeypatch.setattr(tokenise, "SEGMENT_CHARS", 200)
    documents = [Document("a", blocks), Document("b", ["x" * 5000])]
    parts = list(tokenise.encode(documents, data.tokenizer, append_eos=True))
    of_a = [part for part in parts if part.where == "a"]
    assert len(of_a) > 50 and [part.last for part in of_a] == [False] * (len(of_a) - 1) + [True]
    assert [token for part in of_a for token in part.ids.tolist()] == whole
    of_b = [token for part in parts if part.where == "b" for token in part.ids.tolist()]
    assert data.tokenizer.decode(of_b) == "x" * 5000 + data.tokenizer.eos_token


def test_what_the_tokenizer_adds_stands_once_at_a_documents_ends(tmp_path, texts, monkeypatch):
    from tokenizers.processors import TemplateProcessing

    tokenizer = prepared(tmp_path, texts).tokenizer
    special = [("<|pad|>", 1), ("<|endoftext|>", 0)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> $A <|endoftext|>", special_tokens=special
    )
    monkeypatch.setattr(tokenise, "SEGMENT_CHARS", 100)
    text = prose(200, 2)
    (document,) = [Document("a", [text])]
    parts = list(tokenise.encode([document], tokenizer, append_eos=True))
    ids = [token for part in parts for token in part.ids.tolist()]
    assert len(parts) > 5 and ids == tokenizer(text)["input_ids"]
    assert ids[0] == 1 and ids[-2:].count(0) == 1 and ids.count(0) == ids.count(1) == 1


# -- samples that come as tokens ---------------------------------------------------------------


def test_labels_are_aligned_with_the_ids_and_shifted_here(tmp_path):
    line = {"input_ids": [5, 6, 7, 8, 9], "labels": [5, -100, 7, 3, -100]}
    data = prepare_tokens(tmp_path, [line])
    sample = data.train[0]
    assert sample.input_ids.tolist() == [5, 6, 7, 8, 9, 0, 0, 0]
    assert sample.targets.tolist() == [IGNORE, 7, 3] + [IGNORE] * 5
    assert sample.document_ids.tolist() == [0] * 5 + [-1] * 3
    assert data.tokenizer is None and data.vocab_size == 64
    assert data.report["train"]["target_tokens"] == 2


def test_without_labels_each_token_predicts_the_next(tmp_path):
    sample = prepare_tokens(tmp_path, [{"input_ids": list(range(8))}]).train[0]
    assert sample.targets.tolist() == [1, 2, 3, 4, 5, 6, 7, IGNORE]
    assert sample.position_ids.tolist() == list(range(8)) and sample.document_ids is None


def test_documents_and_positions_are_taken_as_they_are(tmp_path):
    ids = {"input_ids": [1, 2, 3, 4, 5, 6, 7, 8], "document_ids": [-1, 9, 9, 9, 4, 4, -1, -1]}
    sample = prepare_tokens(tmp_path, [ids]).train[0]
    assert sample.input_ids.tolist() == ids["input_ids"]
    assert sample.targets.tolist() == [IGNORE, 3, 4, IGNORE, 6, IGNORE, IGNORE, IGNORE]
    assert sample.document_ids.tolist() == [-1, 1, 1, 1, 2, 2, -1, -1]
    assert sample.position_ids.tolist() == [0, 0, 1, 2, 0, 1, 0, 1]
    given = ids | {"position_ids": [0, 7, 8, 9, 3, 4, 0, 0]}
    (tmp_path / "b").mkdir()
    sample = prepare_tokens(tmp_path / "b", [given]).train[0]
    assert sample.position_ids.tolist() == given["position_ids"]


BAD_TOKENS = {
    "outside": ({"input_ids": [1, 64]}, r"input_ids\[1\] is 64, outside .*vocabulary \(0 to 63\)"),
    "negative": ({"input_ids": [1, -1]}, r"input_ids\[1\] is -1, outside"),
    "label": ({"input_ids": [1, 2], "labels": [1, -1]}, r"labels\[1\] is -1, .*0 to 63 or -100"),
    "long": ({"input_ids": [1] * 9}, "9 tokens are more than ds4d.data.seq_len, 8"),
    "lengths": ({"input_ids": [1, 2], "labels": [1]}, "2 input_ids, but 1 labels"),
    "empty": ({"input_ids": []}, "input_ids must be a list of whole numbers, and not empty"),
    "float": ({"input_ids": [1, 2.0]}, "input_ids must be a list of whole numbers"),
    "true": ({"input_ids": [1, True]}, "input_ids must be a list of whole numbers"),
    "unknown": ({"input_ids": [1], "attention_mask": [1]}, "unknown field 'attention_mask'"),
    "absent": ({"labels": [1]}, "has no field 'input_ids'"),
    "again": ({"input_ids": [1] * 3, "document_ids": [0, 1, 0]}, r"document_ids\[2\] is 0 again"),
    "position": ({"input_ids": [1, 2], "position_ids": [0, -1]}, r"position_ids\[1\] is -1"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD_TOKENS)
def test_a_bad_line_of_tokens_is_named(tmp_path, name):
    line, problem = BAD_TOKENS[name]
    good = {field: [1, 1] for field in line} | {"input_ids": [1, 2]}
    good.pop("attention_mask", None)
    with pytest.raises(DataError, match=f"tokens.jsonl: line 2: {problem}"):
        prepare_tokens(tmp_path, [good, line])


def test_lines_with_other_fields_are_named(tmp_path):
    with pytest.raises(DataError, match=r"line 2: has the fields \['input_ids'\], but the first"):
        prepare_tokens(tmp_path, [{"input_ids": [1], "labels": [1]}, {"input_ids": [1]}])


def test_samples_without_a_target_are_counted_and_said_once(tmp_path):
    lines = [{"input_ids": [1, 2], "labels": labels} for labels in ([1, 2], [1, -100], [-100] * 2)]
    report = prepare_tokens(tmp_path, lines).report["train"]
    assert report["samples_without_target"] == 2 and report["target_tokens"] == 1
    assert "2 samples without a target" in describe("train", report)
    with pytest.raises(DataError, match="none of the 2 samples has a valid target"):
        prepare_tokens(tmp_path, lines[1:])


def test_fewer_samples_than_a_global_batch(tmp_path):
    lines = [{"input_ids": [1, 2]}] * 7
    with pytest.raises(DataError, match="7 samples .* are fewer than one global batch of 8"):
        prepare_tokens(tmp_path, lines, batch=8)
    assert len(prepare_tokens(tmp_path, lines, batch=7).train) == 7

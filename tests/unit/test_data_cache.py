"""What the cache is keyed by, what happens when it cannot be used, and what the model allows."""

from __future__ import annotations

import errno
import shutil
from contextlib import contextmanager

import pytest
import torch

from ds4d.config.types import ModelConfig, SourceConfig, TokenizerConfig
from ds4d.data.cache import Cache
from ds4d.data.errors import CacheError, DataError
from ds4d.data.prepare import prepare
from ds4d.data.store import StoreWriter
from tests.unit.data_cases import VOCAB, prose, run_config, write_lines


@pytest.fixture()
def source(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [{"text": prose(50, seed)} for seed in range(8)])
    return SourceConfig(type="jsonl", path=str(path))


def entries(cache, kind="samples") -> set[str]:
    return {path.name for path in cache.glob(f"{kind}-*") if path.is_dir()}


def test_the_second_run_finds_all_and_says_the_same(tmp_path, source, monkeypatch, capsys):
    config = run_config(tmp_path / "cache", source)
    first = prepare(config)
    said = capsys.readouterr().err
    assert "data.train: 8 documents, " in said and "(all kept)" in said and "padding" in said
    monkeypatch.setattr(Cache, "_make", lambda *_: pytest.fail("made again"))
    second = prepare(config)
    assert second.report == first.report and capsys.readouterr().err == said
    assert all(torch.equal(second.train[i].targets, first.train[i].targets) for i in range(3))
    prepare(config, local_rank=1)
    assert capsys.readouterr().err == ""


def test_each_setting_that_changes_samples_has_a_cache_of_its_own(tmp_path, source):
    cache = tmp_path / "cache"
    changes = [
        {}, {"seq_len": 16}, {"packing": "concat"}, {"packing": "none"}, {"append_eos": False},
        {"long_documents": "truncate"}, {"bpe": VOCAB - 10},
    ]  # fmt: skip
    for number, change in enumerate(changes, start=1):
        prepare(run_config(cache, source, **change), progress=False)
        assert len(entries(cache)) == number
    assert len(entries(cache, "tokenizer")) == 2
    prepare(run_config(cache, source, shuffle=False, num_workers=2), progress=False)
    assert len(entries(cache)) == len(changes)


def test_other_content_under_the_same_name_is_another_cache(tmp_path, source):
    config = run_config(tmp_path / "cache", source)
    before = prepare(config, progress=False)
    write_lines(tmp_path / "a.jsonl", [{"text": prose(50, seed)} for seed in range(1, 9)])
    after = prepare(config, progress=False)
    assert before.report["train"]["key"] != after.report["train"]["key"]


def test_slices_part_the_documents(tmp_path, source):
    config = run_config(
        tmp_path / "cache",
        SourceConfig(type="jsonl", path=source.path, slice=":75%"),
        eval=SourceConfig(type="jsonl", path=source.path, slice="75%:"),
    )
    report = prepare(config, progress=False).report
    assert (report["train"]["documents"], report["eval"]["documents"]) == (6, 2)


def test_the_standard_library_trains_a_tokenizer_that_loses_nothing(tmp_path):
    source = SourceConfig(type="python_stdlib", slice=":12")
    data = prepare(run_config(tmp_path, source, packing="concat", append_eos=False), progress=False)
    ids = torch.cat([data.train[i].input_ids for i in range(len(data.train))])
    from ds4d.data.sources import open_source

    text = "".join(b for d in open_source("k", source).documents(0, 12) for b in d.blocks)
    assert data.tokenizer.decode(ids[: data.report["train"]["tokens"]]) == text
    assert len(data.tokenizer) == data.vocab_size == VOCAB


@pytest.mark.parametrize("where", ["/proc/ds4d", "file/cache"])
def test_a_cache_that_cannot_be_written(tmp_path, source, where):
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="ds4d.data.cache_dir: cannot write and lock files in "):
        prepare(run_config(tmp_path / where, source), progress=False)


def test_a_cache_that_can_only_be_read_serves_what_it_holds(tmp_path, source, monkeypatch):
    config = run_config(tmp_path / "cache", source)
    prepare(config, progress=False)

    @contextmanager
    def locked_out(*_):
        raise CacheError("read-only")
        yield

    monkeypatch.setattr(Cache, "lock", locked_out)
    assert len(prepare(config, progress=False).train) > 3
    with pytest.raises(CacheError, match="read-only"):
        prepare(run_config(tmp_path / "cache", source, seq_len=16), progress=False)


def test_a_full_disk_leaves_no_half_cache(tmp_path, source, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    config = run_config(tmp_path / "cache", source)
    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "append", lambda *_, **__: full())
        with pytest.raises(CacheError, match=r"samples-.*No space left on device; [\d,]+ bytes"):
            prepare(config, progress=False)
    assert not list((tmp_path / "cache").glob("*making*")) and not entries(tmp_path / "cache")
    assert len(prepare(config, progress=False).train) > 3


def test_a_damaged_cache_is_named(tmp_path, source):
    config = run_config(tmp_path / "cache", source)
    folder = prepare(config, progress=False).train.folder
    (folder / "tokens.bin").write_bytes((folder / "tokens.bin").read_bytes()[:-1])
    with pytest.raises(CacheError, match=r"tokens.bin: has \d+ bytes, not \d+; delete .*samples-"):
        prepare(config, progress=False)
    shutil.rmtree(folder)
    assert len(prepare(config, progress=False).train) > 3


# -- the model's limits ------------------------------------------------------------------------


def test_a_tokenizer_larger_than_the_models_table(tmp_path, source):
    config = run_config(tmp_path / "cache", source, bpe=280)
    assert prepare(config, progress=False).vocab_size == 280
    with pytest.raises(DataError, match="has 280 tokens, more than the 279 that the model"):
        prepare(run_config(tmp_path / "cache", source, bpe=280, vocab=279), progress=False)
    config = run_config(tmp_path / "cache", source, bpe=280, vocab=281)
    assert prepare(config, progress=False).vocab_size == 281


def test_a_text_too_poor_for_the_vocabulary_is_said(tmp_path, source, capsys):
    data = prepare(run_config(tmp_path / "cache", source, bpe=5000))
    said = f"vocab_size: 5,000 asked, the text gives {len(data.tokenizer):,}"
    assert said in capsys.readouterr().err and data.vocab_size < 400


def test_a_given_tokenizer_is_used_and_a_missing_one_is_named(tmp_path, source):
    trained = prepare(run_config(tmp_path / "cache", source), progress=False)
    trained.tokenizer.save_pretrained(tmp_path / "tokenizer")
    for change in (
        {"tokenizer": TokenizerConfig(path=str(tmp_path / "tokenizer"))},
        {"tokenizer": TokenizerConfig()},
    ):
        config = run_config(tmp_path / "cache", source)
        config = config.replace(data=type(config.data)(**vars(config.data) | change))
        if change["tokenizer"].path is None:
            with pytest.raises(DataError, match="brings no tokenizer; set path, or vocab_size"):
                prepare(config, progress=False)
            continue
        given = prepare(config, progress=False)
        assert given.report["train"]["key"] == trained.report["train"]["key"]


def test_a_models_own_tokenizer_and_vocabulary(tmp_path, source):
    from transformers import LlamaConfig

    trained = prepare(run_config(tmp_path / "cache", source), progress=False)
    trained.tokenizer.save_pretrained(tmp_path / "model")
    LlamaConfig(vocab_size=320, max_position_embeddings=64).save_pretrained(tmp_path / "model")
    config = run_config(tmp_path / "cache", source, bpe=None)
    config = config.replace(model=ModelConfig(path=str(tmp_path / "model")))
    data = prepare(config, progress=False)
    assert data.vocab_size == 320 and len(data.tokenizer) == len(trained.tokenizer)
    too_long = run_config(tmp_path / "cache", source, bpe=None, seq_len=65)
    with pytest.raises(DataError, match="seq_len: 65 is more than the 64 positions of the model"):
        prepare(too_long.replace(model=config.model), progress=False)


@pytest.mark.parametrize("size", [100, 257])
def test_a_vocabulary_must_hold_all_bytes(tmp_path, source, size):
    with pytest.raises(DataError, match=f"vocab_size: {size} is less than 258"):
        prepare(run_config(tmp_path / "cache", source, bpe=size), progress=False)


def test_auto_vocabulary_needs_a_tokenizer(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", [{"input_ids": [1, 2]}])
    tokens = SourceConfig(type="tokens", path=str(path))
    with pytest.raises(ValueError, match=r"vocab_size: \"auto\" is the size"):
        prepare(run_config(tmp_path / "cache", tokens, bpe=None), progress=False)
    with pytest.raises(DataError, match="a tokenizer is trained on text"):
        prepare(run_config(tmp_path / "cache", tokens), progress=False)

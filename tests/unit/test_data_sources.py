"""Every source, its slices, and errors that name file and line."""

from __future__ import annotations

import json
import sysconfig

import pytest

from ds4d.config.types import SourceConfig
from ds4d.data.cache import Cache
from ds4d.data.corpus import Corpus
from ds4d.data.errors import DataError
from ds4d.data.files import BLOCK_BYTES
from ds4d.data.fingerprint import content_hashes
from ds4d.data.slices import slice_bounds
from ds4d.data.sources import open_source


def texts(type: str, path=None, **settings) -> list[str]:
    paths = tuple(map(str, path)) if isinstance(path, list) else path and str(path)
    config = SourceConfig(type=type, path=paths, **settings)
    source = open_source("ds4d.data.train", config)
    return ["".join(document.blocks) for document in source.documents(0, source.count)]


def write(path, content: str | bytes | list) -> str:
    if isinstance(content, list):
        content = "".join(json.dumps(line) + "\n" for line in content)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_text_takes_globs_and_lists(tmp_path):
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for name in ("b.txt", "a.txt", "deep/er/c.txt", "deep/d.md"):
        write(tmp_path / name, name)
    assert texts("text", tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert texts("text", tmp_path / "**" / "*.txt") == ["a.txt", "b.txt", "deep/er/c.txt"]
    assert texts("text", [tmp_path / "deep/d.md", tmp_path / "*.txt"])[0] == "deep/d.md"


def test_text_is_kept_as_it_is_but_for_the_byte_order_mark(tmp_path):
    path = write(tmp_path / "a", b"\xef\xbb\xbfa\r\n\xe4\xb8\xad\n")
    assert texts("text", path) == ["a\r\n中\n"]


def test_a_character_may_lie_across_two_blocks(tmp_path):
    text = "x" * (BLOCK_BYTES - 1) + "中" + "y" * BLOCK_BYTES
    assert texts("text", write(tmp_path / "a", text)) == [text]


def test_rows_and_lines_give_the_same_documents(tmp_path):
    import datasets

    wanted = [f"document {i}" for i in range(2500)]
    data = datasets.Dataset.from_dict({"body": wanted, "other": list(range(2500))})
    data.to_parquet(str(tmp_path / "a.parquet"))
    data.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=data).save_to_disk(str(tmp_path / "dict"))
    lines = write(tmp_path / "a.jsonl", [{"body": text} for text in wanted])
    for type, path in (
        ("jsonl", lines),
        ("parquet", tmp_path / "a.parquet"),
        ("hf", tmp_path / "saved"),
        ("hf", tmp_path / "dict"),
    ):
        assert texts(type, path, field="body") == wanted
        source = open_source("k", SourceConfig(type=type, path=str(path), field="body"))
        part = [document for document in source.documents(1500, 1502)]
        assert ["".join(document.blocks) for document in part] == wanted[1500:1502]


def test_the_standard_library_is_sorted_and_has_no_tests():
    source = open_source("k", SourceConfig(type="python_stdlib"))
    names = [str(path.relative_to(sysconfig.get_paths()["stdlib"])) for path in source.files]
    assert names == sorted(names) and "json/decoder.py" in names
    folders = {folder for name in names for folder in name.split("/")[:-1]}
    assert folders.isdisjoint({"test", "tests", "site-packages"})
    assert source.count > 300


def test_blank_lines_are_no_documents(tmp_path):
    path = write(tmp_path / "a.jsonl", b'{"text": "a"}\n\n  \r\n{"text": "b"}')
    assert texts("jsonl", path) == ["a", "b"]


@pytest.mark.parametrize(
    "text, bounds",
    [
        (None, (0, 37)), (":", (0, 37)), (":10", (0, 10)), ("10:", (10, 37)), ("-5:", (32, 37)),
        (":95%", (0, 35)), ("95%:", (35, 37)), ("12.5%:50%", (4, 18)), (":1000", (0, 37)),
    ],
)  # fmt: skip
def test_slices(text, bounds):
    assert slice_bounds("k", text, 37) == bounds


@pytest.mark.parametrize("text", ["95%", "a:b", "::", "40:", "5:5", "%:", ":0"])
def test_a_bad_or_empty_slice_is_named(text):
    with pytest.raises(DataError, match=r"^k\.slice: "):
        slice_bounds("k", text, 37)


BAD_FILES = {
    "latin-1": (b"one\ntwo\nf\xfcnf\n", r"line 3, byte 9 \(0xfc\): not UTF-8"),
    "cut character": (b"one\xe4\xb8", r"line 1, byte 3 \(0xe4\): not UTF-8"),
    "utf-16": ("text".encode("utf-16"), "is UTF-16"),
    "utf-16 unmarked": ("text".encode("utf-16-le"), r"line 1, byte 1 \(0x00\): a NUL byte"),
    "nul": (b"one\n\0", r"line 2, byte 4 \(0x00\): a NUL byte"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid", "is a Git LFS.*git lfs pull"),
    "gzip": (b"\x1f\x8b\x08", "is compressed with gzip"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_is_no_text(tmp_path, name):
    content, problem = BAD_FILES[name]
    path = write(tmp_path / "bad.txt", content)
    with pytest.raises(DataError, match=f"bad.txt: {problem}"):
        texts("text", path)


BAD_LINES = {
    "latin-1": (b'{"text": "f\xfcnf"}\n', r"line 2, byte 28 \(0xfc\): not UTF-8"),
    "damaged": (b'{"text": "a}\n', "line 2: damaged JSON: column"),
    "cut off": (b'{"text": "a', "line 2: damaged JSON: .*the last line, perhaps"),
    "no object": (b'["text"]\n', "line 2: a JSON object expected, not list"),
    "no field": (b'{"body": "a"}\n', r"line 2: has no field 'text', only \['body'\]"),
    "no text": (b'{"text": 1}\n', "line 2: field 'text' must be text, not int"),
    "null": (b'{"text": null}\n', "line 2: field 'text' must be text, not NoneType"),
    "surrogate": (b'{"text": "a\\ud800"}\n', "line 2: field 'text': character 1 is a lone surr"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_line_that_is_no_document(tmp_path, name):
    line, problem = BAD_LINES[name]
    path = write(tmp_path / "bad.jsonl", b'{"text": "good"}\n' + line)
    with pytest.raises(DataError, match=f"bad.jsonl: {problem}"):
        texts("jsonl", path)


def test_damaged_and_lacking_tables(tmp_path):
    import datasets

    data = datasets.Dataset.from_dict({"text": ["a", None]})
    data.to_parquet(str(tmp_path / "null.parquet"))
    whole = (tmp_path / "null.parquet").read_bytes()
    write(tmp_path / "cut.parquet", whole[:-20])
    with pytest.raises(DataError, match="null.parquet: row 2: field 'text' must be text"):
        texts("parquet", tmp_path / "null.parquet")
    with pytest.raises(DataError, match="cut.parquet: not a whole parquet file"):
        texts("parquet", tmp_path / "cut.parquet")
    with pytest.raises(DataError, match=r"has no field 'body', only \['text'\]"):
        texts("parquet", tmp_path / "null.parquet", field="body")
    data.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match=r"k\.field: .*has no 'body', only \['text'\]"):
        open_source("k", SourceConfig(type="hf", path=str(tmp_path / "saved"), field="body"))
    with pytest.raises(DataError, match="k: cannot load"):
        open_source("k", SourceConfig(type="hf", path=str(tmp_path / "absent")))


def test_files_that_are_not_there(tmp_path):
    for path, problem in (
        (tmp_path / "*.txt", "no file matches"),
        (tmp_path, "is a folder; name its files"),
        ([], "names no file"),
    ):
        with pytest.raises(DataError, match=rf"^ds4d\.data\.train\.path: .*{problem}"):
            texts("text", path)
    path = write(tmp_path / "a.txt", "a")
    with pytest.raises(DataError, match="is named twice"):
        texts("text", [path, tmp_path / "*.txt"])
    with pytest.raises(DataError, match="a.jsonl: is empty"):
        texts("jsonl", write(tmp_path / "a.jsonl", "\n"))


def test_unchanged_files_are_not_read_again_and_changed_ones_are(tmp_path, monkeypatch):
    import os

    from ds4d.data import fingerprint

    path = tmp_path / "a.txt"
    path.write_text("one")
    cache = Cache(tmp_path / "cache", say=print)
    monkeypatch.setattr(fingerprint, "CLOCK_GRAIN_SECONDS", -1.0)  # trust a file just written
    first = content_hashes([path], cache)
    reads = []
    real = fingerprint._hash
    monkeypatch.setattr(fingerprint, "_hash", lambda p, s: reads.append(p) or real(p, s))
    assert content_hashes([path], cache) == first and reads == []
    before = path.stat()
    path.write_text("two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size, same time
    assert content_hashes([path], cache) != first and reads == [path]


def test_a_file_just_written_is_not_trusted_by_its_times(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    cache = Cache(tmp_path / "cache", say=print)
    content_hashes([path], cache)
    record = next((tmp_path / "cache").glob("files-*.json"))
    assert json.loads(record.read_text()) == {}


def test_identity_does_not_depend_on_where_files_lie(tmp_path):
    cache = Cache(tmp_path / "cache", say=print)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "a.txt", "same")
    opened = [
        Corpus.open("k", SourceConfig(type="text", path=str(tmp_path / name / "*")), cache)
        for name in ("one", "two")
    ]
    assert opened[0].identity == opened[1].identity

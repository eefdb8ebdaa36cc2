"""Finding files and reading text from them, with errors that name the file, the line, the byte.

Files are read in blocks, so a file may be larger than memory. ``datasets`` reads text and JSON
lines too, but its errors name neither file nor line.
"""

from __future__ import annotations

import codecs
import glob
import json
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Iterator, Sequence

from ds4d.data.errors import DataError

BLOCK_BYTES = 1 << 20

_UTF16 = "is UTF-16, not UTF-8; convert it: iconv -f UTF-16 -t UTF-8"
_NOT_TEXT = {  # how a file begins that is no UTF-8 text -> what to tell its owner
    b"version https://git-lfs.github.com/": "is a Git LFS pointer, not the data; run: git lfs pull",
    codecs.BOM_UTF16_LE: _UTF16,
    codecs.BOM_UTF16_BE: _UTF16,
    b"\x1f\x8b": "is compressed with gzip; unpack it first",
    b"\x28\xb5\x2f\xfd": "is compressed with zstd; unpack it first",
    b"PAR1": "is a parquet file; set the source's type to 'parquet'",
}


def find_files(key: str, patterns: str | Sequence[str] | None) -> list[Path]:
    """The files that ``patterns`` name: in the order given, and by name within a glob.

    Args:
        key: dotted path of the setting, for the errors.
        patterns: paths or globs (``**`` too). A path that exists is taken literally.

    Raises:
        DataError: a pattern matches no file, or a file is named twice.
    """
    found: dict[Path, None] = {}
    for pattern in [patterns] if isinstance(patterns, str) else list(patterns or ()):
        for path in _matches(key, pattern):
            if path in found:
                raise DataError(f"{key}: {path} is named twice")
            found[path] = None
    if not found:
        raise DataError(f"{key}: names no file")
    return list(found)


def _matches(key: str, pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_dir():
        raise DataError(f"{key}: {path} is a folder; name its files, as in '{path}/**/*.txt'")
    if path.exists():
        return [path]
    names = glob.glob(str(path), recursive=True)
    files = [match for match in map(Path, sorted(names)) if match.is_file()]
    if not files:
        raise DataError(f"{key}: no file matches '{pattern}' (looked from {Path.cwd()})")
    return files


@contextmanager
def open_data(path: Path) -> Iterator[BinaryIO]:
    """Open for reading; what the system reports becomes a ``DataError`` that names the file."""
    try:
        with open(path, "rb") as file:
            yield file
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from None


@contextmanager
def _open_text(path: Path) -> Iterator[BinaryIO]:
    """Open a UTF-8 file behind its byte order mark, if it has one."""
    with open_data(path) as file:
        head = file.read(64)
        for beginning, problem in _NOT_TEXT.items():
            if head.startswith(beginning):
                raise DataError(f"{path}: {problem}")
        file.seek(len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0)
        yield file


def read_text(path: Path) -> Iterator[str]:
    """The text of a file in blocks, byte order mark removed, line ends as they are.

    Raises:
        DataError: not UTF-8, or a NUL byte, which no text has.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    with _open_text(path) as file:
        while True:
            offset = file.tell()
            block = file.read(BLOCK_BYTES)
            undecoded = len(decoder.getstate()[0])  # a character cut by the end of the last block
            zero = block.find(b"\0")
            if zero >= 0:
                raise _bad_byte(path, offset + zero, "a NUL byte: this is no UTF-8 text")
            try:
                text = decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                at = offset - undecoded + error.start
                raise _bad_byte(path, at, f"not UTF-8 ({error.reason})") from None
            if text:
                yield text
            if not block:
                return


def _bad_byte(path: Path, offset: int, problem: str) -> DataError:
    line = 1
    with open(path, "rb") as file:
        for start in range(0, offset, BLOCK_BYTES):
            line += file.read(min(BLOCK_BYTES, offset - start)).count(b"\n")
        byte = file.read(1)
    return DataError(f"{path}: line {line}, byte {offset} (0x{byte.hex()}): {problem}")


@dataclass(frozen=True)
class Line:
    """One line that is not blank; ``number`` counts from 1, ``offset`` in bytes from 0."""

    path: Path
    number: int
    offset: int
    raw: bytes

    @property
    def where(self) -> str:
        return f"{self.path}: line {self.number}"


def read_lines(path: Path) -> Iterator[Line]:
    with _open_text(path) as file:
        offset = file.tell()
        for number, raw in enumerate(file, start=1):
            if not raw.isspace():
                yield Line(path, number, offset, raw)
            offset += len(raw)


def count_lines(path: Path) -> int:
    with _open_text(path) as file:
        return sum(not raw.isspace() for raw in file)


def parse_line(line: Line) -> dict[str, Any]:
    """The JSON object of a line."""
    try:
        value = json.loads(line.raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        at = line.offset + error.start
        raise _bad_byte(line.path, at, f"not UTF-8 ({error.reason})") from None
    except json.JSONDecodeError as error:
        cut = "" if line.raw.endswith(b"\n") else "; the last line, perhaps the file was cut off"
        problem = f"column {error.colno}: {error.msg}"
        raise DataError(f"{line.where}: damaged JSON: {problem}{cut}") from None
    if not isinstance(value, dict):
        raise DataError(f"{line.where}: a JSON object expected, not {type(value).__name__}")
    return value


def check_text(where: str, text: Any, field: str) -> str:
    """``text`` if it is text that can be encoded (JSON may hold half a surrogate pair)."""
    if not isinstance(text, str):
        raise DataError(f"{where}: field '{field}' must be text, not {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        problem = f"character {error.start} is a lone surrogate ({text[error.start]!a})"
        raise DataError(f"{where}: field '{field}': {problem}, which is no text") from None
    return text

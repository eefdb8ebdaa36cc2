"""Where documents come from: one class a source type, all with the same face.

A source counts its documents and yields any range of them; it never holds more than a block of
text. What a document is:

=============  ==================================================================================
text           one file
python_stdlib  one ``.py`` file of the running Python's standard library
jsonl          one line, its ``field``
parquet, hf    one row, its ``field``
tokens         one line (``token_lines.py`` reads these: they are samples, not text)
=============  ==================================================================================
"""

from __future__ import annotations

import os
import sysconfig
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Iterable, Iterator, Protocol

from ds4d.config.types import SourceConfig
from ds4d.data import files
from ds4d.data.errors import DataError

ROWS_A_BATCH = 1000


@dataclass(frozen=True)
class Document:
    """``where`` is for people; ``blocks`` are the text, in order, read when asked for."""

    where: str
    blocks: Iterable[str]


class Source(Protocol):
    """Attributes:
    files: what the documents are read from: the content that the cache is keyed by.
    count: number of documents.
    """

    files: list[Path]

    @property
    def count(self) -> int: ...

    def documents(self, start: int, stop: int) -> Iterator[Document]: ...


class TextFiles:
    def __init__(self, key: str, config: SourceConfig) -> None:
        self.files = files.find_files(f"{key}.path", config.path)

    @property
    def count(self) -> int:
        return len(self.files)

    def documents(self, start: int, stop: int) -> Iterator[Document]:
        for path in self.files[start:stop]:
            yield Document(str(path), files.read_text(path))


class PythonStdlib(TextFiles):
    """Real text that every machine has. Tests, what users installed and what differs between two
    builds of one Python are left out, so machines with the same Python get the same corpus."""

    LEFT_OUT = {"test", "tests", "idle_test", "site-packages", "dist-packages"}

    def __init__(self, key: str, config: SourceConfig) -> None:
        root = sysconfig.get_paths()["stdlib"]
        found = []
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if self._same_everywhere(name)]
            found += [
                Path(folder, name)
                for name in names
                if name.endswith(".py") and self._same_everywhere(name)
            ]
        self.files = sorted(found, key=lambda path: path.relative_to(root).as_posix())
        if not self.files:
            raise DataError(f"{key}.type: the standard library has no .py files in {root}")

    def _same_everywhere(self, name: str) -> bool:
        return name not in self.LEFT_OUT and not name.startswith(("config-", "_sysconfigdata"))


class JsonLines:
    def __init__(self, key: str, config: SourceConfig) -> None:
        self.files = files.find_files(f"{key}.path", config.path)
        self.field = config.field

    @cached_property
    def count(self) -> int:
        counts = [files.count_lines(path) for path in self.files]
        for path, count in zip(self.files, counts):
            if not count:
                raise DataError(f"{path}: is empty")
        return sum(counts)

    def objects(self, start: int, stop: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """(where, object) of each line in the range; lines outside it are not parsed."""
        lines = (line for path in self.files for line in files.read_lines(path))
        for line in islice(lines, start, stop):
            yield line.where, files.parse_line(line)

    def documents(self, start: int, stop: int) -> Iterator[Document]:
        for where, value in self.objects(start, stop):
            if self.field not in value:
                raise DataError(f"{where}: has no field '{self.field}', only {sorted(value)}")
            yield Document(where, [files.check_text(where, value[self.field], self.field)])


class Parquet:
    def __init__(self, key: str, config: SourceConfig) -> None:
        self.files = files.find_files(f"{key}.path", config.path)
        self.field = config.field

    @cached_property
    def count(self) -> int:
        return sum(self._open(path).metadata.num_rows for path in self.files)

    def _open(self, path: Path) -> Any:
        from pyarrow.parquet import ParquetFile

        with _parquet_errors(path):
            file = ParquetFile(path)
        names = file.schema_arrow.names
        if self.field not in names:
            raise DataError(f"{path}: has no field '{self.field}', only {sorted(names)}")
        if not file.metadata.num_rows:
            raise DataError(f"{path}: is empty")
        return file

    def documents(self, start: int, stop: int) -> Iterator[Document]:
        return islice(self._rows(), start, stop)

    def _rows(self) -> Iterator[Document]:
        for path in self.files:
            rows = enumerate(self._texts(path), start=1)
            for where, text in ((f"{path}: row {row}", text) for row, text in rows):
                yield Document(where, [files.check_text(where, text, self.field)])

    def _texts(self, path: Path) -> Iterator[Any]:
        with _parquet_errors(path):
            for batch in self._open(path).iter_batches(ROWS_A_BATCH, columns=[self.field]):
                yield from batch.column(0).to_pylist()


@contextmanager
def _parquet_errors(path: Path) -> Iterator[None]:
    from pyarrow import ArrowException

    try:
        yield
    except (ArrowException, OSError) as error:
        raise DataError(f"{path}: not a whole parquet file: {error}") from None


class HuggingFace:
    """A folder that ``save_to_disk`` wrote, or whatever ``datasets.load_dataset`` finds."""

    def __init__(self, key: str, config: SourceConfig) -> None:
        if not isinstance(config.path, str):
            raise DataError(f"{key}.path: one folder or hub id, not {config.path!r}")
        self.name = config.path
        self.field = config.field
        try:
            self.data = _load(config)
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{key}: cannot load '{config.path}': {error}") from None
        if self.field not in self.data.column_names:
            names = sorted(self.data.column_names)
            raise DataError(f"{key}.field: '{config.path}' has no '{self.field}', only {names}")
        if not len(self.data):
            raise DataError(f"{key}: '{config.path}', split '{config.split}', is empty")
        self.files = [Path(file["filename"]) for file in self.data.cache_files]

    @property
    def count(self) -> int:
        return len(self.data)

    def documents(self, start: int, stop: int) -> Iterator[Document]:
        rows = self.data.select_columns([self.field]).select(range(start, stop))
        for first, batch in enumerate(rows.iter(ROWS_A_BATCH)):
            for row, text in enumerate(batch[self.field], start + first * ROWS_A_BATCH):
                where = f"{self.name}: row {row}"
                yield Document(where, [files.check_text(where, text, self.field)])


def _load(config: SourceConfig) -> Any:
    import datasets

    folder = Path(config.path).expanduser()
    if not any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return datasets.load_dataset(config.path, config.name, split=config.split)
    saved = datasets.load_from_disk(str(folder))
    return saved[config.split] if isinstance(saved, datasets.DatasetDict) else saved


SOURCES = {
    "text": TextFiles,
    "python_stdlib": PythonStdlib,
    "jsonl": JsonLines,
    "tokens": JsonLines,
    "parquet": Parquet,
    "hf": HuggingFace,
}


def open_source(key: str, config: SourceConfig) -> Source:
    """The source that ``config`` describes; ``key`` is its dotted path, for the errors."""
    return SOURCES[config.type](key, config)

"""A source and the part of it that a config takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Iterator

from ds4d.config.types import SourceConfig
from ds4d.data.cache import Cache
from ds4d.data.fingerprint import content_hashes
from ds4d.data.slices import slice_bounds
from ds4d.data.sources import Document, Source, open_source


@dataclass(frozen=True)
class Corpus:
    """``key`` is the dotted path in the config, for errors; ``content`` a hash a file."""

    key: str
    config: SourceConfig
    source: Source
    content: list[str]

    @classmethod
    def open(cls, key: str, config: SourceConfig, cache: Cache) -> Corpus:
        source = open_source(key, config)
        return cls(key, config, source, content_hashes(source.files, cache))

    @property
    def identity(self) -> dict[str, Any]:
        """What the documents are a function of; where the files lie is no part of it."""
        chosen = ("type", "field", "name", "split", "slice")
        return {"content": self.content} | {name: getattr(self.config, name) for name in chosen}

    @cached_property
    def bounds(self) -> tuple[int, int]:
        """First document and the one behind the last. May read the source to count."""
        return slice_bounds(self.key, self.config.slice, self.source.count)

    @property
    def num_documents(self) -> int:
        return self.bounds[1] - self.bounds[0]

    def documents(self) -> Iterator[Document]:
        return self.source.documents(*self.bounds)

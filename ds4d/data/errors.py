"""What a user can get wrong about data. The message names the key or the file and says the fix."""

from __future__ import annotations


class DataError(ValueError):
    """The data, or a setting about them, is wrong: every rank raises the same."""


class CacheError(DataError):
    """The cache folder cannot be used."""

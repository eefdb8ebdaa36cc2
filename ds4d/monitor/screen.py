"""What the user sees: the one place that ds4d's own words go to.

In a rank, the process's stdout and stderr lead to its log file (``ds4d.launch.runtime``), so that
nothing but what is printed here reaches the screen. Outside of a rank it is stderr: stdout is for
results.
"""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console

_console: Console | None = None
_users_console: Console | None = None


def console() -> Console:
    """The user's screen; on ranks other than 0, the rank's log."""
    return _console or _make(sys.stderr)


def users_console() -> Console:
    """The user's screen, from any rank: for the one that works while the others wait for it."""
    return _users_console or _make(sys.stderr)


def use(mine: TextIO, users: TextIO) -> None:
    """Print to these from now on."""
    global _console, _users_console
    _console, _users_console = _make(mine), _make(users)


def say(text: str) -> None:
    """Print a line as it is: no wrapping, no markup."""
    console().print(text, soft_wrap=True, markup=False)


def _make(file: TextIO) -> Console:
    return Console(file=file, highlight=False)

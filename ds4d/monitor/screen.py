"""What the user sees: the one place that ds4d's own words go to.

In a rank, the process's stdout and stderr lead to its log file (``ds4d.runtime``), so that nothing
but what is printed here reaches the screen, and only from rank 0.
"""

from __future__ import annotations

import sys
from typing import TextIO

from rich.console import Console

_console: Console | None = None


def console() -> Console:
    """The user's screen; on ranks other than 0, the rank's log."""
    return _console or Console(file=sys.stdout, highlight=False)


def use(file: TextIO) -> None:
    """Print to ``file`` from now on."""
    global _console
    _console = Console(file=file, highlight=False)


def say(text: str) -> None:
    """Print a line as it is: no wrapping, no markup."""
    console().print(text, soft_wrap=True, markup=False, highlight=False)

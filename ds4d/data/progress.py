"""How far a long job is: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Iterable, Iterator, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from ds4d.monitor import screen

LINE_EVERY_SECONDS = 15.0
Item = TypeVar("Item")


class Bar:
    """Use as a context; ``update(done, note)`` as often as you like."""

    def __init__(self, title: str, total: int, *, show: bool) -> None:
        self.title, self.total = title, total
        self.console = screen.users_console() if show else Console(quiet=True)
        self.bar = None
        self.spoke = time.monotonic()

    def __enter__(self) -> Bar:
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn(self.title),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self.task = self.bar.add_task("", total=self.total, note="")
            self.bar.start()
        return self

    def update(self, done: int, note: str) -> None:
        if self.bar is not None:
            self.bar.update(self.task, completed=done, note=note)
        elif time.monotonic() - self.spoke > LINE_EVERY_SECONDS:
            self.spoke = time.monotonic()
            self.console.print(f"{self.title}: {done:,} of {self.total:,}, {note}", soft_wrap=True)

    def track(self, items: Iterable[Item], note: str) -> Iterator[Item]:
        for done, item in enumerate(items):
            self.update(done, note)
            yield item

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar is not None:
            self.bar.stop()

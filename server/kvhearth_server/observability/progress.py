"""A progress bar on a terminal while memory is populated; nothing elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType

from rich.console import Console
from rich.progress import Progress, TaskID


class PopulateBar:
    """A context in which ``note`` draws; silent when stderr is no terminal."""

    def __init__(self) -> None:
        self._bar = Progress(console=Console(stderr=True), transient=True)
        self._shown = sys.stderr.isatty()
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> PopulateBar:
        if self._shown:
            self._bar.start()
        return self

    def note(self, what: str, done: int, total: int) -> None:
        """Of ``what``, ``done`` of ``total`` bytes are there."""
        if not self._shown:
            return
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(f"populating {what}", total=total)
        self._bar.update(self._tasks[what], completed=done)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown:
            self._bar.stop()

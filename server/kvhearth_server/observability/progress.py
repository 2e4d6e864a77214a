"""Progress bars on a terminal while the daemon starts; nothing elsewhere."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TextIO

from rich.console import Console
from rich.progress import Progress, TaskID

from kvhearth_server.observability import logs


class StartBar:
    """A context in which ``note`` draws; silent when stderr is no terminal.

    While it is drawn the log goes through it, so that no line of the log ends up inside of a bar.

    Args:
        doing: the word before what is counted, such as ``populating``.
    """

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._bar = Progress(console=Console(stderr=True), transient=True)
        self._shown = sys.stderr.isatty()
        self._tasks: dict[str, TaskID] = {}
        self._log_stream: TextIO | None = None

    def __enter__(self) -> StartBar:
        if self._shown:
            self._bar.start()
            self._log_stream = logs.redirect(sys.stderr)
        return self

    def note(self, what: str, done: int, total: int) -> None:
        """Of ``what``, ``done`` of ``total`` are there."""
        if not self._shown:
            return
        if what not in self._tasks:
            self._tasks[what] = self._bar.add_task(f"{self._doing} {what}", total=total)
        self._bar.update(self._tasks[what], completed=done)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown:
            self._bar.stop()
        if self._log_stream is not None:
            logs.redirect(self._log_stream)

"""A progress bar on stderr for long loops, shown only on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import track


def steps(count: int, what: str) -> Iterator[int]:
    """Yield ``range(count)`` behind a progress bar."""
    shown = sys.stderr.isatty()
    console = Console(stderr=True)
    yield from track(range(count), what, console=console, transient=True, disable=not shown)

"""A progress bar on stderr for what takes long; nothing where that is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import track


def steps(count: int, what: str) -> Iterator[int]:
    """``range(count)``, drawn while it is walked through."""
    shown = sys.stderr.isatty()
    console = Console(stderr=True)
    yield from track(range(count), what, console=console, transient=True, disable=not shown)

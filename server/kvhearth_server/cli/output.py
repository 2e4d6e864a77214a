"""Options and output helpers that several verbs share."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.load import one_line
from kvhearth_server.config.value_types import directory

AsJson = Annotated[
    bool, typer.Option("--json", help="Print one JSON object with stable names on stdout.")
]
SocketDir = Annotated[
    Path | None,
    typer.Option(
        "--socket-dir",
        envvar="KVHEARTH_SOCKET_DIR",
        help="Directory of the daemon's sockets. Default: from the settings.",
        metavar="DIR",
        show_default=False,
    ),
]
Config = Annotated[
    Path | None,
    typer.Option(
        "--config",
        help="YAML file of settings (environment: KVHEARTH_CONFIG).",
        metavar="FILE",
        show_default=False,
    ),
]


_WIDTH_OFF_TERMINAL = 200
_DIGITS_SHOWN = 12
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def plain(report: Any) -> dict[str, Any]:
    """Return a report as JSON values."""
    found: dict[str, Any] = dataclasses.asdict(report)
    return found


def say_json(value: Mapping[str, object]) -> None:
    """Print one object on one line of stdout."""
    typer.echo(json.dumps(value))


def note(text: str) -> None:
    """Print a message for the user."""
    typer.echo(text, err=True)


def console() -> Console:
    """Return stdout as a console: colours as the terminal and NO_COLOR say; wide if it is none."""
    width = None if sys.stdout.isatty() else _WIDTH_OFF_TERMINAL
    return Console(width=width, highlight=False, soft_wrap=width is not None)


def waiting(text: str) -> AbstractContextManager[object]:
    """Show a spinner on stderr while the block runs; nothing if stderr is no terminal."""
    return Console(stderr=True).status(text)


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """Show a progress bar on stderr; yields a function that takes a text and the part done."""
    columns = (BarColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task("", total=1.0)

        def told(text: str, done: float) -> None:
            shown.update(task, description=text, completed=min(1.0, done))

        yield told


def table(*heads: str, right: Iterable[str] = ()) -> Table:
    """Return an empty table; ``right`` names columns of numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        made.add_column(head, justify="right" if head in right else "left", no_wrap=True)
    return made


def written_directory(given: Path, flag: str) -> Path:
    """Return the absolute path of a flag's directory.

    Raises:
        KVHearthError: ``config_invalid``: nothing can have that name.
    """
    try:
        return directory(given)
    except ValueError as error:
        message = one_line(f"{flag}: {given}: {error}")
        raise KVHearthError(Reason.CONFIG_INVALID, message) from None


def row(shown: Table, *cells: object) -> None:
    """Add a row. Text cells are shown literally: no markup, no control characters.

    Engines choose some of these texts, and they must not reach the operator's terminal raw.
    """
    shown.add_row(
        *(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells)  # type: ignore[arg-type]
    )


def printable(text: str) -> str:
    """Return ``text`` with ``?`` for characters that would control a terminal."""
    return "".join(each if each.isprintable() else "?" for each in text)


def facts(rows: Sequence[tuple[str, object]]) -> Table:
    """Return a table of names and values."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        row(made, name, str(value))
    return made


def size(count: int) -> str:
    """Format bytes for people: three digits or so."""
    amount, unit = float(count), 0
    while amount >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.0f} B" if unit == 0 else f"{amount:.4g} {_UNITS[unit]}"


def duration(seconds: float) -> str:
    """Format a time for people."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = int(seconds) // 60
    hours, days = minutes // 60, minutes // 1440
    if hours < 1:
        return f"{minutes} min"
    return f"{hours} h {minutes % 60} min" if days < 2 else f"{days} d {hours % 24} h"


def percent(part: float, whole: float) -> str:
    """Format a part of a whole as a percentage; ``-`` if the whole is 0."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def short(digest: str) -> str:
    """Return the first digits of a namespace, enough to tell it apart."""
    return digest[:_DIGITS_SHOWN]

"""Options and output helpers that several verbs share."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from pydantic import TypeAdapter
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.cli.liveness import printable
from kvhearth_server.observability.logs import one_line

_Parsed = TypeVar("_Parsed")


def flag(name: str, text: str, metavar: str | None = None, envvar: str | None = None) -> Any:
    """Return an option whose help tells its default, if it has one."""
    return typer.Option(name, help=text, metavar=metavar, envvar=envvar, show_default=False)


AsJson = Annotated[bool, flag("--json", "Print one JSON object with stable names on stdout.")]
_PLACE = "Directory of the daemon's sockets. Default: from the settings."
SocketDir = Annotated[Path | None, flag("--socket-dir", _PLACE, "DIR", "KVHEARTH_SOCKET_DIR")]
_FILE = "YAML file of settings (environment: KVHEARTH_CONFIG)."
Config = Annotated[Path | None, flag("--config", _FILE, "FILE")]

_WIDTH_OFF_TERMINAL = 200
_DIGITS_SHOWN = 12
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def plain(report: Any) -> dict[str, Any]:
    """Return a report as JSON values."""
    found: dict[str, Any] = TypeAdapter(type(report)).dump_python(report, mode="json")
    return found


def say_json(value: Mapping[str, object]) -> None:
    """Print one object on one line of stdout."""
    typer.echo(json.dumps(value))


def say(report: Any, text: RenderableType | None, *, as_json: bool, empty: str = "") -> None:
    """Print a report, a dataclass or a mapping, as JSON or as ``text``.

    Args:
        text: a string is literal; None for nothing to tell.
        empty: note instead of nothing.
    """
    if as_json:
        say_json(report if isinstance(report, Mapping) else plain(report))
    elif isinstance(text, str):
        typer.echo(text)
    elif text is None:
        note(empty)
    else:
        console().print(text)


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


def table(*heads: str, right: Iterable[str] = (), rows: Iterable[Iterable[object]] = ()) -> Table:
    """Return a table; ``right`` names columns of numbers, ``rows`` are as for ``row``."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        made.add_column(head, justify="right" if head in right else "left", no_wrap=True)
    for cells in rows:
        row(made, *cells)
    return made


def facts(rows: Iterable[tuple[str, object]]) -> Table:
    """Return a table of names and values."""
    made = Table(box=None, pad_edge=False, show_header=False)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in rows:
        row(made, name, str(value))
    return made


def row(shown: Table, *cells: Any) -> None:
    """Add a row of texts, numbers and renderables. Texts are shown literally: no markup, no
    control characters.

    Engines choose some of these texts, and they must not reach the operator's terminal raw.
    """
    shown.add_row(
        *(Text(printable(str(each))) if isinstance(each, str | int) else each for each in cells)
    )


def wrong(message: str) -> KVHearthError:
    """Return the error of a wrong argument or setting."""
    return KVHearthError(Reason.CONFIG_INVALID, message)


def parsed(name: str, parse: Callable[[Any], _Parsed], value: object) -> _Parsed:
    """Return the value of a flag.

    Raises:
        KVHearthError: ``config_invalid``: ``parse`` raises ValueError.
    """
    try:
        return parse(value)
    except ValueError as error:
        raise wrong(one_line(f"{name}: {str(value)!r}: {error}")) from None


def size(count: int) -> str:
    """Format bytes for people: three digits or so."""
    amount, unit = float(count), 0
    while amount >= 1024 and unit < len(_UNITS) - 1:
        amount, unit = amount / 1024, unit + 1
    return f"{amount:.0f} B" if unit == 0 else f"{amount:.4g} {_UNITS[unit]}"


def speed(bytes_per_s: float) -> str:
    """Format a bandwidth for people, in decimal units as drives and networks are sold by."""
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.2f} GB/s"
    return f"{bytes_per_s / 1e6:.1f} MB/s" if bytes_per_s else "0"


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

"""``kvhearth version``."""

from __future__ import annotations

from typing import Annotated

import typer

from kvhearth.version import PROTOCOL_VERSION, __version__
from kvhearth_server.cli.output import AsJson, say_json

EPILOG = "Example: kvhearth version --json"


def version(as_json: AsJson = False) -> None:
    """Print the versions of this distribution and of its protocol."""
    if as_json:
        say_json({"version": __version__, "protocol": PROTOCOL_VERSION})
    else:
        typer.echo(f"kvhearth {__version__} (protocol {PROTOCOL_VERSION})")


def _message(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def option(
    wanted: Annotated[
        bool,
        typer.Option("--version", callback=_message, is_eager=True, help="Print the versions."),
    ] = False,
) -> None:
    """Options of the command itself, before a verb."""

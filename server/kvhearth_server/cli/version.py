"""``kvhearth version``."""

from __future__ import annotations

import typer

from kvhearth.version import PROTOCOL_VERSION, __version__


def version() -> None:
    """Print the versions of this distribution and of its protocol."""
    typer.echo(f"kvhearth {__version__} (protocol {PROTOCOL_VERSION})")

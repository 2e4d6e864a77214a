"""``kvhearth health`` for the arguments that ``liveness`` leaves to the whole command line."""

from __future__ import annotations

from typing import Annotated

import typer

from kvhearth_server.cli import liveness
from kvhearth_server.cli.admin_client import directory
from kvhearth_server.cli.output import AsJson, SocketDir

EPILOG = "Example: kvhearth health --wait 30 || echo 'not serving'"


def health(
    socket_dir: SocketDir = None,
    wait_s: Annotated[
        float, typer.Option("--wait", help="Wait up to this long.", metavar="SECONDS", min=0)
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Exit with 0 if the daemon serves and with 1 if it does not.

    A degraded SSD tier is a warning only: such a daemon serves. Needs no token.
    """
    raise typer.Exit(liveness.run(str(directory(socket_dir)), wait_s, as_json=as_json))

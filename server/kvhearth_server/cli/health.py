"""``kvhearth health``: what a container's HEALTHCHECK runs."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.cli.options import AsJson, SocketDir
from kvhearth_server.cli.output import note, say_json, waiting
from kvhearth_server.cli.reach import Reach

EPILOG = "Example: kvhearth health --wait 30 || echo 'not serving'"
_PAUSE_S = 0.1


def health(
    socket_dir: SocketDir = None,
    wait_s: Annotated[
        float, typer.Option("--wait", help="Wait up to so many seconds.", metavar="SECONDS", min=0)
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Exit with 0 if the daemon serves and with 1 if it does not. Needs no token."""
    end = time.monotonic() + wait_s
    with waiting("waiting for the daemon"):
        problem = _problem(socket_dir)
        while problem and time.monotonic() < end:
            time.sleep(_PAUSE_S)
            problem = _problem(socket_dir)
    if as_json:
        say_json({"serving": not problem, "problem": problem})
    elif not problem:
        typer.echo("serving")
    if problem:
        note(f"kvhearth: error: {problem}")
        raise typer.Exit(1)


def _problem(socket_dir: SocketDir) -> str:
    """Why the daemon does not serve; empty if it does."""
    try:
        with Reach(socket_dir) as daemon:
            return "" if daemon.serving() else "the daemon drains: it takes no stores"
    except KVHearthError as error:
        if error.reason is Reason.CONFIG_INVALID:
            raise
        return error.message

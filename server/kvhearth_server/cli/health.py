"""``kvhearth health``: what a container's HEALTHCHECK runs."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.cli import ssd_shown
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
    """Exit with 0 if the daemon serves and with 1 if it does not.

    A daemon whose SSD tier is degraded serves. What is wrong with it is told to those who may
    read the admin token; all others need none.
    """
    end = time.monotonic() + wait_s
    with waiting("waiting for the daemon"):
        problem, degraded = _look(socket_dir)
        while problem and time.monotonic() < end:
            time.sleep(_PAUSE_S)
            problem, degraded = _look(socket_dir)
    if as_json:
        say_json({"serving": not problem, "problem": problem, "degraded": degraded})
    elif not problem:
        typer.echo("serving")
    for reason in degraded:
        note(f"kvhearth: warning: the SSD tier is degraded: {reason}")
    if problem:
        note(f"kvhearth: error: {problem}")
        raise typer.Exit(1)


def _look(socket_dir: SocketDir) -> tuple[str, list[str]]:
    """Why the daemon does not serve, empty if it does; and what is not as it should be though it
    serves.
    """
    try:
        with Reach(socket_dir) as daemon:
            if daemon.serving():
                return "", _degraded(daemon)
            return "the daemon drains: it takes no stores", []
    except KVHearthError as error:
        if error.reason is Reason.CONFIG_INVALID:
            raise
        return error.message, []


def _degraded(daemon: Reach) -> list[str]:
    """What is wrong with the SSD tier; nothing where we may not ask."""
    try:
        return ssd_shown.reasons(daemon.stats().ssd)
    except KVHearthError:
        return []

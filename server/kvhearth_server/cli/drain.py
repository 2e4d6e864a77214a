"""``kvhearth drain``."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kvhearth.proto.v1 import admin_pb2
from kvhearth_server.cli.admin_client import AdminClient
from kvhearth_server.cli.output import AsJson, SocketDir, note, say_json, waiting

EPILOG = "Example: kvhearth drain --wait 60 && systemctl restart kvhearth"
_PAUSE_S = 0.2


def drain(
    socket_dir: SocketDir = None,
    wait_s: Annotated[
        float,
        typer.Option(
            "--wait",
            help="Wait up to this long until no lease or reservation is held.",
            metavar="SECONDS",
            min=0,
        ),
    ] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Make the daemon refuse new stores and sessions, as before a shutdown;
    reads continue.

    Only a restart undoes it. With --wait it exits with 1 if sessions still hold
    something when the time is over.
    """
    end = time.monotonic() + wait_s
    with AdminClient(socket_dir) as daemon, waiting("draining"):
        daemon.drain()
        found = daemon.stats()
        while _held(found) and time.monotonic() < end:
            time.sleep(_PAUSE_S)
            found = daemon.stats()
    reserved = sum(part.reserved_bytes for part in found.segments)
    if as_json:
        counts = {"sessions": found.sessions, "leases": found.leases, "reserved_bytes": reserved}
        say_json({"boot_id": found.boot_id, "draining": found.draining, **counts})
    else:
        typer.echo(
            f"draining: {found.sessions} sessions, {found.leases} leases and {reserved} reserved "
            "bytes are left"
        )
    if wait_s and _held(found):
        note(f"kvhearth: error: not quiet after {wait_s:g} s")
        raise typer.Exit(1)


def _held(found: admin_pb2.StatsResponse) -> bool:
    return bool(found.leases or sum(part.reserved_bytes for part in found.segments))

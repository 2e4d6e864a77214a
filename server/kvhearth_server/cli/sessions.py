"""``kvhearth sessions``."""

from __future__ import annotations

from kvhearth_server.cli.admin_client import AdminClient
from kvhearth_server.cli.output import (
    AsJson,
    SocketDir,
    console,
    note,
    plain,
    row,
    say_json,
    short,
    table,
)

EPILOG = "Example: kvhearth sessions --json | jq '.sessions[].pid'"


def sessions(socket_dir: SocketDir = None, as_json: AsJson = False) -> None:
    """List attached processes, and detached ones that may still be writing."""
    with AdminClient(socket_dir) as daemon:
        reply = daemon.sessions()
    if as_json:
        say_json(plain(reply))
        return
    if not reply.sessions:
        note("no process is attached")
        return
    heads = ("session", "tenant", "engine", "incarnation", "role", "pid", "namespace", "state")
    shown = table(*heads, right=("session", "incarnation", "pid"))
    for one in reply.sessions:
        rank = f"rank {one.rank} of {one.world_size}" if one.rank >= 0 else ""
        role = " + ".join(filter(None, ("scheduler" if one.scheduler else "", rank)))
        numbers = (str(one.session), one.tenant, one.engine_id, str(one.incarnation))
        row(shown, *numbers, role, str(one.pid), short(one.namespace), one.state)
    console().print(shown)

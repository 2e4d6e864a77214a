"""``kvhearth leases``."""

from __future__ import annotations

from kvhearth_server.cli.admin_client import AdminClient
from kvhearth_server.cli.output import (
    AsJson,
    SocketDir,
    console,
    duration,
    note,
    plain,
    row,
    say_json,
    short,
    size,
    table,
)

EPILOG = "Example: kvhearth leases --json | jq '.groups[] | select(.oldest_s > 60)'"


def leases(socket_dir: SocketDir = None, as_json: AsJson = False) -> None:
    """List engines that hold leases, oldest lease first.

    Slots and bytes with several leases are counted once per lease.
    """
    with AdminClient(socket_dir) as daemon:
        reply = daemon.leases()
    if as_json:
        say_json(plain(reply))
        return
    if not reply.groups:
        note("nobody holds a lease")
        return
    heads = ("tenant", "engine", "namespace", "leases", "slots", "bytes", "oldest")
    shown = table(*heads, right=heads[3:])
    for one in reply.groups:
        counts = (str(one.leases), str(one.slots), size(one.bytes), duration(one.oldest_s))
        row(shown, one.tenant, one.engine_id, short(one.namespace), *counts)
    console().print(shown)

"""``kvhearth stat``."""

from __future__ import annotations

from rich.table import Table

from kvhearth.proto.v1 import admin_pb2
from kvhearth_server.cli import ssd_shown
from kvhearth_server.cli.options import AsJson, SocketDir
from kvhearth_server.cli.output import (
    console,
    duration,
    facts,
    percent,
    plain,
    row,
    say_json,
    size,
    table,
)
from kvhearth_server.cli.reach import Reach

EPILOG = "Example: kvhearth stat --json | jq .counters.hit_keys"


def stat(socket_dir: SocketDir = None, as_json: AsJson = False) -> None:
    """Show memory by segment, the SSD tier, who is there, and every counter since the start."""
    with Reach(socket_dir) as daemon:
        found = daemon.stats()
    if as_json:
        say_json(plain(found))
        return
    out = console()
    out.print(summary(found))
    out.print()
    out.print(segments(found))
    out.print()
    if found.HasField("ssd"):
        out.print(ssd_shown.summary(found.ssd))
        out.print()
        out.print(ssd_shown.directories(found.ssd))
        out.print()
    out.print(facts([(name, found.counters[name]) for name in sorted(found.counters)]))


def summary(found: admin_pb2.StatsResponse) -> Table:
    """What the daemon is and whom it serves."""
    asked, hits = found.counters["lookup_keys"], found.counters["hit_keys"]
    return facts(
        [
            ("version", found.version),
            ("boot", found.boot_id),
            ("up", duration(found.uptime_s)),
            ("state", "draining" if found.draining else "serving"),
            ("blocks", found.blocks),
            ("sessions", f"{found.sessions} in {found.groups} groups"),
            ("leases", f"{found.leases}, pins {found.pins}"),
            ("hits", f"{percent(hits, asked)} of {asked} keys"),
        ]
    )


def segments(found: admin_pb2.StatsResponse) -> Table:
    """One row a tenant's segment."""
    heads = ("segment", "pages", "bytes", "used", "free", "reserved", "held", "quarantined")
    shown = table(*heads, right=heads[2:])
    for part in found.segments:
        used = percent(part.bytes - part.free_bytes, part.bytes)
        rest = (part.free_bytes, part.reserved_bytes, part.held_bytes, part.quarantined_bytes)
        row(shown, part.tenant, part.page_kind, size(part.bytes), used, *map(size, rest))
    return shown

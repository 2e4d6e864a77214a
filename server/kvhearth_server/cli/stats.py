"""Verbs that look at a daemon once: ``stat``, and the long way of ``health``."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress_bar import ProgressBar
from rich.table import Table

from kvhearth_server.cli import liveness
from kvhearth_server.cli.admin_client import daemon_at, directory
from kvhearth_server.cli.output import (
    AsJson,
    SocketDir,
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
from kvhearth_server.engine.snapshot import SsdStats, Stats

_BAR_COLUMNS = 30


def _reasons(found: SsdStats) -> list[str]:
    """Return the tier's degradations, each as a sentence."""
    by_directory = [reason for each in found.directories for reason in each.reasons]
    return [*by_directory, *filter(None, [found.interface_broken])]


def _state(found: SsdStats) -> str:
    """Return the tier's state in a few words."""
    words = ["degraded" if _reasons(found) else "healthy"]
    if found.recovering:
        words.append(f"reading back {found.files_recovered} of {found.files_found} files")
    return ", ".join(words)


def _ssd(found: SsdStats) -> Table:
    """Return a table of the tier's content and activity."""
    written, stored = found.counters.get("written_bytes", 0), found.counters.get("stored_bytes", 0)
    rows = [
        ("SSD", f"{_state(found)}, by {found.interface}"),
        ("blocks on SSD", f"{found.blocks} of {size(found.live_bytes)}"),
        ("going down, up", f"{found.demoting_blocks}, {found.promoting_blocks} blocks"),
        ("requests", f"{found.queued_writes} writes, {found.queued_reads} reads"),
        ("reads take", _reads(found)),
        ("written", f"{size(written)}, {written / stored:.2f} for each byte stored")
        if stored
        else ("written", size(written)),
    ]
    if found.budget_left_bytes is not None:
        rows.append(("budget left", size(max(0, found.budget_left_bytes))))
    return facts([*rows, *(("degraded", reason) for reason in _reasons(found))])


def _directories(found: SsdStats, *, bars: bool = False) -> Table:
    heads = ("directory", *([""] if bars else []), "files", "of", "used", "open", "sealed", "free")
    shown = table(*heads, right=heads[1:])
    for each in found.directories:
        bar = ProgressBar(
            total=each.capacity_bytes or 1, completed=each.file_bytes, width=_BAR_COLUMNS
        )
        counts = (each.segments[name] for name in ("open", "sealed", "free"))
        row(
            shown,
            each.path,
            *([bar] if bars else []),
            size(each.file_bytes),
            size(each.capacity_bytes),
            percent(each.file_bytes, each.capacity_bytes),
            *map(str, counts),
        )
    return shown


def _reads(found: SsdStats) -> str:
    """Return latency and rate of reads; before the first read there are only assumptions."""
    if not found.counters.get("loaded_blocks", 0):
        return "-"
    return f"{found.read_latency_s * 1e3:.2f} ms, {size(round(found.read_bytes_per_s))}/s"


STAT_EPILOG = "Example: kvhearth stat --json | jq .counters.hit_keys"


def stat(socket_dir: SocketDir = None, as_json: AsJson = False) -> None:
    """Show memory by segment, the SSD tier with tenants' quotas, and every
    counter since the start.
    """
    found = daemon_at(socket_dir).stats()
    if as_json:
        say_json(plain(found))
        return
    out = console()
    parts = [_daemon(found), _segments(found)]
    if found.ssd is not None:
        parts += [_ssd(found.ssd), _directories(found.ssd), _tenants(found.ssd)]
    for part in parts:
        out.print(part)
        out.print()
    out.print(facts([(name, found.counters[name]) for name in sorted(found.counters)]))


def _daemon(found: Stats) -> Table:
    asked, hits = found.counters.get("lookup_keys", 0), found.counters.get("hit_keys", 0)
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


def _tenants(ssd: SsdStats) -> Table:
    """Return a table with one row for each tenant's quota on SSD."""
    shown = table("tenant", "on SSD", "quota", right=("on SSD", "quota"))
    for each in ssd.tenants:
        row(shown, each.tenant, size(each.used_bytes), size(each.quota_bytes))
    return shown


def _segments(found: Stats) -> Table:
    heads = ("segment", "pages", "bytes", "used", "free", "reserved", "held", "quarantined")
    shown = table(*heads, right=heads[2:])
    for part in found.segments:
        used = percent(part.capacity_bytes - part.free_bytes, part.capacity_bytes)
        rest = (part.free_bytes, part.reserved_bytes, part.held_bytes, part.quarantined_bytes)
        row(shown, part.tenant, part.page_kind, size(part.capacity_bytes), used, *map(size, rest))
    return shown


HEALTH_EPILOG = "Example: kvhearth health --wait 30 || echo 'not serving'"


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

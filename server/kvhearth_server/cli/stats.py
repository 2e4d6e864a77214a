"""Verbs that watch a daemon: ``stat``, ``top``, and the long way of ``health``."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from kvhearth.proto.v1 import admin_pb2
from kvhearth_server.cli import liveness
from kvhearth_server.cli.admin_client import AdminClient, directory
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
    short,
    size,
    table,
)

_BAR_COLUMNS = 30
_COUNTS = frozenset({"sessions", "namespaces", "leases"})
"""Shares that are numbers; all others are bytes."""


def _reasons(found: admin_pb2.SsdStats) -> list[str]:
    """Return the tier's degradations, each as a sentence."""
    by_directory = [reason for each in found.directories for reason in each.reasons]
    return [*by_directory, *filter(None, [found.interface_broken])]


def _state(found: admin_pb2.SsdStats) -> str:
    """Return the tier's state in a few words."""
    words = ["degraded" if _reasons(found) else "healthy"]
    if found.recovering:
        words.append(f"reading back {found.files_recovered} of {found.files_found} files")
    return ", ".join(words)


def _ssd(found: admin_pb2.SsdStats) -> Table:
    """Return a table of the tier's content and activity."""
    written, stored = found.counters["written_bytes"], found.counters["stored_bytes"]
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
    if found.HasField("budget_left_bytes"):
        rows.append(("budget left", size(max(0, found.budget_left_bytes))))
    return facts([*rows, *(("degraded", reason) for reason in _reasons(found))])


def _directories(found: admin_pb2.SsdStats, *, bars: bool = False) -> Table:
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


def _reads(found: admin_pb2.SsdStats) -> str:
    """Return latency and rate of reads; before the first read there are only assumptions."""
    if not found.counters["loaded_blocks"]:
        return "-"
    return f"{found.read_latency_s * 1e3:.2f} ms, {size(round(found.read_bytes_per_s))}/s"


STAT_EPILOG = "Example: kvhearth stat --json | jq .counters.hit_keys"


def stat(socket_dir: SocketDir = None, as_json: AsJson = False) -> None:
    """Show memory by segment, tenants' shares, the SSD tier, and every counter
    since the start.
    """
    with AdminClient(socket_dir) as daemon:
        found = daemon.stats()
    if as_json:
        say_json(plain(found))
        return
    out = console()
    parts = [_daemon(found), _segments(found), _shares(found.shares)]
    if found.HasField("ssd"):
        parts += [_ssd(found.ssd), _directories(found.ssd)]
    for part in parts:
        out.print(part)
        out.print()
    out.print(facts([(name, found.counters[name]) for name in sorted(found.counters)]))


def _daemon(found: admin_pb2.StatsResponse) -> Table:
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


def _shares(found: Iterable[admin_pb2.ShareStats]) -> Table:
    """Return a table with one row for each tenant and resource."""
    heads = ("tenant", "share", "used", "floor", "cap", "room", "refused")
    shown = table(*heads, right=heads[2:])
    for part in found:
        write = str if part.share in _COUNTS else size
        numbers = (part.used, part.floor, part.cap, part.room)
        row(shown, part.tenant, part.share, *map(write, numbers), str(part.refused))
    return shown


def _segments(found: admin_pb2.StatsResponse) -> Table:
    heads = ("segment", "pages", "bytes", "used", "free", "reserved", "held", "quarantined")
    shown = table(*heads, right=heads[2:])
    for part in found.segments:
        used = percent(part.bytes - part.free_bytes, part.bytes)
        rest = (part.free_bytes, part.reserved_bytes, part.held_bytes, part.quarantined_bytes)
        row(shown, part.tenant, part.page_kind, size(part.bytes), used, *map(size, rest))
    return shown


TOP_EPILOG = "Example: kvhearth top; kvhearth top --once --json"
REFRESH_S = 1.0
_SESSIONS_SHOWN = 20
_RATES = (
    ("lookups", "lookups"),
    ("keys asked", "lookup_keys"),
    ("keys hit", "hit_keys"),
    ("keys on SSD only", "below_keys"),
    ("blocks stored", "stored_blocks"),
    ("blocks evicted", "evicted_blocks"),
    ("blocks to SSD", "demoted_blocks"),
    ("blocks from SSD", "promoted_blocks"),
    ("refusals", "refusals"),
    ("checksum failures", "checksum_failures"),
)
"""Rates per second that are shown, and the counter (all its labels together) behind each."""


@dataclass(frozen=True)
class View:
    """One look at the daemon."""

    at: float
    stats: admin_pb2.StatsResponse
    sessions: admin_pb2.ListSessionsResponse
    leases: admin_pb2.ListLeasesResponse

    def count(self, name: str) -> int:
        """Return a counter since the start, all its labels together."""
        found: Mapping[str, int] = self.stats.counters
        return sum(n for key, n in found.items() if key.partition("{")[0] == name)


def top(
    socket_dir: SocketDir = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch hits, rates, memory, SSD, engines and leases; stop with Ctrl-C.

    Rates are of the last second; the first screen shows rates since the start.
    Into a pipe it prints one report per second; with --json each report is one
    object on a line.
    """
    with AdminClient(socket_dir) as daemon:
        view, before = _look(daemon), None
        if once:
            _print(view, before, as_json=as_json)
            return
        try:
            _watch(daemon, view, as_json=as_json)
        except KeyboardInterrupt:
            return


def _watch(daemon: AdminClient, view: View, *, as_json: bool) -> None:
    before: View | None = None
    if as_json or not console().is_terminal:
        while True:
            _print(view, before, as_json=as_json)
            time.sleep(REFRESH_S)
            view, before = _look(daemon), view
    with Live(_drawn(view, before), console=console(), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(REFRESH_S)
            view, before = _look(daemon), view
            live.update(_drawn(view, before), refresh=True)


def _look(daemon: AdminClient) -> View:
    return View(time.monotonic(), daemon.stats(), daemon.sessions(), daemon.leases())


def _print(view: View, before: View | None, *, as_json: bool) -> None:
    if as_json:
        say_json(as_object(view, before))
    else:
        console().print(_drawn(view, before), "")
    sys.stdout.flush()  # in a pipe a look must not wait for the next ones


def rates(view: View, before: View | None) -> dict[str, float]:
    """Return counts per second between two looks at one boot, else since the start; by counter."""
    if before is None or before.stats.boot_id != view.stats.boot_id:
        span, base = view.stats.uptime_s, dict.fromkeys((name for _, name in _RATES), 0)
    else:
        span, base = view.at - before.at, {name: before.count(name) for _, name in _RATES}
    return {name: (view.count(name) - base[name]) / max(span, 0.001) for _, name in _RATES}


def as_object(view: View, before: View | None) -> dict[str, Any]:
    """Return a look as JSON: statistics, rates per second, sessions and leases."""
    return {
        "stats": plain(view.stats),
        "rates": rates(view, before),
        "sessions": plain(view.sessions.sessions),
        "leases": plain(view.leases.groups),
    }


def _drawn(view: View, before: View | None) -> RenderableType:
    found = view.stats
    state = "[yellow]draining[/]" if found.draining else "[green]serving[/]"
    oldest = max((one.oldest_s for one in view.leases.groups), default=0.0)
    head = (
        f"[bold]kvhearth {found.version}[/]  {state}  up {duration(found.uptime_s)}  "
        f"boot {short(found.boot_id)}\n{found.blocks} blocks  {found.sessions} sessions in "
        f"{found.groups} groups  {found.leases} leases (oldest {duration(oldest)})  "
        f"{found.pins} pins"
    )
    parts = [_memory(found), _speeds(view, before), _engines(view)]
    if found.HasField("ssd"):
        head += f"\nSSD {_state(found.ssd)}, {found.ssd.blocks} blocks"
        parts.insert(1, _directories(found.ssd, bars=True))
    return Group(head, *(piece for part in parts for piece in ("", part)))


def _memory(found: admin_pb2.StatsResponse) -> Table:
    heads = ("segment", "pages", "", "used", "of", "held", "quarantined")
    shown = table(*heads, right=heads[3:])
    for part in found.segments:
        used = part.bytes - part.free_bytes
        bar = ProgressBar(total=part.bytes or 1, completed=used, width=_BAR_COLUMNS)
        sizes = (used, part.bytes, part.held_bytes, part.quarantined_bytes)
        row(shown, part.tenant, part.page_kind, bar, *map(size, sizes))
    return shown


def _speeds(view: View, before: View | None) -> Table:
    shown = table("", "per second", "since start", right=("per second", "since start"))
    now = rates(view, before)
    for title, name in _RATES:
        row(shown, title, f"{now[name]:,.1f}", f"{view.count(name):,}")
    ratios = (percent(now["hit_keys"], now["lookup_keys"]), _total_ratio(view))
    row(shown, "hit ratio", *ratios)
    return shown


def _total_ratio(view: View) -> str:
    return percent(view.count("hit_keys"), view.count("lookup_keys"))


def _engines(view: View) -> Table:
    shown = table("engine", "tenant", "rank", "pid", "state", right=("rank", "pid"))
    listed = view.sessions.sessions
    for one in listed[:_SESSIONS_SHOWN]:
        rank = str(one.rank) if one.rank >= 0 else "-"
        row(shown, one.engine_id, one.tenant, rank, str(one.pid), one.state)
    if len(listed) > _SESSIONS_SHOWN:
        row(shown, f"and {len(listed) - _SESSIONS_SHOWN} more", "", "", "", "")
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

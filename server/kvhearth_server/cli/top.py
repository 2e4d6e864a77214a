"""Verbs that watch a daemon: ``top`` and ``events``."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvhearth_server.cli.admin_client import AdminClient, daemon_at
from kvhearth_server.cli.output import (
    AsJson,
    SocketDir,
    console,
    duration,
    percent,
    plain,
    printable,
    row,
    say_json,
    short,
    size,
    table,
)
from kvhearth_server.engine.snapshot import EngineNow, Stats
from kvhearth_server.engine.watch import Event
from kvhearth_server.transport import reports

TOP_EPILOG = "Example: kvhearth top; kvhearth top --once --json"
EVENTS_EPILOG = "Example: kvhearth events; kvhearth events --json | jq -r .reason"
REFRESH_S = 1.0
_ROWS_OFF_TERMINAL = 60
_BAR_COLUMNS = 12
_MEMORY_ROWS = 4
_EVENT_ROWS = 4
_HEAD_ROWS = 12
"""Lines of the screen that are there whatever the daemon holds: figures, heads and gaps."""
_ONE_BYTE_RATES = (
    ("loads", "leased_bytes"),
    ("stores", "stored_bytes"),
    ("to SSD", "demoted_bytes"),
    ("from SSD", "promoted_bytes"),
)
_RATES = (
    *("lookups", "lookup_keys", "hit_keys", "below_keys", "stored_blocks", "evicted_blocks"),
    *("demoted_blocks", "promoted_blocks", "refusals", "checksum_failures"),
    *(name for _, name in _ONE_BYTE_RATES),
)
"""Counters whose rates per second are shown or told, all labels of one together."""


@dataclass(frozen=True)
class View:
    """One look at the daemon."""

    at: float
    stats: Stats
    sessions: reports.Sessions
    leases: reports.Leases

    def count(self, name: str) -> int:
        """Return a counter since the start, all its labels together."""
        found: Mapping[str, int] = self.stats.counters
        return sum(n for key, n in found.items() if key.partition("{")[0] == name)


def top(
    socket_dir: SocketDir = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch hit ratio, bandwidth, memory, SSD and engines; stop with Ctrl-C.

    Rates are of the last second; the first screen shows rates since the start.
    Into a pipe it prints one report per second; with --json each report is one
    object on a line.
    """
    daemon = daemon_at(socket_dir)
    view, before = _look(daemon), None
    if once:
        _print(view, before, as_json=as_json)
        return
    with contextlib.suppress(KeyboardInterrupt):
        _watch(daemon, view, as_json=as_json)


def _watch(daemon: AdminClient, view: View, *, as_json: bool) -> None:
    before: View | None = None
    if as_json or not console().is_terminal:
        while True:
            _print(view, before, as_json=as_json)
            time.sleep(REFRESH_S)
            view, before = _look(daemon), view
    shown = console()
    drawn = _drawn(view, before, shown.height)
    with Live(drawn, console=shown, auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(REFRESH_S)
            view, before = _look(daemon), view
            live.update(_drawn(view, before, shown.height), refresh=True)


def _look(daemon: AdminClient) -> View:
    return View(time.monotonic(), daemon.stats(), daemon.sessions(), daemon.leases())


def _print(view: View, before: View | None, *, as_json: bool) -> None:
    if as_json:
        say_json(as_object(view, before))
    else:
        console().print(_drawn(view, before, _ROWS_OFF_TERMINAL), "")
    sys.stdout.flush()  # in a pipe a look must not wait for the next ones


def _span_s(view: View, before: View | None) -> float:
    """Return the time between two looks at one boot, else since the start, in seconds."""
    same = before is not None and before.stats.boot_id == view.stats.boot_id
    span_s = view.at - before.at if before is not None and same else view.stats.uptime_s
    return max(span_s, 0.001)


def rates(view: View, before: View | None) -> dict[str, float]:
    """Return counts per second between two looks at one boot, else since the start; by counter."""
    base = dict.fromkeys(_RATES, 0)
    if before is not None and before.stats.boot_id == view.stats.boot_id:
        base = {name: before.count(name) for name in _RATES}
    span_s = _span_s(view, before)
    return {name: (view.count(name) - base[name]) / span_s for name in _RATES}


def as_object(view: View, before: View | None) -> dict[str, Any]:
    """Return a look as JSON: statistics, rates per second, sessions and leases."""
    return {
        "stats": plain(view.stats),
        "rates": rates(view, before),
        "sessions": plain(view.sessions)["sessions"],
        "leases": plain(view.leases)["groups"],
    }


def speed(bytes_per_s: float) -> str:
    """Format a bandwidth for people, in decimal units as drives and networks are sold by."""
    if bytes_per_s >= 1e9:
        return f"{bytes_per_s / 1e9:.2f} GB/s"
    return f"{bytes_per_s / 1e6:.1f} MB/s" if bytes_per_s else "0"


def verdict(found: Stats) -> tuple[str, str]:
    """Return a colour and one sentence: what an operator has to know first."""
    if found.draining:
        return "yellow", "draining: stores and new engines are refused"
    damaged = [each for each in found.recent if each.kind in ("checksum", "bug")]
    if damaged:
        return "red", f"{damaged[-1].kind}: {damaged[-1].reason}; see kvhearth events"
    if found.ssd is not None:
        bad = [reason for each in found.ssd.directories for reason in each.reasons]
        if bad or found.ssd.interface_broken:
            return "yellow", f"SSD degraded: {(bad or [found.ssd.interface_broken])[0]}"
    silent = [each for each in found.engines if each.attached and each.heartbeat_age_s > 60]
    if silent:
        return (
            "yellow",
            f"{silent[0].engine_id} is silent for {duration(silent[0].heartbeat_age_s)}",
        )
    return "green", "serving" if found.groups else "serving, no engine is attached"


def _drawn(view: View, before: View | None, rows: int) -> RenderableType:
    """Return a screen of at most ``rows`` lines, and at most 80 columns unless names are long."""
    found = view.stats
    colour, text = verdict(found)
    head = Text.assemble(
        (f"kvhearth {found.version}  ", "bold"), (printable(text), colour), no_wrap=True
    )
    head.truncate(80, overflow="ellipsis")
    up = (
        f"up {duration(found.uptime_s)}  boot {short(found.boot_id)}  blocks {found.blocks}  "
        f"processes {found.sessions}  leases {found.leases}"
    )
    tiers = _tiers(found)
    events = _events(found.recent[-_EVENT_ROWS:])
    room = rows - _HEAD_ROWS - tiers.row_count - events.row_count
    engines = _engines(view, before, max(2, room))
    return Group(head, Text(up), "", _hits(view, before), "", tiers, "", engines, "", events)


def _hits(view: View, before: View | None) -> RenderableType:
    now = rates(view, before)
    asked, hits, below = now["lookup_keys"], now["hit_keys"], now["below_keys"]
    total = percent(view.count("hit_keys") + view.count("below_keys"), view.count("lookup_keys"))
    first = (
        f"hit ratio {percent(hits + below, asked)} (memory {percent(hits, asked)}, SSD "
        f"{percent(below, asked)}), {total} since start"
    )
    second = "  ".join(f"{title} {speed(now[name])}" for title, name in _ONE_BYTE_RATES)
    third = (
        f"per second: {now['lookups']:,.0f} lookups, {asked:,.0f} keys, "
        f"{now['stored_blocks']:,.0f} stored, {now['evicted_blocks']:,.0f} evicted, "
        f"{now['refusals']:,.0f} refused"
    )
    return Group(Text(first, style="bold"), Text(second), Text(third))


def _tiers(found: Stats) -> Table:
    """Return a row with a bar for each tenant's memory and each SSD directory."""
    shown = table(
        "tier", "", "used", "of", "held", "quarantined", right=("used", "of", "held", "quarantined")
    )
    for part in found.segments[:_MEMORY_ROWS]:
        used = part.capacity_bytes - part.free_bytes
        bar = ProgressBar(total=part.capacity_bytes or 1, completed=used, width=_BAR_COLUMNS)
        sizes = map(size, (used, part.capacity_bytes, part.held_bytes, part.quarantined_bytes))
        row(shown, _cut(f"memory {part.tenant}", 18), bar, *sizes)
    for each in found.ssd.directories[:_MEMORY_ROWS] if found.ssd is not None else ():
        files, most = each.file_bytes, each.capacity_bytes
        bar = ProgressBar(total=most or 1, completed=files, width=_BAR_COLUMNS)
        row(shown, _cut(f"SSD {each.path}", 18), bar, size(files), size(most), "", "")
    return shown


def _cut(text: str, most: int) -> str:
    """Return a text with its middle left out if it is longer than ``most`` columns."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-(most - 1 - half) :]}"


def _engines(view: View, before: View | None, most: int) -> Table:
    heads = ("engine", "hit tokens", "loads", "stores", "leases", "oldest", "heartbeat")
    shown = table(*heads, right=heads[1:])
    span_s = _span_s(view, before)
    old = {}
    if before is not None and before.stats.boot_id == view.stats.boot_id:
        old = {(each.tenant, each.engine_id): each for each in before.stats.engines}
    listed = sorted(view.stats.engines, key=lambda each: -(each.load_bytes + each.store_bytes))
    if len(listed) > most:
        most -= 1
    for each in listed[:most]:
        last = old.get((each.tenant, each.engine_id), EngineNow("", ""))
        row(
            shown,
            _cut(each.engine_id, 24),
            percent(each.hit_tokens, each.asked_tokens),
            speed(max(0, each.load_bytes - last.load_bytes) / span_s),
            speed(max(0, each.store_bytes - last.store_bytes) / span_s),
            str(each.leases),
            duration(each.oldest_lease_s) if each.leases else "-",
            duration(each.heartbeat_age_s) if each.attached else "left",
        )
    if len(listed) > most:
        row(shown, f"and {len(listed) - most} more", *[""] * 6)
    return shown


def _events(found: Sequence[Event]) -> Table:
    shown = table("last events", "what", "amount", "who", right=("amount",))
    for each in reversed(found):
        row(shown, *_words(each, each.count))
    return shown


def _words(event: Event, count: int) -> tuple[str, str, str, str]:
    """Return an event as cells: time, kind and reason, amount, subject."""
    at = time.strftime("%H:%M:%S", time.localtime(event.last_at))
    amount = size(count) if event.kind == "quarantine" else f"{count:,}"
    if event.kind == "slow":
        amount += f", {event.seconds:.2f} s"
    return at, f"{event.kind} {event.reason}".replace("_", " "), amount, _cut(event.subject, 34)


def events(
    socket_dir: SocketDir = None,
    once: Annotated[bool, typer.Option("--once", help="Print what is known and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Follow evictions, rejections, quarantines, slow calls and engines that
    come and go, each with its reason; stop with Ctrl-C.

    It begins with what happened last. With --json each event is one object on
    a line; an event that goes on is told again, with what was added to it.
    """
    with contextlib.suppress(KeyboardInterrupt):
        for event, added in _followed(daemon_at(socket_dir), once=once):
            if as_json:
                say_json({**plain(event), "added": added})
            else:
                at, what, amount, subject = _words(event, added)
                console().print(Text(printable(f"{at}  {what:28}  {amount:>12}  {subject}")))
            sys.stdout.flush()


def _followed(daemon: AdminClient, *, once: bool) -> Iterator[tuple[Event, int]]:
    """Yield each event with what was added to it since it was last yielded; forever unless
    ``once``.
    """
    boot, last, told = "", 0, dict[tuple[float, str, str, str], int]()
    while True:
        found = daemon.stats()
        if found.boot_id != boot:
            boot, last = found.boot_id, 0
            told.clear()
        here = dict[tuple[float, str, str, str], int]()
        for event in found.recent:
            place = (event.first_at, event.kind, event.reason, event.subject)
            here[place] = event.count
            if event.number > last:
                yield event, event.count - told.get(place, 0)
        last = max([last, *(event.number for event in found.recent)])
        told = here
        if once:
            return
        time.sleep(REFRESH_S)

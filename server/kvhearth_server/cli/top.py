"""Verbs that watch a daemon: ``top`` and ``events``."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kvhearth_server.cli.admin_client import AdminClient, daemon_at
from kvhearth_server.cli.liveness import printable
from kvhearth_server.cli.output import (
    AsJson,
    SocketDir,
    console,
    duration,
    flag,
    percent,
    plain,
    say,
    say_json,
    short,
    size,
    speed,
    table,
)
from kvhearth_server.engine.snapshot import EngineNow, Stats
from kvhearth_server.engine.watch import Event

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

    def count(self, name: str) -> int:
        """Return a counter since the start, all its labels together."""
        found = self.stats.counters
        return sum(n for key, n in found.items() if key.partition("{")[0] == name)


def top(
    socket_dir: SocketDir = None,
    once: Annotated[bool, flag("--once", "Print once and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch hit ratio, bandwidth, memory, SSD and engines; stop with Ctrl-C.

    Rates are of the last second; the first screen shows rates since the start.
    Into a pipe it prints one report per second; with --json each report is one
    object on a line.
    """
    daemon, shown = daemon_at(socket_dir), console()
    looks = _looks(daemon)
    with contextlib.suppress(KeyboardInterrupt):
        if shown.is_terminal and not once and not as_json:
            drawn = _drawn(*next(looks), shown.height)
            with Live(drawn, console=shown, auto_refresh=False, screen=True) as live:
                for view, before in looks:
                    live.update(_drawn(view, before, shown.height), refresh=True)
        for view, before in looks:
            if as_json:
                report = {"stats": plain(view.stats), "rates": rates(view, before)}
                report["sessions"] = plain(daemon.sessions())["sessions"]
                say_json(report | {"leases": plain(daemon.leases())["groups"]})
            else:
                shown.print(_drawn(view, before, _ROWS_OFF_TERMINAL), "")
            sys.stdout.flush()  # in a pipe a look must not wait for the next ones
            if once:
                return


def _looks(daemon: AdminClient) -> Iterator[tuple[View, View | None]]:
    """Yield looks at the daemon, one a second, each with the last one at the same boot."""
    before: View | None = None
    while True:
        view = View(time.monotonic(), daemon.stats())
        if before is not None and before.stats.boot_id != view.stats.boot_id:
            before = None
        yield view, before
        before = view
        time.sleep(REFRESH_S)


def _span_s(view: View, before: View | None) -> float:
    """Return the time between two looks, else since the start, in seconds."""
    return max(view.stats.uptime_s if before is None else view.at - before.at, 0.001)


def rates(view: View, before: View | None) -> dict[str, float]:
    """Return counts per second between two looks, else since the start; by counter."""
    span_s = _span_s(view, before)
    base = {name: 0 if before is None else before.count(name) for name in _RATES}
    return {name: (view.count(name) - base[name]) / span_s for name in _RATES}


def verdict(found: Stats) -> tuple[str, str]:
    """Return a colour and one sentence: what an operator has to know first."""
    if found.draining:
        return "yellow", "draining: stores and new engines are refused"
    damaged = [each for each in found.recent if each.kind in ("checksum", "bug")]
    if damaged:
        return "red", f"{damaged[-1].kind}: {damaged[-1].reason}; see kvhearth events"
    if found.ssd is not None and found.ssd.reasons:
        return "yellow", f"SSD degraded: {found.ssd.reasons[0]}"
    silent = [each for each in found.engines if each.attached and each.heartbeat_age_s > 60]
    if silent:
        age = duration(silent[0].heartbeat_age_s)
        return "yellow", f"{silent[0].engine_id} is silent for {age}"
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
    if found.retained_blocks:
        hits = found.counters.get("retained_hit_blocks", 0)
        up += f"  retained {found.retained_blocks} ({hits} hits)"
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
    tiers: list[tuple[str, int, int, str, str]] = []
    for part in found.segments[:_MEMORY_ROWS]:
        used, held = part.capacity_bytes - part.free_bytes, size(part.held_bytes)
        quarantined = size(part.quarantined_bytes)
        tiers.append((f"memory {part.tenant}", used, part.capacity_bytes, held, quarantined))
    directories = found.ssd.directories[:_MEMORY_ROWS] if found.ssd is not None else []
    tiers += [
        (f"SSD {one.path}", one.file_bytes, one.capacity_bytes, "", "") for one in directories
    ]
    rows = []
    for name, used, most, *rest in tiers:
        bar = ProgressBar(total=most or 1, completed=used, width=_BAR_COLUMNS)
        rows.append((_cut(name, 18), bar, size(used), size(most), *rest))
    heads = ("tier", "", "used", "of", "held", "quarantined")
    return table(*heads, right=heads[2:], rows=rows)


def _cut(text: str, most: int) -> str:
    """Return a text with its middle left out if it is longer than ``most`` columns."""
    half = (most - 1) // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-(most - 1 - half) :]}"


def _engines(view: View, before: View | None, most: int) -> Table:
    heads = ("engine", "hit tokens", "loads", "stores", "leases", "oldest", "heartbeat")
    span_s, last = _span_s(view, before), before.stats.engines if before is not None else []
    old = {(each.tenant, each.engine_id): each for each in last}
    listed = sorted(view.stats.engines, key=lambda each: -(each.load_bytes + each.store_bytes))
    shown = listed if len(listed) <= most else listed[: most - 1]
    rows = list[tuple[str, ...]]()
    for each in shown:
        was = old.get((each.tenant, each.engine_id), EngineNow("", ""))
        cells = (
            percent(each.hit_tokens, each.asked_tokens),
            speed(max(0, each.load_bytes - was.load_bytes) / span_s),
            speed(max(0, each.store_bytes - was.store_bytes) / span_s),
            str(each.leases),
            duration(each.oldest_lease_s) if each.leases else "-",
            duration(each.heartbeat_age_s) if each.attached else "left",
        )
        rows.append((_cut(each.engine_id, 24), *cells))
    if len(shown) < len(listed):
        rows.append((f"and {len(listed) - len(shown)} more", *[""] * 6))
    return table(*heads, right=heads[1:], rows=rows)


def _events(found: Sequence[Event]) -> Table:
    rows = [_words(each, each.count) for each in reversed(found)]
    return table("last events", "what", "amount", "who", right=("amount",), rows=rows)


def _words(event: Event, count: int) -> tuple[str, str, str, str]:
    """Return an event as cells: time, kind and reason, amount, subject."""
    at = time.strftime("%H:%M:%S", time.localtime(event.last_at))
    amount = size(count) if event.kind == "quarantine" else f"{count:,}"
    if event.kind == "slow":
        amount += f", {event.seconds:.2f} s"
    return at, f"{event.kind} {event.reason}".replace("_", " "), amount, _cut(event.subject, 34)


def events(
    socket_dir: SocketDir = None,
    once: Annotated[bool, flag("--once", "Print what is known and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Follow evictions, rejections, quarantines, slow calls and engines that
    come and go, each with its reason; stop with Ctrl-C.

    It begins with what happened last. With --json each event is one object on
    a line; an event that goes on is told again, with what was added to it.
    """
    with contextlib.suppress(KeyboardInterrupt):
        for event, added in _followed(daemon_at(socket_dir), once=once):
            at, what, amount, subject = _words(event, added)
            text = printable(f"{at}  {what:28}  {amount:>12}  {subject}")
            say({**plain(event), "added": added}, text, as_json=as_json)
            sys.stdout.flush()


def _followed(daemon: AdminClient, *, once: bool) -> Iterator[tuple[Event, int]]:
    """Yield each event with what was added to it since it was last yielded; forever unless
    ``once``.
    """
    boot, last, told = "", 0, dict[tuple[float, str, str, str], int]()
    while True:
        found = daemon.stats()
        if found.boot_id != boot:
            boot, last, told = found.boot_id, 0, {}
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

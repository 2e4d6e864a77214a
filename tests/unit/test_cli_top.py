"""``kvhearth top`` on a terminal of 80 columns and 24 lines."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console
from support.cases import cases
from support.reports import report, ssd, stats

from kvhearth_server.cli.top import View, _drawn, verdict
from kvhearth_server.engine.snapshot import EngineNow, SegmentNow, Stats
from kvhearth_server.engine.watch import Event
from kvhearth_server.tiers.figures import DirectoryFigures


def full_stats(engines: int) -> Stats:
    """A daemon with many engines, long names and large numbers."""
    memory = report(SegmentNow, tenant="a" * 40, capacity_bytes=1 << 40, free_bytes=1 << 33)
    directory = report(DirectoryFigures, path="/mnt/" + "d" * 60, capacity_bytes=1 << 43)
    event = Event(1, 0.0, 0.0, "eviction", "space", "s" * 90, 123_456_789)
    return stats(
        version="0.1.0",
        boot_id="b" * 32,
        uptime_s=1e6,
        blocks=10**7,
        sessions=64,
        leases=10**5,
        groups=engines,
        segments=[memory] * 2,
        ssd=ssd(interface="libaio", directories=[directory] * 2),
        counters={"lookup_keys": 10**12, "hit_keys": 9 * 10**11, "leased_bytes": 10**15},
        engines=[
            EngineNow(
                engine_id=f"engine-{number}-" + "e" * 60,
                tenant="t",
                attached=1,
                leases=9999,
                oldest_lease_s=1e5,
                load_bytes=10**15,
                store_bytes=10**15,
                hit_tokens=9,
                asked_tokens=10,
            )
            for number in range(engines)
        ],
        recent=[event] * 30,
    )


def drawn(found: Stats) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=80, height=24, highlight=False)
    console.print(_drawn(View(0.0, found), None, 24))
    return out.getvalue().splitlines()


@cases("engines", [0, 1, 64])
def test_a_screen_of_80_by_24_shows_what_matters(engines: int) -> None:
    lines = drawn(full_stats(engines))
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "hit ratio 90.0 %" in text
    assert "GB/s" in text
    assert ("engine-0" in text) == bool(engines)
    assert ("more" in text) == (engines > 10)
    assert "eviction space" in text


def test_the_verdict_tells_the_worst_first() -> None:
    found = full_stats(1)
    assert verdict(found) == ("green", "serving")
    found.engines[0] = replace(found.engines[0], heartbeat_age_s=90)
    assert "silent" in verdict(found)[1]
    assert found.ssd is not None
    found.ssd.directories[0].reasons.append("/mnt/a is full")
    assert verdict(found) == ("yellow", "SSD degraded: /mnt/a is full")
    found.recent.append(Event(2, 0.0, 0.0, "checksum", "reader", "", 1))
    assert verdict(found)[0] == "red"
    assert verdict(replace(found, draining=True))[1].startswith("draining")

"""The watch: rates and events of a daemon, from its counters and its core."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.core_kit import Rig, keys

from kvhearth_server.core.removal import EVICTIONS
from kvhearth_server.engine.watch import EVENTS_MAX, KINDS, OPEN_S, RATES, SAMPLES_MAX, Event, Watch
from kvhearth_server.observability.counters import SLOW_S, CallTimings, Counters
from kvhearth_server.observability.metrics import COUNTERS
from kvhearth_server.transport import web


class Watched:
    """A watch on a real core, with a clock and counters of the test's own."""

    def __init__(self) -> None:
        self.rig = Rig()
        self.at = 100.0
        self.counters = Counters(COUNTERS)
        self.timings = CallTimings()
        engine: Any = SimpleNamespace(
            core=self.rig.core, counters=self.counters, timings=self.timings, now=lambda: self.at
        )
        self.watch = Watch(engine, wall=lambda: self.at)

    def look(self, after_s: float = 1.0) -> None:
        self.at += after_s
        self.watch.look()

    def kinds(self) -> list[tuple[str, str, int]]:
        return [(each.kind, each.reason, each.count) for each in self.watch.events()]


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_it_watches_counters_that_there_are_and_the_page_explains_them() -> None:
    assert set(RATES) <= COUNTERS.keys()
    assert all(COUNTERS[name].label for name in KINDS)
    page = Path(web.__file__).with_name("page.html").read_text()
    explained = re.findall(r'"(\w+) (\w+)": "', page)
    known = {(kind, word) for name, kind in KINDS.items() for word in COUNTERS[name].words}
    known |= {("eviction", word) for word in EVICTIONS}
    known |= {("quarantine", "may_still_write"), ("engine", "attached"), ("engine", "gone")}
    assert explained
    assert set(explained) <= known | {("slow", "ok")}


def test_rates_are_rises_of_the_last_look(watched: Watched) -> None:
    assert watched.watch.rates() == {}
    watched.counters.add("lookups", 30)
    watched.look(2.0)
    assert watched.watch.rates()["lookups"] == 15
    watched.look()
    assert watched.watch.rates()["lookups"] == 0
    assert len(watched.watch.samples) == 2


def test_more_of_the_same_is_one_event_for_a_while(watched: Watched) -> None:
    watched.counters.add("refusals", 2, "stale_epoch")
    watched.look()
    (first,) = watched.watch.events()
    number = first.number
    watched.counters.add("refusals", 3, "stale_epoch")
    watched.look()
    (event,) = watched.watch.events(after=number)
    assert (event.kind, event.reason, event.count) == ("rejection", "stale_epoch", 5)
    assert event.last_at - event.first_at == 1
    watched.look(OPEN_S)
    watched.counters.add("refusals", 1, "stale_epoch")
    watched.look()
    assert watched.kinds() == [("rejection", "stale_epoch", 5), ("rejection", "stale_epoch", 1)]


def test_engines_evictions_and_quarantine(watched: Watched) -> None:
    rig = watched.rig
    session = rig.attach()
    rig.put(session, keys(1, 2, 3))
    watched.look()
    assert watched.kinds() == [("engine", "attached", 1)]
    namespace = rig.state.namespaces.get(rig.group(session).namespace)
    rig.core.evict(namespace.digest, 0, 100)
    rig.take(session, 2)
    rig.leave(session, finished=False)
    watched.look()
    events = {each.kind: each for each in watched.watch.events()}
    eviction = events["eviction"]
    assert (eviction.reason, eviction.count) == ("asked", 3)
    assert eviction.subject == f"{namespace.digest.hex()[:12]} {namespace.contract.model}"
    assert events["quarantine"].subject == "e"
    assert events["quarantine"].count > 0
    rig.core.membership.drained(session)
    watched.look()
    assert ("engine", "gone", 1) in watched.kinds()


def test_slow_calls_are_told_with_the_longest(watched: Watched) -> None:
    for seconds in (SLOW_S / 2, SLOW_S, 3 * SLOW_S):
        watched.timings.observe("Commit", "OK", seconds)
    watched.look()
    (event,) = watched.watch.events()
    assert event == Event(2, 101, 101, "slow", "ok", "Commit", 2, 3 * SLOW_S)


def test_what_is_kept_is_bounded(watched: Watched) -> None:
    for _ in range(SAMPLES_MAX + 5):
        watched.counters.add("refusals", 1, "stale_epoch")
        watched.look(OPEN_S + 1)
    assert len(watched.watch.samples) == SAMPLES_MAX
    assert len(watched.watch.events()) == EVENTS_MAX

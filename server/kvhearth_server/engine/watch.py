"""Recent history of the daemon: rates of the last minutes, and what happened, by reason."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvhearth_server.engine.namespace_series import NamespaceSeries

if TYPE_CHECKING:
    from kvhearth_server.engine.engine import Engine

EVERY_S = 1.0
SAMPLES_MAX = 300
EVENTS_MAX = 128
"""Upper bound on events that are kept; the oldest one goes first."""
OPEN_S = 60.0
"""Time for which more of the same is added to an event."""

RATES = (
    "lookups",
    "lookup_keys",
    "hit_keys",
    "below_keys",
    "asked_tokens",
    "hit_tokens",
    "leased_bytes",
    "stored_bytes",
    "demoted_bytes",
    "promoted_bytes",
    "evicted_blocks",
    "refusals",
)
"""Counters whose rises a sample has, each with all its labels together."""

KINDS = {
    "refusals": "rejection",
    "removed_blocks": "removal",
    "demotion_refused": "not_saved",
    "demotion_failed": "write_failure",
    "promotion_failed": "load_failure",
    "gateway_refusals": "rejection",
    "checksum_failures": "checksum",
    "calls_closed": "closed",
    "task_failures": "bug",
    "connections_refused": "rejection",
}
"""Kinds of events by the labelled counter whose rises they tell."""


@dataclass
class Event:
    """Something that happened, once or often within ``OPEN_S``.

    Attributes:
        number: rises with each event and with each change of one.
        first_at, last_at: Unix time in seconds.
        kind: what happened: eviction, rejection, quarantine, slow and so on.
        reason: why, as one word of the metrics' labels.
        subject: the namespace, engine or call that it is about; empty for none.
        count: how often; blocks of an eviction, bytes of a quarantine.
        seconds: the longest of slow calls.
    """

    number: int
    first_at: float
    last_at: float
    kind: str
    reason: str
    subject: str
    count: int
    seconds: float = 0.0


class Watch:
    """Looks at the daemon once a second; what it keeps is bounded, whatever happens.

    Args:
        engine: the engine that it looks at, on its loop.
        wall: Unix time in seconds.
    """

    def __init__(self, engine: Engine, wall: Callable[[], float] = time.time) -> None:
        self._engine = engine
        self._wall = wall
        self.samples: deque[tuple[float, ...]] = deque(maxlen=SAMPLES_MAX)
        """Unix time in seconds, time since the sample before, counts in the order of ``RATES``."""
        self._events: deque[Event] = deque(maxlen=EVENTS_MAX)
        self.namespaces = NamespaceSeries()
        self._number = 0
        self._counts = engine.counters.values()
        self._quarantined = dict[int, int]()
        self._engines = dict[int, str]()
        self._last_at = engine.now()

    async def run(self) -> None:
        """Look once a second."""
        while True:
            await asyncio.sleep(EVERY_S)
            self.look()

    def events(self, after: int = 0) -> list[Event]:
        """Return events that are newer than number ``after``, or changed since; oldest first."""
        found = [event for event in self._events if event.number > after]
        return sorted(found, key=lambda event: event.number)

    def rates(self) -> dict[str, float]:
        """Return the counts per second of the last sample, by counter; none before the first."""
        if not self.samples:
            return {}
        _, span_s, *counts = self.samples[-1]
        return {name: n / span_s for name, n in zip(RATES, counts, strict=True)}

    def look(self) -> None:
        """Take a sample, and note what happened since the last look."""
        now, counts = self._engine.now(), self._engine.counters.values()
        sums = dict.fromkeys(RATES, 0)
        for name, labels in counts.items():
            for label, total in labels.items():
                rise = total - self._counts[name].get(label, 0)
                if rise and name in sums:
                    sums[name] += rise
                if rise and (kind := KINDS.get(name)):
                    self._note(kind, label, "", rise)
        span_s, self._last_at = max(now - self._last_at, 1e-3), now
        self._counts = counts
        self.samples.append((round(self._wall(), 1), round(span_s, 3), *sums.values()))
        self._note_evictions()
        self._note_engines()
        slow = self._engine.timings.slow
        while slow:
            method, code, seconds = slow.popleft()
            self._note("slow", code.lower(), method, 1, seconds)

    def _note_evictions(self) -> None:
        state = self._engine.core.state
        for (number, cause), blocks in state.take_evictions().items():
            space = state.namespaces.find_number(number)
            name = "" if space is None else f"{space.digest.hex()[:12]} {space.model}"
            self._note("eviction", cause, name, blocks)

    def _note_engines(self) -> None:
        """Note engines that came and went, and memory that their processes left in quarantine."""
        groups = {group.number: group for group in self._engine.core.state.groups}
        for number in self._engines.keys() - groups.keys():
            self._note("engine", "gone", self._engines.pop(number), 1)
        for number, group in groups.items():
            if number not in self._engines:
                self._engines[number] = group.engine_id
                self._note("engine", "attached", group.engine_id, 1)
            rise = group.quarantined_bytes - self._quarantined.get(number, 0)
            if rise > 0:
                self._note("quarantine", "may_still_write", group.engine_id, rise)
        self._quarantined = {n: group.quarantined_bytes for n, group in groups.items()}

    def _note(self, kind: str, reason: str, subject: str, count: int, seconds: float = 0.0) -> None:
        """Add to the open event of this kind, reason and subject, or begin one."""
        self._number += 1
        at = self._wall()
        for event in reversed(self._events):
            same = (event.kind, event.reason, event.subject) == (kind, reason, subject)
            if same and 0 <= at - event.first_at < OPEN_S:
                event.number, event.last_at = self._number, at
                event.count += count
                event.seconds = max(event.seconds, seconds)
                return
        self._events.append(Event(self._number, at, at, kind, reason, subject, count, seconds))

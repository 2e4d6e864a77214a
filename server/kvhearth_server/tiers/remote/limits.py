"""Limits of requests to a remote: bounds of what is published, and the circuit breaker.

Pure: times are given, monotonic seconds.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvhearth_server.tiers.base import Bucket, Refusal, Throttled

FAILURES_IN_A_ROW = 5
WINDOW = 20
"""Number of last requests of which half may not fail."""
MEMORY_S = 60.0
"""Time after which a request no longer counts: failures of different days are no outage."""
PAUSE_MIN_S, PAUSE_MAX_S = 1.0, 30.0
"""Time from the opening to the first probe, and the longest time between two."""
_JITTER = 0.2
"""Part of a pause that is left to chance, so that a fleet does not probe in step."""


@dataclass(frozen=True)
class Limits:
    """Bounds of what is published to a remote; 0 stands for none."""

    bytes_per_s: int = 0
    bytes_per_day: int = 0
    requests_per_s: int = 0


class Bounds:
    """Bounds of what is published."""

    def __init__(self, limits: Limits, now: float) -> None:
        hour = limits.bytes_per_day / 24
        self._per_s = Bucket(limits.bytes_per_s, limits.bytes_per_s, now)
        self._requests = Bucket(limits.requests_per_s, limits.requests_per_s, now)
        self._per_day = Bucket(hour / 3600, hour, now)

    def held_back(self, now: float) -> Throttled | None:
        """Return the bound that allows no store now."""
        if wait_s := max(self._per_s.wait_s(now), self._requests.wait_s(now)):
            return Throttled(Refusal.RATE, wait_s)
        if wait_s := self._per_day.wait_s(now):
            return Throttled(Refusal.QUOTA, wait_s)
        return None

    def take(self, size: int, requests: int, now: float) -> None:
        """Book a store."""
        self._per_s.spend(size, now)
        self._requests.spend(requests, now)
        self._per_day.spend(size, now)


class Breaker:
    """Closed until too many requests fail, then open until a probe succeeds.

    Only requests that the remote answered, or failed to answer, count: neither misses nor answers
    from the cache do.

    Args:
        chance: returns a number from 0 to 1.
    """

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._chance = chance
        self._last: deque[tuple[float, bool]] = deque(maxlen=WINDOW)
        self._pause_s = PAUSE_MIN_S
        self._probe_at = 0.0
        self.is_open = False
        self.probing = False
        """Whether a probe is under way."""
        self.openings = 0
        """Number of times that it opened."""

    def succeeded(self, now: float) -> None:
        """Count a request that succeeded; an answer to a request from before an outage does not
        end it.
        """
        if not self.is_open:
            self._last.append((now, True))

    def failed(self, now: float) -> None:
        """Count a request that failed."""
        if self.is_open:
            return
        self._last.append((now, False))
        while self._last and self._last[0][0] < now - MEMORY_S:
            self._last.popleft()
        outcomes = [good for _, good in self._last]
        row = next((i for i, good in enumerate(reversed(outcomes)) if good), len(outcomes))
        half = len(outcomes) == WINDOW and 2 * outcomes.count(False) >= WINDOW
        if row >= FAILURES_IN_A_ROW or half:
            self.is_open, self.probing = True, False
            self.openings += 1
            self._pause_s = PAUSE_MIN_S
            self._probe_at = now + self._jittered()

    def probe_due(self, now: float) -> bool:
        """Whether a probe should be sent; the caller then calls ``probe_began``."""
        return self.is_open and not self.probing and now >= self._probe_at

    def probe_began(self) -> None:
        """Note that a probe is under way."""
        self.probing = True

    def probed(self, good: bool, now: float) -> None:
        """Note the end of a probe: a good one closes the breaker, another follows a bad one."""
        self.probing = False
        if good:
            self.is_open = False
            self._last.clear()
            return
        self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
        self._probe_at = now + self._jittered()

    def _jittered(self) -> float:
        """Return the pause less up to ``_JITTER`` of it: ``PAUSE_MAX_S`` is never exceeded."""
        return self._pause_s * (1 - _JITTER * self._chance())

"""Bounds of what a daemon publishes to a remote."""

from __future__ import annotations

from dataclasses import dataclass

from kvhearth_server.tiers.base import Refusal, Throttled


class Bucket:
    """Allows ``rate`` units a second and ``burst`` at once; a rate of 0 allows everything.

    A single request may be larger than the bucket: it leaves a debt that others wait for.
    """

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate, self._burst = rate, burst
        self._level, self._at = burst, now

    def wait_s(self, now: float) -> float:
        """Return the seconds until something may be taken."""
        if not self._rate:
            return 0.0
        passed, self._at = max(0.0, now - self._at), max(self._at, now)
        self._level = min(self._burst, self._level + passed * self._rate)
        return 0.0 if self._level > 0 else -self._level / self._rate + 0.001

    def take(self, amount: float) -> None:
        """Take units, into debt if there are not as many."""
        self._level -= amount if self._rate else 0


@dataclass(frozen=True)
class Limits:
    """Bounds of what is published to a remote; 0 stands for none."""

    bytes_per_s: int = 0
    bytes_per_day: int = 0
    requests_per_s: int = 0


class Bounds:
    """Bounds of what is published."""

    def __init__(self, limits: Limits, now: float) -> None:
        day = limits.bytes_per_day
        self._per_s = Bucket(limits.bytes_per_s, limits.bytes_per_s, now)
        self._requests = Bucket(limits.requests_per_s, limits.requests_per_s, now)
        self._per_day = Bucket(day / 86400, day / 24, now)

    def held_back(self, now: float) -> Throttled | None:
        """Return the bound that allows no store now."""
        if wait_s := max(self._per_s.wait_s(now), self._requests.wait_s(now)):
            return Throttled(Refusal.RATE, wait_s)
        if wait_s := self._per_day.wait_s(now):
            return Throttled(Refusal.QUOTA, wait_s)
        return None

    def take(self, size: int, requests: int) -> None:
        """Book a store."""
        self._per_s.take(size)
        self._requests.take(requests)
        self._per_day.take(size)

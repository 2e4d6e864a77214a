"""Bounds of what a daemon publishes to a remote, for all tenants together and for each of them."""

from __future__ import annotations

from dataclasses import dataclass

from kvhearth_server.tiers.base import Refusal, Throttled

ACTIVE_S = 60.0
"""Time after its last batch for which a tenant has a part of the bounds."""


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

    def use(self, rate: float, burst: float) -> None:
        """Allow another rate and burst from now on; what was taken stays taken."""
        self._level += burst - self._burst
        self._rate, self._burst = rate, burst

    def take(self, amount: float) -> None:
        """Take units, into debt if there are not as many."""
        self._level -= amount if self._rate else 0


@dataclass(frozen=True)
class Limits:
    """Bounds of what is published to a remote; 0 stands for none."""

    bytes_per_s: int = 0
    bytes_per_day: int = 0
    requests_per_s: int = 0


class _Share:
    """Buckets of the bounds, by part of them."""

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits, self.seen = limits, now
        self._per_s, self._requests, self._per_day = (
            Bucket(rate, burst, now) for rate, burst in self._rates(1)
        )

    def _rates(self, parts: int) -> list[tuple[float, float]]:
        limits, day = self._limits, self._limits.bytes_per_day
        each = (
            (limits.bytes_per_s, limits.bytes_per_s),
            (limits.requests_per_s, limits.requests_per_s),
            (day / 86400, day / 24),
        )
        return [(rate / parts, burst / parts) for rate, burst in each]

    def use_part(self, parts: int) -> None:
        """Have one of so many equal parts of the bounds."""
        buckets = (self._per_s, self._requests, self._per_day)
        for bucket, (rate, burst) in zip(buckets, self._rates(parts), strict=True):
            bucket.use(rate, burst)

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


class Bounds:
    """Bounds of what is published. While several tenants publish, each has an equal part of them.

    A batch of a tenant that is beyond its part is refused with ``quota``, so that it is left out:
    with ``rate`` it would wait in front of the others'.
    """

    def __init__(self, limits: Limits, now: float) -> None:
        self._limits, self._whole = limits, _Share(limits, now)
        self._tenants: dict[str, _Share] = {}

    def held_back(self, tenant: str, now: float) -> Throttled | None:
        """Return the bound that allows no store of a tenant now."""
        active = {n: share for n, share in self._tenants.items() if now - share.seen < ACTIVE_S}
        mine = active.setdefault(tenant, self._tenants.get(tenant) or _Share(self._limits, now))
        if len(active) != len(self._tenants) or tenant not in self._tenants:
            for share in active.values():
                share.use_part(len(active))
        self._tenants, mine.seen = active, now
        own = mine.held_back(now)
        if own is not None and len(active) > 1:
            return Throttled(Refusal.QUOTA, own.retry_after_s)
        return self._whole.held_back(now)

    def take(self, tenant: str, size: int, requests: int) -> None:
        """Book a store of a tenant."""
        self._whole.take(size, requests)
        self._tenants[tenant].take(size, requests)

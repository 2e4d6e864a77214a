"""Bounds of identities, enforced."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.gateway.identity import Bounds, Identity

_IDLE_MAX = 1024
"""Meters that nobody uses are forgotten beyond this number."""


class Meter:
    """Uses of one identity, over all its sessions. Thread-safe.

    Calls are limited by a bucket that holds one second of them. Memory is that which reservations
    may write and leases may read: a reservation is refused before it is made; a lookup is refused
    once the bound is reached, so one lease may go beyond it.
    """

    def __init__(self, name: str, bounds: Bounds, clock: Callable[[], float]) -> None:
        self.refusals: Counter[str] = Counter()
        """Refusals by bound."""
        self._name = name
        self._bounds = bounds
        self._clock = clock
        self._lock = threading.Lock()
        self._open: Counter[str] = Counter()
        self._held: dict[Hashable, tuple[int, int]] = {}
        self._calls = float(bounds.calls_per_s)
        self._calls_at = clock()

    @property
    def idle(self) -> bool:
        """Whether it has no session, no connection and no memory."""
        with self._lock:
            return not self._open and not self._held

    def use(self, bounds: Bounds) -> None:
        """Apply other bounds from now on; what is open stays."""
        with self._lock:
            if bounds != self._bounds:
                self._bounds, self._calls = bounds, float(bounds.calls_per_s)

    def open_session(self) -> None:
        """Count a session.

        Raises:
            KVHearthError: ``too_many_sessions``.
        """
        self._enter("sessions")

    def close_session(self) -> None:
        """Count a session less."""
        self._leave("sessions")

    def open_connection(self) -> None:
        """Count a connection.

        Raises:
            KVHearthError: ``too_many_sessions``.
        """
        self._enter("connections")

    def close_connection(self) -> None:
        """Count a connection less."""
        self._leave("connections")

    def _enter(self, bound: str) -> None:
        with self._lock:
            most = getattr(self._bounds, bound)
            if most and self._open[bound] >= most:
                raise self._refusal(
                    bound, Reason.TOO_MANY_SESSIONS, f"has {most} {bound} already; close some"
                )
            self._open[bound] += 1

    def _leave(self, bound: str) -> None:
        with self._lock:
            self._open[bound] -= 1
            if self._open[bound] <= 0:
                del self._open[bound]

    def call(self) -> None:
        """Count a call or a data request.

        Raises:
            KVHearthError: ``quota_exceeded``.
        """
        with self._lock:
            most = self._bounds.calls_per_s
            if not most:
                return
            now = self._clock()
            self._calls = min(float(most), self._calls + (now - self._calls_at) * most)
            self._calls_at = now
            if self._calls < 1:
                raise self._refusal(
                    "calls_per_s",
                    Reason.QUOTA_EXCEEDED,
                    f"makes more than {most} calls a second; slow down",
                )
            self._calls -= 1

    def admit(self, blocks: int = 1, size: int = 1) -> None:
        """Check that the identity may hold more memory.

        Args:
            blocks: that a reservation asks for; 1 for a lookup.
            size: their bytes; 1 for a lookup.

        Raises:
            KVHearthError: ``held_cap``.
        """
        with self._lock:
            has_blocks, has_bytes = map(sum, zip((0, 0), *self._held.values(), strict=True))
            wanted = (("held_blocks", has_blocks, blocks), ("held_bytes", has_bytes, size))
            for bound, has, more in wanted:
                most = getattr(self._bounds, bound)
                if most and has + more > most:
                    raise self._refusal(
                        bound,
                        Reason.HELD_CAP,
                        f"holds {has} of {most} ({bound}); commit, abort or release some",
                    )

    def hold(self, source: Hashable, blocks: int, size: int) -> None:
        """Set what one source (a group's book) holds now; nothing forgets the source."""
        with self._lock:
            if blocks or size:
                self._held[source] = blocks, size
            else:
                self._held.pop(source, None)

    def _refusal(self, bound: str, reason: Reason, message: str) -> KVHearthError:
        self.refusals[bound] += 1
        return KVHearthError(reason, f"identity {self._name} {message}")


@dataclass
class Meters:
    """Meters of all identities. Thread-safe.

    Args:
        clock: monotonic seconds.
    """

    clock: Callable[[], float] = time.monotonic
    _meters: dict[str, Meter] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _gone: Counter[str] = field(default_factory=Counter)

    def of(self, identity: Identity) -> Meter:
        """Return an identity's meter, with its present bounds."""
        bounds = identity.bounds
        with self._lock:
            found = self._meters.get(identity.name)
            if found is None:
                self._forget_idle()
                found = self._meters[identity.name] = Meter(identity.name, bounds, self.clock)
        found.use(bounds)
        return found

    def refusals(self) -> Counter[str]:
        """Return the refusals of all identities, by bound."""
        with self._lock:
            return sum((each.refusals for each in self._meters.values()), Counter(self._gone))

    def _forget_idle(self) -> None:
        if len(self._meters) < _IDLE_MAX:
            return
        for name in [name for name, each in self._meters.items() if each.idle]:
            self._gone += self._meters.pop(name).refusals

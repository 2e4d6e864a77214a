"""Bounds of identities, enforced."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.gateway.grants import Grants
from kvhearth_server.gateway.tokens import Bounds


class IdentityLimits:
    """Bounds of one identity over all its sessions. Thread-safe.

    Calls are limited by a bucket that holds one second of them. Memory is that which reservations
    may write and leases may read: a reservation is refused before it is made; a lookup is refused
    once the bound is reached, so one lease may go beyond it.

    Args:
        name: of the identity.
        met: called with the name of a bound that was met.
        clock: monotonic seconds.

    Attributes:
        grants: those of the group of each of its sessions; several may have the same.
    """

    def __init__(
        self,
        name: str,
        met: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.grants: list[Grants] = []
        self._name = name
        self._met = met
        self._clock = clock
        self._lock = threading.Lock()
        self._bounds = Bounds()
        self._open: Counter[str] = Counter()
        self._calls, self._calls_at = 0.0, clock()

    @property
    def idle(self) -> bool:
        """Whether it has no session and no connection."""
        return not self._open.total()

    def use(self, bounds: Bounds) -> None:
        """Apply these bounds from now on; what is open stays."""
        with self._lock:
            if bounds != self._bounds:
                self._bounds, self._calls = bounds, float(bounds.calls_per_s)

    def enter(self, bound: str) -> None:
        """Count one more of ``sessions`` or ``connections``, until ``leave``.

        Raises:
            KVHearthError: ``too_many_sessions``.
        """
        with self._lock:
            most = getattr(self._bounds, bound)
            if most and self._open[bound] >= most:
                raise self._refusal(
                    bound, Reason.TOO_MANY_SESSIONS, f"has {most} {bound} already; close some"
                )
            self._open[bound] += 1

    def leave(self, bound: str) -> None:
        """Count one less."""
        with self._lock:
            self._open[bound] -= 1

    @contextlib.contextmanager
    def connection(self) -> Iterator[None]:
        """Count a connection meanwhile. Raises as ``enter``."""
        self.enter("connections")
        try:
            yield
        finally:
            self.leave("connections")

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
        if not (self._bounds.held_blocks or self._bounds.held_bytes):
            return
        held = [grants.held() for grants in set(self.grants)]
        for bound, has, more in (
            ("held_blocks", sum(count for count, _ in held), blocks),
            ("held_bytes", sum(held_bytes for _, held_bytes in held), size),
        ):
            most = getattr(self._bounds, bound)
            if most and has + more > most:
                raise self._refusal(
                    bound,
                    Reason.HELD_CAP,
                    f"holds {has} of {most} ({bound}); commit, abort or release some",
                )

    def _refusal(self, bound: str, reason: Reason, message: str) -> KVHearthError:
        self._met(bound)
        return KVHearthError(reason, f"identity {self._name} {message}")

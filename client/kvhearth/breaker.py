"""The breaker: after a few failures in a row a call is answered at once, without asking the daemon.

Pure: the caller brings the time and the jitter. Not thread-safe; the caller holds a lock.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

from kvhearth.errors import Reason

COUNTED = frozenset({Reason.DAEMON_AWAY, Reason.DEADLINE})
"""Failures that say that the daemon does not answer. Any other refusal is an answer."""


class BreakerState(enum.StrEnum):
    """Where a breaker stands: ``CLOSED`` lets calls through, ``OPEN`` none, ``HALF_OPEN`` one."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker:
    """Opens after ``failures_max`` counted failures in a row, then lets one probe through at a
    time.

    Args:
        failures_max: failures in a row that open it.
        backoff_s: pause before the first probe; doubles with each probe that fails.
        backoff_max_s: the longest pause.
        jitter: a number in [0, 1) for each pause; a pause is 0.5 to 1.0 of its nominal length.
    """

    def __init__(
        self, failures_max: int, backoff_s: float, backoff_max_s: float, jitter: Callable[[], float]
    ) -> None:
        self._failures_max = failures_max
        self._backoff_s = backoff_s
        self._backoff_max_s = backoff_max_s
        self._jitter = jitter
        self.calm = True
        """Whether it is closed and the last call was answered: ``allow`` would say yes, and
        recording one more answer would change nothing.
        """
        self._failures = 0
        self._openings = 0
        self._state = BreakerState.CLOSED
        self._next_probe = 0.0

    @property
    def state(self) -> BreakerState:
        """Where it stands."""
        return self._state

    def allow(self, now: float) -> bool:
        """Whether a call may be made. In half-open this hands out the one probe.

        A probe whose outcome is never recorded does not block the next one for longer than a pause.
        """
        if self._state is BreakerState.CLOSED:
            return True
        if now < self._next_probe:
            return False
        self._state = BreakerState.HALF_OPEN
        self._next_probe = now + self._pause_s()
        return True

    def record(self, reason: Reason | None, now: float) -> None:
        """Tell a call's outcome: ``None`` for an answer, else why it failed."""
        if reason not in COUNTED:
            self.reset()
            return
        self.calm = False
        self._failures += 1
        if self._state is BreakerState.HALF_OPEN or (
            self._state is BreakerState.CLOSED and self._failures >= self._failures_max
        ):
            self._openings += 1
            self._state = BreakerState.OPEN
            self._next_probe = now + self._pause_s()

    def reset(self) -> None:
        """Close it, as with a new session."""
        self._failures = 0
        self._openings = 0
        self._state = BreakerState.CLOSED
        self.calm = True

    def _pause_s(self) -> float:
        doublings = min(max(self._openings - 1, 0), 32)
        nominal_s = min(self._backoff_s * 2.0**doublings, self._backoff_max_s)
        return nominal_s * (0.5 + 0.5 * self._jitter())

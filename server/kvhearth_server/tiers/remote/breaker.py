"""Circuit breaker of a remote: stops requests while it does not answer, and always tries again.

Pure: times are given, monotonic seconds.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

FAILURES_IN_A_ROW = 5
WINDOW = 20
"""Number of last requests of which half may not fail."""
MEMORY_S = 60.0
"""Time after which a request no longer counts: failures of different days are no outage."""
PAUSE_MIN_S, PAUSE_MAX_S = 1.0, 30.0
"""Time from the opening to the first probe, and the longest time between two."""
_JITTER = 0.2
"""Part of a pause that is left to chance, so that a fleet does not probe in step."""


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
        self._opened_at = 0.0
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

    def failed(self, now: float) -> bool:
        """Count a request that failed; return whether the breaker opened."""
        if self.is_open:
            return False
        self._last.append((now, False))
        while self._last and self._last[0][0] < now - MEMORY_S:
            self._last.popleft()
        outcomes = [good for _, good in self._last]
        row = next((i for i, good in enumerate(reversed(outcomes)) if good), len(outcomes))
        half = len(outcomes) == WINDOW and 2 * outcomes.count(False) >= WINDOW
        if row < FAILURES_IN_A_ROW and not half:
            return False
        self.open(now)
        return True

    def open(self, now: float) -> None:
        """Open, whatever was counted: the first probe is due after ``PAUSE_MIN_S``."""
        if self.is_open:
            return
        self.is_open, self.probing = True, False
        self.openings += 1
        self._opened_at = now
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

    def open_s(self, now: float) -> float:
        """Return the seconds since it opened; 0 while it is closed."""
        return now - self._opened_at if self.is_open else 0.0

    def _jittered(self) -> float:
        """Return the pause less up to ``_JITTER`` of it: ``PAUSE_MAX_S`` is never exceeded."""
        return self._pause_s * (1 - _JITTER * self._chance())

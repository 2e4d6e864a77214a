"""When to look up again what climbs from a slower tier."""

from __future__ import annotations

PAUSE_MIN_S = 0.001
PAUSE_MAX_S = 0.25
"""Of an estimate of a second and less: it may be too long. Longer ones are asked about at a
quarter of their time."""
_DOUBLINGS = 6


class ClimbWait:
    """A bounded wait, guided by the daemon's estimates. Pure: times are given, monotonic seconds.

    An estimate that was too short is believed less each time, so that few questions are put.

    Args:
        until: when the wait ends.

    Attributes:
        due_at: when to ask again.
        asked_count: answers that told of something that climbs.
    """

    def __init__(self, until: float) -> None:
        self.until = until
        self.due_at = 0.0
        self.asked_count = 0

    def answered(self, eta_us: int, now: float) -> bool:
        """Whether an answer with this estimate is worth asking again, at ``due_at``."""
        if eta_us <= 0 or now >= self.until:
            return False
        least_s = PAUSE_MIN_S * 2.0 ** min(self.asked_count, _DOUBLINGS)
        self.asked_count += 1
        eta_s = eta_us / 1e6
        pause_s = min(max(eta_s, least_s), max(PAUSE_MAX_S, eta_s / 4))
        self.due_at = min(now + pause_s, self.until)
        return True

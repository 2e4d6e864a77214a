"""Logs that a flood of bad input cannot flood."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

KINDS_MAX = 64


class Throttle:
    """Lets some events of each kind through in an interval, and counts those that it holds back.

    Not for several threads at once. Beyond ``KINDS_MAX`` kinds all further ones are one.

    Args:
        interval_s: how long an interval is, from its first event, in seconds.
        clock: seconds that only rise.
        burst: events of a kind that are let through in an interval.
    """

    def __init__(
        self,
        interval_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        burst: int = 1,
    ) -> None:
        self._interval_s = interval_s
        self._clock = clock
        self._burst = burst
        self._next: dict[str, float] = {}
        self._passed: dict[str, int] = {}
        self._held_back: dict[str, int] = {}

    def admit(self, kind: str) -> int | None:
        """How many of this kind were held back since the last that was let through; None if this
        one is held back, too.
        """
        if kind not in self._next and len(self._next) >= KINDS_MAX:
            kind = ""
        now = self._clock()
        if now >= self._next.get(kind, now):
            self._next[kind], self._passed[kind] = now + self._interval_s, 0
        elif self._passed[kind] >= self._burst:
            self._held_back[kind] = self._held_back.get(kind, 0) + 1
            return None
        self._passed[kind] += 1
        return self._held_back.pop(kind, 0)


class LimitedLog:
    """A logger for what peers can cause: so many lines of each kind in an interval.

    Args:
        log: of ``get_logger``.
        throttle: what decides; by default one line a second.
    """

    def __init__(self, log: Any, throttle: Throttle | None = None) -> None:
        self._log = log
        self._throttle = Throttle() if throttle is None else throttle

    def warning(self, event: str, *, kind: str, **fields: object) -> None:
        """Log ``event`` unless it is held back; ``suppressed`` tells how many before it were.

        Args:
            kind: what is counted together: an event and a reason.
        """
        if (told := self._admitted(kind, fields)) is not None:
            self._log.warning(event, **told)

    def info(self, event: str, *, kind: str, **fields: object) -> None:
        """As ``warning``, for what is in order."""
        if (told := self._admitted(kind, fields)) is not None:
            self._log.info(event, **told)

    def _admitted(self, kind: str, fields: dict[str, object]) -> dict[str, object] | None:
        suppressed = self._throttle.admit(kind)
        if suppressed is None:
            return None
        return {**fields, "suppressed": suppressed} if suppressed else fields


class LimitedRecords(logging.Filter):
    """The same for warnings of the standard library's logging, by their text; errors all pass."""

    def __init__(self, throttle: Throttle | None = None) -> None:
        super().__init__()
        self._throttle = Throttle() if throttle is None else throttle

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether ``record`` is logged."""
        if record.levelno > logging.WARNING:
            return True
        suppressed = self._throttle.admit(str(record.msg))
        if suppressed:
            record.suppressed = suppressed
        return suppressed is not None

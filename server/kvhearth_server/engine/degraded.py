"""What is wrong with the slower tier, in the log: once when it begins, once when it is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvhearth_server.observability.logs import get_logger
from kvhearth_server.tiers.ssd.health import Kind

LOOK_S = 0.25
"""Between two looks at the least."""

OVER_S = 5.0
"""What comes and goes faster than this is one degradation: a drive of which each second write fails
must not fill the log.
"""

_log = get_logger("kvhearth.ssd")


@dataclass
class _Told:
    began: float
    seen: float
    reason: str


class DegradedLog:
    """Looks at what is wrong now, and logs what began or is over.

    Args:
        found: what is wrong, each with a sentence; see ``SsdStatus.by_kind``.
        log: of ``get_logger``.
        clock: seconds that only rise.
    """

    def __init__(
        self,
        found: Callable[[], Mapping[Kind, str]],
        log: Any = _log,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._found, self._log, self._clock = found, log, clock
        self._next_at = 0.0
        self._told: dict[Kind, _Told] = {}

    def look(self) -> None:
        """Look, if it is time; call it again and again."""
        now = self._clock()
        if now < self._next_at:
            return
        self._next_at = now + LOOK_S
        for kind, reason in self._found().items():
            told = self._told.get(kind)
            if told is None:
                self._told[kind] = _Told(now, now, reason)
                self._log.warning("the SSD tier is degraded", reason=reason, **_fields(kind))
            else:
                told.seen, told.reason = now, reason
        for kind, told in list(self._told.items()):
            if now - told.seen >= OVER_S:
                del self._told[kind]
                lasted_s = round(told.seen - told.began, 3)
                self._log.info(
                    "a degradation of the SSD tier is over",
                    reason=told.reason,
                    lasted_s=lasted_s,
                    **_fields(kind),
                )


def _fields(kind: Kind) -> dict[str, str]:
    return {"directory": kind.directory, "kind": kind.word}

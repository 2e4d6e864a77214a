"""Who must have finished copying before a session may be let go."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvhearth.meters import LOGGER

Drain = Callable[[float], bool]
"""Waits up to so many seconds for copies that are under way; True if none is left."""


class Drains:
    """The registered drains of one process."""

    def __init__(self) -> None:
        self._drains: list[Drain] = []

    def add(self, drain: Drain) -> None:
        """Register a drain for good."""
        self._drains.append(drain)

    def finished(self, deadline_s: float) -> bool:
        """Whether all drains said within ``deadline_s`` that no copy is left."""
        end = time.monotonic() + deadline_s
        for drain in tuple(self._drains):
            try:
                if not drain(max(end - time.monotonic(), 0.0)):
                    return False
            except Exception:  # noqa: BLE001 - foreign code: what it did not say is not drained
                LOGGER.exception("a drain failed")
                return False
        return True

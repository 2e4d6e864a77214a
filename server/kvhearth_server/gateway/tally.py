"""Counts of what a gateway did, which its daemon's metrics show."""

from __future__ import annotations

import threading
from collections import Counter

COUNTS_MAX = 256
"""Most counts of one report."""


class Tally:
    """Counters by name and label. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, name: str, count: int = 1, label: str = "") -> None:
        """Count ``count`` more."""
        with self._lock:
            self._counts[name, label] += count

    def take(self) -> dict[tuple[str, str], int]:
        """Return what was counted since the last ``take``."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return dict(taken)

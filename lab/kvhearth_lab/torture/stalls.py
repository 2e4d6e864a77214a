"""Stalls of operations, less the time that a fault or the machine explains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvhearth.worker_thread import SupervisedThread

_TICK_S = 0.01
_LATE_S = 0.05
_KEEP_S = 120.0
_WINDOWS_MAX = 1000
AFTER_S = 0.25
"""Extension of a fault's effect beyond its end, while the queued work is processed."""


class Metronome(SupervisedThread):
    """Detects times when this process could not run because it was stopped or the processors were
    busy.

    ``on_pause(begin, end)`` is called for each such time, by ``time.monotonic``.
    """

    def __init__(self, on_pause: Callable[[float, float], None]) -> None:
        super().__init__("kvhearth-metronome", self._tick)
        self._on_pause = on_pause
        self._before = time.monotonic()

    def _tick(self) -> None:
        self.rest(_TICK_S)
        before, self._before = self._before, time.monotonic()
        if self._before - before > _TICK_S + _LATE_S:
            self._on_pause(before, self._before)


@dataclass(eq=False)
class Window:
    """A time in which something was broken on purpose; open until ``end`` is set.

    ``whose`` names the one process that it concerns; empty for all.
    """

    why: str
    begin: float
    end: float | None = None
    whose: str = ""


class Stalls:
    """Time windows in which slow operations are expected. Thread-safe.

    Attributes:
        late_s: time in which the kit itself could not run.
    """

    def __init__(self) -> None:
        self.late_s = 0.0
        self._windows: list[Window] = []
        self._lock = threading.Lock()

    def open(self, why: str) -> Window:
        """Open a window at the begin of a fault."""
        window = Window(why, time.monotonic())
        self._add(window)
        return window

    def close(self, window: Window) -> None:
        """Close the window."""
        window.end = time.monotonic()

    def late(self, begin: float, end: float, whose: str = "") -> None:
        """Add a window in which no process could run, or only ``whose`` could not."""
        self._add(Window("machine", begin, end, whose))
        if not whose:
            self.late_s += end - begin

    def explained_s(self, begin: float, end: float, whose: str) -> float:
        """Return the part of a time that lies in windows that concern ``whose``."""
        with self._lock:
            spans = sorted(
                (max(begin, each.begin), min(end, (each.end or end) + AFTER_S))
                for each in self._windows
                if each.whose in ("", whose)
                and each.begin < end
                and (each.end is None or each.end + AFTER_S > begin)
            )
        total, at = 0.0, begin
        for first, last in spans:
            if last > at:
                total += last - max(first, at)
                at = last
        return total

    def _add(self, window: Window) -> None:
        old = time.monotonic() - _KEEP_S
        with self._lock:
            if len(self._windows) > _WINDOWS_MAX:
                self._windows = [w for w in self._windows if w.end is None or w.end > old]
            self._windows.append(window)

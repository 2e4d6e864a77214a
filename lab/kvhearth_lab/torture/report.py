"""Findings and counts of a run, for JSON and tables; stalls, less the time that is explained."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvhearth.worker_thread import SupervisedThread
from kvhearth_lab.torture.decks import Coverage

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

    def open(self, why: str, whose: str = "") -> Window:
        """Open a window at the begin of a fault, of ``whose`` process only if that is given."""
        window = Window(why, time.monotonic(), whose=whose)
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


STALL_S = 1.0
"""Longest operation, in seconds, that is no stall; time explained by a fault or the machine is
subtracted.
"""

WRONG = "wrong_bytes"
LOST = "lost_sealed_blocks"
LEAK = "leaks"
STALL = "stalls"
CRASH = "crashes"
OVER = "over_capacity_bytes"
CAUGHT = "unexplained_checksum_failures"
KINDS = (WRONG, LOST, LEAK, STALL, CRASH, OVER, CAUGHT)
"""Kinds of findings whose count must be zero."""
_TEXTS_MAX = 200


@dataclass
class Report:
    """Counts of a whole run. Thread-safe.

    Attributes:
        faults, operations: counts by name.
        found: count of each of ``KINDS``.
        texts: findings for people, with place and description.
        excused: blocks that faults took and were allowed to take, by fault.
        figures: other numbers.
        coverage: fault points and sector boundaries.
    """

    faults: Counter[str] = field(default_factory=Counter)
    operations: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    excused: Counter[str] = field(default_factory=Counter)
    figures: Counter[str] = field(default_factory=Counter)
    worlds: Counter[str] = field(default_factory=Counter)
    texts: list[dict[str, Any]] = field(default_factory=list)
    longest_stall_s: float = 0.0
    longest_stall: str = ""
    longest_promotion_s: float = 0.0
    machine_late_s: float = 0.0
    steps: int = 0
    coverage: Coverage = field(default_factory=Coverage)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, kind: str, text: str, where: dict[str, Any], amount: int = 1) -> None:
        """Record a finding that must not occur."""
        with self._lock:
            self.found[kind] += amount
            if len(self.texts) < _TEXTS_MAX:
                self.texts.append({"kind": kind, "amount": amount, "text": text, **where})

    def count(self, counts: dict[str, int]) -> None:
        """Add operations of clients."""
        with self._lock:
            self.operations.update(counts)

    def stall(self, seconds: float, what: str, where: dict[str, Any]) -> None:
        """Record the unexplained part of one operation's time."""
        with self._lock:
            if seconds > self.longest_stall_s:
                self.longest_stall_s, self.longest_stall = seconds, what
        if seconds > STALL_S:
            self.find(STALL, f"{what} took {seconds:.2f} s that nothing explains", where)

    @property
    def failed(self) -> bool:
        """Whether there is any finding of ``KINDS``."""
        return any(self.found[kind] for kind in KINDS)

    @property
    def tested(self) -> bool:
        """Whether a fault happened and an answer was compared."""
        return bool(self.faults.total() and self.operations["compared"])

    def as_json(self, seed: int, seconds: float) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        calls = {n: c for n, c in self.operations.items() if ":" not in n and n != "compared"}
        return {
            "seed": seed,
            "seconds": round(seconds, 1),
            "passed": self.tested and not self.failed,
            "tested": self.tested,
            "worlds": sum(self.worlds.values()),
            "steps": self.steps,
            "faults": sum(self.faults.values()),
            "operations": sum(calls.values()),
            "compared_blocks": self.operations["compared"],
            **{kind: self.found[kind] for kind in KINDS},
            "longest_stall_s": round(self.longest_stall_s, 3),
            "longest_stall": self.longest_stall,
            "longest_promotion_s": round(self.longest_promotion_s, 3),
            "machine_late_s": round(self.machine_late_s, 3),
            **self.coverage.as_json(),
            "faults_by_name": dict(sorted(self.faults.items())),
            "operations_by_name": dict(sorted(self.operations.items())),
            "worlds_by_kind": dict(sorted(self.worlds.items())),
            "excused_blocks": dict(sorted(self.excused.items())),
            "figures": dict(sorted(self.figures.items())),
            "findings": self.texts,
        }

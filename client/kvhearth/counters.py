"""Counters that the heartbeat carries, and lines in the engine's log, some rate-limited."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Mapping

LOGGER = logging.getLogger("kvhearth")
COUNTERS_MAX = 64
_OTHER = "other"
_WARNING_PAUSE_S = 30.0
_PLAIN = re.compile(r"[^\s\"=]+")


def log_event(level: int, event: str, text: str, *, trace: bool = False, **fields: object) -> None:
    """Write one line into the engine's log: ``event: text field=value ...``.

    Args:
        level: of ``logging``.
        event: stable name; docs/log.md lists the daemon's, docs/engines.md the engine's.
        text: a sentence for people, without anything that varies.
        trace: add the exception at hand.
        fields: everything that varies.
    """
    _write(level, event, text, trace, fields)


def _write(level: int, event: str, text: str, trace: bool, fields: Mapping[str, object]) -> None:
    if LOGGER.isEnabledFor(level):
        shown = "".join(f" {name}={_quoted(str(value))}" for name, value in fields.items())
        LOGGER.log(level, "%s: %s%s", event, text, shown, exc_info=trace, stacklevel=3)


def _quoted(value: str) -> str:
    return value if _PLAIN.fullmatch(value) else json.dumps(value, ensure_ascii=False)


class Counters:
    """Named counters since the start; names beyond ``COUNTERS_MAX`` add to ``other``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        """Add ``amount`` to the counter ``name``."""
        with self._lock:
            if name in self._values:
                self._values[name] += amount
            else:
                self._begin(name, amount)

    def add_all(self, amounts: Mapping[str, int]) -> None:
        """Add to several counters at once."""
        with self._lock:
            for name, amount in amounts.items():
                if name in self._values:
                    self._values[name] += amount
                else:
                    self._begin(name, amount)

    def _begin(self, name: str, amount: int) -> None:
        """Add to a counter that may not exist yet, with the lock held."""
        if len(self._values) >= COUNTERS_MAX - 1:
            name = _OTHER
        self._values[name] = self._values.get(name, 0) + amount

    def snapshot(self) -> dict[str, int]:
        """Return all counters by name."""
        with self._lock:
            return dict(self._values)


class Report:
    """Counter increments to report to each boot of the daemon. Used by one thread only.

    An increment counts from the last report that an earlier boot acknowledged, so that nothing is
    counted by two boots.
    """

    def __init__(self) -> None:
        self._boot = ""
        self._base: dict[str, int] = {}
        self._said: dict[str, int] = {}
        self._heard: dict[str, int] = {}

    def rise(self, boot_id: str, counters: dict[str, int]) -> dict[str, int]:
        """Return the increments to report to the daemon of ``boot_id``."""
        if boot_id != self._boot:
            self._boot, self._base = boot_id, self._heard
        self._said = counters
        return {name: value - self._base.get(name, 0) for name, value in counters.items()}

    def heard(self, boot_id: str) -> None:
        """Record that the daemon has acknowledged the last report."""
        if boot_id == self._boot:
            self._heard = self._said


class Warnings:
    """Logs each event at most once per 30 s, with the number of suppressed lines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next_at: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def warn(self, event: str, text: str, *, kind: str = "", **fields: object) -> None:
        """Log as ``log_event``; events of each ``kind``, of a small fixed set, count apart."""
        kind, now = f"{event}:{kind}", time.monotonic()
        with self._lock:
            if now < self._next_at.get(kind, 0.0):
                self._unsaid[kind] = self._unsaid.get(kind, 0) + 1
                return
            self._next_at[kind] = now + _WARNING_PAUSE_S
            unsaid = self._unsaid.pop(kind, 0)
        if unsaid:
            fields["suppressed"] = unsaid
        _write(logging.WARNING, event, text, False, fields)

"""Directories on drives that may hang: calls that the caller may abandon, and the names of files
that are not the tier's own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

NAMESPACES_NAME, NAMESPACES_FRESH_NAME = "namespaces.json", "namespaces.new"
"""Files that are not the tier's. Their writer keeps room for them beside each place's capacity."""


class DirectoryError(Exception):
    """The directory cannot be used at all; the text gives the reason and a remedy."""


T = TypeVar("T")


class Asked(Generic[T]):
    """A call on a thread of its own, which the caller may abandon."""

    def __init__(self, what: str, ask: Callable[[], T], undo: Callable[[T], None]) -> None:
        """``undo`` is called with a result that came too late."""
        self._what, self._ask, self._undo = what, ask, undo
        self._lock = threading.Lock()
        self._answers: list[T] = []
        self._error: DirectoryError | None = None
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name="kvhearth-open", daemon=True)
        self._thread.start()

    def answer(self, end: float, patience_s: float) -> T:
        """Return the result, waiting until ``end`` (monotonic), which is ``patience_s`` after the
        start.

        Raises:
            DirectoryError: the call raised it, or there is no result.
        """
        self._thread.join(max(0.0, end - time.monotonic()))
        with self._lock:
            self._given_up = not self._answers
        if self._answers:
            return self._answers[0]
        if self._error is not None:
            raise self._error
        hangs = f"did not answer in {patience_s:g} s; see dmesg: its drive may hang"
        failed = "could not be opened, by a bug: see the log"
        raise DirectoryError(f"{self._what} {hangs if self._thread.is_alive() else failed}")

    def _run(self) -> None:
        try:
            answer = self._ask()
        except DirectoryError as error:
            self._error = error
            return
        with self._lock:
            if not self._given_up:
                self._answers.append(answer)
                return
        self._undo(answer)

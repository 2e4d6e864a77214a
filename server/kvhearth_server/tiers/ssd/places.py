"""Opening directories: each on a thread of its own, because a drive that hangs must not hold up the
start.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from kvhearth_server.tiers.base import Counts
from kvhearth_server.tiers.ssd.directory import Directory
from kvhearth_server.tiers.ssd.files import Files
from kvhearth_server.tiers.ssd.heads import DirectoryError
from kvhearth_server.tiers.ssd.settings import Place, SsdSettings

T = TypeVar("T")


class Asked(Generic[T]):
    """A call on a thread that may be given up."""

    def __init__(self, what: str, ask: Callable[[], T], undo: Callable[[T], None]) -> None:
        """``undo`` is called with an answer that came too late."""
        self._what, self._ask, self._undo = what, ask, undo
        self._lock = threading.Lock()
        self._answers: list[T] = []
        self._error: DirectoryError | None = None
        self._given_up = False
        self._thread = threading.Thread(target=self._run, name="kvhearth-open", daemon=True)
        self._thread.start()

    def answer(self, end: float, patience_s: float) -> T:
        """What came of it until ``end`` (monotonic), ``patience_s`` after the start.

        Raises:
            DirectoryError: it ended so, or there is no answer.
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


def open_places(
    settings: SsdSettings, files: Files, counts: Counts, failed: dict[Place, str]
) -> list[Directory]:
    """All directories that can be used, their segments listed; why not goes to ``failed``.

    Raises:
        DirectoryError: none can be used.
    """
    end = time.monotonic() + settings.open_s

    def ask(place: Place) -> Asked[Directory]:
        def opened() -> Directory:
            return _open(settings, place, files)

        return Asked(str(place.path), opened, Directory.close)

    asked = {place: ask(place) for place in settings.places}
    found: list[Directory] = []
    for place, each in asked.items():
        try:
            found.append(each.answer(end, settings.open_s))
        except DirectoryError as error:
            failed[place] = str(error)
    if not found:
        raise DirectoryError("; ".join(failed.values()))
    for directory in found:
        for doubt, count in directory.doubts.items():
            counts.add(f"dropped_{doubt.value}", count)
    return found


def _open(settings: SsdSettings, place: Place, files: Files) -> Directory:
    found = Directory(place, settings.segment_bytes, files)
    try:
        found.list_segments()
    except OSError as error:
        found.close()
        raise DirectoryError(f"cannot list {place.path} ({error.strerror})") from error
    return found

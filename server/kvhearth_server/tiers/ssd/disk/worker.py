"""Workers: each does one part's work off the loop, on a thread of its own."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable
from typing import Protocol

from kvhearth_server.tiers.ssd.disk.queues import signal_event

_TICK_MS = 250


class Worker(Protocol):
    """Calls a part's ``turn`` once at the start, and again after each ``wake``.

    ``turn`` does all the work that is there. It may wait for the disk, for nothing else, and
    returns False at the end of its work.
    """

    def wake(self) -> None:
        """Have ``turn`` called again, soon."""

    @property
    def alive(self) -> bool:
        """False once ``turn`` has returned False or raised."""

    def join(self, deadline_s: float) -> bool:
        """Wait for the end; false if a turn does not return in time."""


StartWorker = Callable[[str, Callable[[], bool], int], Worker]
"""Starts a worker: its name, ``turn``, and an event that also wakes it and that ``turn`` resets, or
-1 for none.
"""


class ThreadWorker:
    """A worker on a thread. With an event it calls ``turn`` a few times a second besides: a kernel
    that lacked resources does not tell when it takes requests again.
    """

    def __init__(self, name: str, turn: Callable[[], bool], event_fd: int = -1) -> None:
        self._turn, self._event_fd = turn, event_fd
        self._called = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        if self._event_fd < 0:
            self._called.set()
        else:
            signal_event(self._event_fd)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, deadline_s: float) -> bool:
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        poll = select.poll()
        if self._event_fd >= 0:
            poll.register(self._event_fd, select.POLLIN)
        while self._turn():
            if self._event_fd >= 0:
                poll.poll(_TICK_MS)
            else:
                self._called.wait()
                self._called.clear()

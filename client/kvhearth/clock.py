"""The clock of a client: its time, its waits, and the threads that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Clock:
    """Real time. Tests pass one that moves on when all threads wait (``support.scripted_clock``).

    Times are monotonic seconds. What waits for a socket or a device keeps real time.
    """

    now = staticmethod(time.monotonic)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        """Wait for an event up to ``seconds``; return whether it is set."""
        return event.wait(seconds)

    def wait_for(
        self, condition: threading.Condition, predicate: Callable[[], object], seconds: float
    ) -> bool:
        """Wait up to ``seconds`` until ``predicate()`` is true; return whether it is.

        The caller holds the condition's lock, as does whoever calls ``predicate``, which changes
        nothing.
        """
        return bool(condition.wait_for(predicate, seconds))

    def start(self, thread: threading.Thread) -> None:
        """Start a thread that waits through this clock."""
        thread.start()

    def join(self, thread: threading.Thread, seconds: float) -> None:
        """Wait up to ``seconds`` for a thread to end."""
        thread.join(seconds)


REAL_TIME = Clock()

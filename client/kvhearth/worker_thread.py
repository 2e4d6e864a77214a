"""Supervised threads: a step that raises is logged and recovered from, and the thread continues."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable

from kvhearth.counters import LOGGER

_FAILURE_PAUSE_S = 0.1
_EXIT_S = 0.5


class Worker:
    """A thread that repeats one step until it is stopped.

    Args:
        name: name of the thread.
        step: does the work that is due; waits on ``changed`` while there is none, a fraction of a
            second at most.
        recover: called after a step that raised: counts the failure and gives the step's unfinished
            work an outcome.

    Attributes:
        changed: guards the owner's state; notified by ``stop``.
        lock: lock of ``changed``; taking it directly costs half.
        stopping: whether the thread ends, or has ended.
        pid: process that runs the thread; a forked child has no such thread, and its locks may be
            held for ever.
    """

    def __init__(self, name: str, step: Callable[[], None], recover: Callable[[], None]) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.stopping = False
        self.pid = os.getpid()
        self._step = step
        self._recover = recover
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        _live.add(self)

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child's copy."""
        return os.getpid() != self.pid

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, deadline_s: float) -> bool:
        """End the thread after its step; False if that took longer than ``deadline_s``.

        Idempotent.
        """
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(max(deadline_s, 0.0))
        return not self._thread.is_alive()

    def _main(self) -> None:
        while not self.stopping:
            try:
                self._step()
            except Exception:  # noqa: BLE001 - thread main: it survives any failure
                LOGGER.exception("a step of %s failed, going on", self._thread.name)
                self._recover_quietly()

    def _recover_quietly(self) -> None:
        try:
            self._recover()
        except Exception:  # noqa: BLE001 - thread main
            LOGGER.exception("%s could not recover", self._thread.name)
        with self.changed:
            self.changed.wait_for(lambda: self.stopping, _FAILURE_PAUSE_S)


_live: weakref.WeakSet[Worker] = weakref.WeakSet()


def _stop_at_exit() -> None:
    """Stop all workers, because a thread inside gRPC can crash an interpreter that ends."""
    for worker in list(_live):
        worker.stop(_EXIT_S)


def _after_fork_in_child() -> None:
    _live.clear()


atexit.register(_stop_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)

"""Supervised threads: a step that raises is logged and recovered from, and the thread continues."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable
from logging import ERROR

from kvhearth.clock import REAL_TIME, Clock
from kvhearth.counters import log_event

_FAILURE_PAUSE_S = 0.1
_EXIT_S = 0.5


def _nothing() -> None:
    """Do nothing."""


class SupervisedThread:
    """A thread, or several alike, that repeats one step until it is stopped.

    Args:
        name: name of the thread.
        step: does the work that is due; waits while there is none, on ``changed`` for a fraction of
            a second at most, or on what ``wake`` ends.
        recover: called after a step that raised: counts the failure and gives the step's unfinished
            work an outcome.
        wake: ends the wait of one thread; called by ``stop`` for each.
        at_exit: called when the interpreter ends, after all supervised threads were stopped.
        pause_s: rest after a failure.
        threads: number of threads.
        clock: times the rests and the stop; the step waits through it, or in a call.

    Attributes:
        changed: guards the owner's state; notified by ``stop``.
        lock: lock of ``changed``; taking it directly costs half.
        stopping: whether the thread ends, or has ended.
        pid: process that runs the thread; a forked child has no such thread, and its locks may be
            held for ever.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[], None],
        recover: Callable[[], None] = _nothing,
        *,
        wake: Callable[[], None] = _nothing,
        at_exit: Callable[[], None] = _nothing,
        pause_s: float = _FAILURE_PAUSE_S,
        threads: int = 1,
        clock: Clock = REAL_TIME,
    ) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.stopping = False
        self.pid = os.getpid()
        self._step = step
        self._recover = recover
        self._wake = wake
        self.at_exit = at_exit
        self._pause_s = pause_s
        self._clock = clock
        names = [f"{name}-{index}" for index in range(threads)] if threads > 1 else [name]
        self._threads = [
            threading.Thread(target=self._main, name=each, daemon=True) for each in names
        ]
        _live.add(self)

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child's copy."""
        return os.getpid() != self.pid

    def start(self) -> None:
        """Start the thread."""
        for thread in self._threads:
            self._clock.start(thread)

    def rest(self, seconds: float) -> None:
        """Wait, but not beyond ``stop``."""
        with self.changed:
            self._clock.wait_for(self.changed, lambda: self.stopping, seconds)

    def stop(self, deadline_s: float) -> bool:
        """End the thread after its step; False if that took longer than ``deadline_s``.

        Idempotent.
        """
        end = self._clock.now() + deadline_s
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        for _ in self._threads:
            self._wake()
        for thread in self._threads:
            if thread.is_alive() and threading.current_thread() is not thread:
                self._clock.join(thread, max(end - self._clock.now(), 0.0))
        if any(thread.is_alive() for thread in self._threads):
            return False
        # The owner and the memory that it maps live no longer than others need them.
        self._step = self._recover = self._wake = _nothing
        return True

    def _main(self) -> None:
        while not self.stopping:
            try:
                self._step()
            except Exception:  # noqa: BLE001 - thread main: it survives any failure
                self._log("thread.step_failed", "a step failed, going on")
                self._recover_quietly()

    def _log(self, event: str, text: str) -> None:
        log_event(ERROR, event, text, trace=True, thread=threading.current_thread().name)

    def _recover_quietly(self) -> None:
        try:
            self._recover()
        except Exception:  # noqa: BLE001 - thread main
            self._log("thread.recovery_failed", "a thread could not recover, going on")
        self.rest(self._pause_s)


_live: weakref.WeakSet[SupervisedThread] = weakref.WeakSet()


def _stop_at_exit() -> None:
    # A thread inside gRPC can crash an interpreter that ends. All are stopped first: one that still
    # runs would find its session closed and report a lost daemon.
    ended = list(_live)
    for each in ended:
        each.stop(_EXIT_S)
    for each in ended:
        each.at_exit()


def _after_fork_in_child() -> None:
    _live.clear()


atexit.register(_stop_at_exit)
os.register_at_fork(after_in_child=_after_fork_in_child)

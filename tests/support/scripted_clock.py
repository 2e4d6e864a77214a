"""A clock whose time stands while any of its threads works, and moves on when all of them wait.

Its threads are those that the client starts through it and the one that made it, the test's. Time
jumps to the earliest deadline of all waits and ends that wait only. A thread inside a call is not
waiting: time stands until the answer has come, however long the machine takes.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from kvhearth.clock import Clock
from kvhearth_lab.harness import HUNG_S

_LOOK_S = 0.002
"""Real pause of the driver: what no thread of the clock does may end a wait."""
_LOCK_S = 0.02
_TICK_S = 1e-6
"""Shortest wait: what rounding leaves of one would never end."""
_POLL_S = 0.001

ValueT = TypeVar("ValueT")


class _Wait:
    """One thread's wait on a condition."""

    def __init__(
        self, condition: threading.Condition, predicate: Callable[[], object], deadline: float
    ) -> None:
        self.thread = threading.current_thread()
        self.condition = condition
        self.deadline = deadline
        self.ended = False
        self._predicate = predicate

    def over(self) -> bool:
        """Whether the wait has ended; its thread evaluates this with the lock held."""
        return self.ended or bool(self._predicate())

    def look(self) -> bool:
        """Return whether the wait goes on; wake its thread if it does not."""
        if not self.condition.acquire(timeout=_LOCK_S):
            return False  # its thread, or one that changes its state, is at work
        try:
            if not self.over():
                return True
            self.condition.notify_all()
            return False
        finally:
            self.condition.release()

    def end(self) -> None:
        """End the wait at its deadline."""
        with self.condition:
            self.ended = True
            self.condition.notify_all()


class HandClock:
    """Time that only the test moves, for what takes a function that returns it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class ScriptedClock(Clock):
    """See the module; close it at the test's end, after what uses it."""

    def __init__(self) -> None:
        self._now = 1000.0
        self._lock = threading.Condition()
        self._test = threading.current_thread()
        self._threads = {self._test}
        self._waits: dict[threading.Thread, _Wait] = {}
        self._change_count = 0
        self._held_count = 0
        self._closed = False
        self._driver = threading.Thread(target=self._drive, name="scripted-clock", daemon=True)
        self._driver.start()

    def now(self) -> float:  # type: ignore[override]
        return self._now

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return self._wait_alone(event.is_set, seconds)

    def wait_for(
        self, condition: threading.Condition, predicate: Callable[[], object], seconds: float
    ) -> bool:
        if predicate():
            return True
        if seconds <= 0:
            return False
        wait = _Wait(condition, predicate, self._now + max(seconds, _TICK_S))
        with self._lock:
            self._waits[wait.thread] = wait
            self._changed()
        try:
            ended = condition.wait_for(wait.over, HUNG_S)
            while not ended and wait.thread is not self._test:
                ended = condition.wait_for(wait.over, HUNG_S)
        finally:
            with self._lock:
                del self._waits[wait.thread]
                self._changed()
        assert ended, f"no end of a wait in {HUNG_S} s: {self._busy()}"
        return bool(predicate())

    def start(self, thread: threading.Thread) -> None:
        with self._lock:
            thread.start()
            self._threads.add(thread)

    def join(self, thread: threading.Thread, seconds: float) -> None:
        self._wait_alone(lambda: not thread.is_alive(), seconds)

    def until(self, predicate: Callable[[], Any], what: str = "the condition") -> Any:
        """Let time pass until ``predicate()`` is true, and return its value."""
        began = time.monotonic()
        while not (value := predicate()):
            self._wait_alone(predicate, math.inf)
            assert time.monotonic() - began < HUNG_S, f"not within {HUNG_S} s: {what}"
        return value

    def pass_time(self, seconds: float) -> None:
        """Let so much time pass, with all that is due in it."""
        self._wait_alone(lambda: False, seconds)

    def result(self, future: Future[ValueT]) -> ValueT:
        """Let time pass until a future is done, and return its result."""
        self.until(future.done, "a future's result")
        return future.result(0)

    def poll(self, function: Callable[[], ValueT | None]) -> ValueT:
        """Call ``function`` once a millisecond until its value is not None, and return that."""
        began = time.monotonic()
        while (value := function()) is None:
            self.pass_time(_POLL_S)
            assert time.monotonic() - began < HUNG_S, f"no value in {HUNG_S} s"
        return value

    def hold(self) -> None:
        """Let time pass although one of the clock's threads is inside a call or a copy."""
        with self._lock:
            self._held_count += 1
            self._changed()

    def unhold(self) -> None:
        """Undo ``hold``, before what was held continues."""
        with self._lock:
            self._held_count -= 1
            self._changed()

    def close(self) -> None:
        """End the driver."""
        with self._lock:
            self._closed = True
            self._lock.notify_all()
        self._driver.join(HUNG_S)

    def _wait_alone(self, predicate: Callable[[], object], seconds: float) -> bool:
        with (alone := threading.Condition()):
            return self.wait_for(alone, predicate, seconds)

    def _changed(self) -> None:
        self._change_count += 1
        self._lock.notify_all()

    def _busy(self) -> str:
        with self._lock:
            names = [each.name for each in self._threads if each not in self._waits]
        return f"at work are {', '.join(names) or 'none'}"

    def _drive(self) -> None:
        while True:
            with self._lock:
                if self._closed:
                    return
                change_count, waits = self._change_count, list(self._waits.values())
                self._threads = {each for each in self._threads if each.is_alive()}
                quiet = len(self._threads - self._waits.keys()) <= self._held_count
            # No lock is held: a predicate may take others.
            for each in waits:
                quiet &= each.look()
            with self._lock:
                if change_count != self._change_count:
                    continue
                first = min(waits, key=lambda each: each.deadline) if quiet and waits else None
                if first is None or first.deadline == math.inf:
                    self._lock.wait(_LOOK_S)
                    continue
                self._now = max(self._now, first.deadline)
            first.end()


class HeldCall:
    """Answer of a scripted daemon that comes when the test releases it; time passes until then."""

    def __init__(self, clock: ScriptedClock) -> None:
        self.reached = False
        self._clock = clock
        self._lock = threading.Lock()
        self._released = threading.Event()

    def __call__(self, request: Any) -> None:
        """Hold the calling thread."""
        with self._lock:
            if self._released.is_set():
                return
            self._clock.hold()
            self.reached = True
        assert self._released.wait(HUNG_S), f"held for {HUNG_S} s"

    def release(self) -> None:
        """Let the answer go."""
        with self._lock:
            if self.reached:
                self._clock.unhold()
            self._released.set()


@contextlib.contextmanager
def scripted_clock() -> Iterator[ScriptedClock]:
    """Make a clock; close what uses it within the block."""
    clock = ScriptedClock()
    try:
        yield clock
    finally:
        clock.close()

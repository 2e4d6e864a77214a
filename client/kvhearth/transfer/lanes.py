"""Lanes: bounded queues of transfers, each with a thread that takes their steps in turn."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from kvhearth.client import KVClient
from kvhearth.copiers.base import BlockFailure
from kvhearth.errors import ClientReason, NoReason, Reason
from kvhearth.worker_thread import SupervisedThread

_SLICE_S = 0.1
_TICK_S = 0.25
"""Longest pause: a cancelled job is noticed within this time."""

ResultT = TypeVar("ResultT")
Steps = Generator[float, None, None]
"""A transfer in steps: each yields the monotonic time at which the next one is due."""

Failure = Reason | BlockFailure | ClientReason | NoReason
"""Why something of a transfer failed, or empty."""


class Transfer(Future[ResultT]):
    """Future of a store or a load, with its progress.

    ``cancel`` gives up a transfer whose copies have not begun, and a load that waits for SSD; what
    this load has copied before stays in its pages.

    Attributes:
        blocks_total: number of blocks.
        blocks_done: number of blocks whose copies have ended.
    """

    def __init__(self, blocks_total: int) -> None:
        super().__init__()
        self.blocks_total = blocks_total
        self.blocks_done = 0
        self._begun: bool | None = None
        self._lock = threading.Lock()
        self._copying = False

    def cancel(self) -> bool:
        with self._lock:
            return not self._copying and super().cancel()

    @contextlib.contextmanager
    def copying(self) -> Iterator[bool]:
        """Let nobody cancel meanwhile; yields False if somebody has. For ``Cache``."""
        with self._lock:
            self._copying = not self.cancelled()
        try:
            yield self._copying
        finally:
            self._copying = False

    def begin(self) -> bool:
        """Return whether the copies may begin: the transfer was not cancelled. For ``Cache``."""
        if self._begun is None:
            self._begun = self.set_running_or_notify_cancel()
        return self._begun


class Job(Generic[ResultT]):
    """One transfer of ``blocks`` blocks, submitted at ``now``."""

    def __init__(self, blocks: int, now: float) -> None:
        self.future: Transfer[ResultT] = Transfer(blocks)
        self.submitted_at = now
        self.due_at = 0.0
        self.reason: Failure = ""
        self.steps: Steps = self.run()

    def run(self) -> Steps:
        """Do the work; the lane continues it at the time that it yields. Runs on its thread."""
        raise NotImplementedError

    def result(self) -> ResultT:
        """Return the outcome, of the work that was done."""
        raise NotImplementedError

    def count_up(self) -> None:
        """Add to the client's counters."""

    def fail(self, reason: Failure) -> None:
        """Note why something failed; the first reason stays."""
        self.reason = self.reason or reason

    def resolve(self) -> None:
        """Hand the outcome to the caller, unless it was cancelled."""
        self.count_up()
        if self.future.begin():
            self.future.set_result(self.result())

    def refuse(self, reason: Failure) -> Transfer[ResultT]:
        """End a job that was never begun, and return its future."""
        self.fail(reason)
        self.future.begin()
        self.future.set_result(self.result())
        return self.future


class Lane:
    """A bounded queue of jobs, and the thread that takes their steps in turn. Thread-safe.

    Args:
        kind: prefix of its counters.
        client: counts crashes, and has the clock.
        blocks_max: most blocks inside.
        waiting_max: most jobs that wait for their next step; a further one is not begun.
    """

    def __init__(self, kind: str, client: KVClient, blocks_max: int, *, waiting_max: int) -> None:
        self.kind = kind
        self.closed = False
        self.given_up = False
        self._client = client
        self._clock = client.clock
        self._blocks_max = blocks_max
        self._waiting_max = waiting_max
        self._queue: deque[Job[Any]] = deque()
        self._waiting: list[Job[Any]] = []
        self._blocks = 0
        self._at_hand: Job[Any] | None = None
        self._worker = SupervisedThread(
            f"kvhearth-{kind}", self._step, self._recover, clock=client.clock
        )
        self._changed = self._worker.changed
        self._worker.start()

    @property
    def foreign(self) -> bool:
        """Whether this is a forked child's copy."""
        return self._worker.foreign

    def put(self, job: Job[Any]) -> Reason | ClientReason | NoReason:
        """Queue a job; return why not, or empty."""
        blocks = job.future.blocks_total
        if blocks > self._blocks_max:
            return Reason.TOO_MANY_KEYS
        with self._changed:
            if self.closed:
                return Reason.CLOSED
            if self._blocks + blocks > self._blocks_max:
                return ClientReason.QUEUE_FULL
            self._blocks += blocks
            self._queue.append(job)
            self._changed.notify_all()
        return ""

    def close(self, *, give_up: bool = False) -> None:
        """Take no more jobs and hurry the waiting ones; ``give_up`` ends what has not begun."""
        with self._changed:
            self.closed = True
            self.given_up |= give_up
            for job in self._waiting:
                job.due_at = 0.0
            self._changed.notify_all()

    def wait_idle(self, until: float) -> bool:
        """Wait until a monotonic time for all jobs to be done; True if so."""
        with self._changed:
            left_s = max(until - self._clock.now(), 0.0)
            return self._clock.wait_for(self._changed, lambda: not self._blocks, left_s)

    def stop(self, until: float) -> bool:
        """End the thread; False if it did not end in time."""
        return self._worker.stop(max(until - self._clock.now(), _SLICE_S))

    def _step(self) -> None:
        with self._changed:
            job = self._next()
            if job is None:
                self._clock.wait_for(
                    self._changed,
                    lambda: self._worker.stopping or self._next() is not None,
                    self._pause_s(),
                )
                return
            (self._waiting if job in self._waiting else self._queue).remove(job)
            self._at_hand = job
        try:
            job.due_at = next(job.steps)
        except StopIteration:
            self._at_hand = None
            self._end(job)
            return
        with self._changed:
            self._waiting.append(job)
            self._at_hand = None

    def _next(self) -> Job[Any] | None:
        """Return the job whose turn it is, without removing it."""
        now = self._clock.now()
        for job in self._waiting:
            if job.due_at <= now or job.future.cancelled():
                return job
        return self._queue[0] if self._queue and len(self._waiting) < self._waiting_max else None

    def _pause_s(self) -> float:
        now = self._clock.now()
        return max(min([_TICK_S, *(job.due_at - now for job in self._waiting)]), 0.0)

    def _end(self, job: Job[Any]) -> None:
        try:
            job.resolve()
        finally:
            with self._changed:
                self._blocks -= job.future.blocks_total
                self._changed.notify_all()

    def _recover(self) -> None:
        """End the job at hand after a step that raised."""
        self._client.count(f"{self.kind}_crashes")
        job, self._at_hand = self._at_hand, None
        if job is not None:
            job.fail(Reason.INTERNAL)
            self._end(job)

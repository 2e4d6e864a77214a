"""Threads that verify what the drive has moved, while the drive moves more."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import xxhash

from kvhearth_server.tiers.ssd.job import Job

_FEW = 12
"""So many waiting jobs are left to one thread: two that read memory at the same time cost the
processor a fifth more for each byte.
"""


class Checkers:
    """Compares jobs' bytes with their checksums; reads first, because they are waited for.

    A checksum of a large block releases the interpreter lock, so the threads disturb nobody.

    Args:
        then: called on one of the threads, with each job.
        threads: how many; see ``SsdSettings.sum_threads``.
        name: of the threads.
    """

    def __init__(self, then: Callable[[Job], None], threads: int, name: str) -> None:
        self._then = then
        self._reads: deque[Job] = deque()
        self._writes: deque[Job] = deque()
        self._lock = threading.Lock()
        self._idle = threads
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvhearth-{name}-sums-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """False if a thread has died or was stopped."""
        return all(thread.is_alive() for thread in self._threads)

    def check(self, jobs: Sequence[Job]) -> None:
        """Have jobs verified; the indices of checks that fail come into ``Job.wrong``.

        Never waits. Whoever hands jobs in bounds how many there are.
        """
        for job in jobs:
            (self._reads if job.is_read else self._writes).append(job)
        waiting = len(self._reads) + len(self._writes)
        wanted = len(self._threads) if waiting > _FEW else 1
        with self._lock:
            called = max(0, wanted - (len(self._threads) - self._idle))
            self._idle -= called
        for _ in range(called):
            self._calls.put(True)

    def stop(self, deadline_s: float) -> bool:
        """End the threads once all is verified that was handed in; false if that takes too long."""
        end = time.monotonic() + deadline_s
        for _ in self._threads:
            self._calls.put(False)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while self._calls.get():
            while (job := self._next()) is not None:
                for index, (view, wanted) in enumerate(job.checks):
                    if xxhash.xxh3_128_digest(view) != wanted:
                        job.wrong.append(index)
                self._then(job)

    def _next(self) -> Job | None:
        """A job that waits; for none, this thread is idle from now on."""
        while True:
            for waiting in (self._reads, self._writes):
                try:
                    return waiting.popleft()
                except IndexError:
                    continue
            with self._lock:
                # Jobs are put in before the lock is taken: either this sees them, or who puts
                # them in sees that this thread is idle.
                if not self._reads and not self._writes:
                    self._idle += 1
                    return None

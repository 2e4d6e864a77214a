"""The thread that compares checksums, so that the one that drives the disk is always free for it.

A checksum of 2 MiB takes as long as a fast drive takes for a quarter of it, and a thread that is
busy is served later than one that mostly waits: in one thread with the driver's work it would let
the drive run dry wherever processors are short.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable

import xxhash

from kvhearth_server.tiers.ssd.job import Job


class Verifier:
    """Takes jobs that the device has done, and hands them on to ``done`` on its own thread, reads
    before writes.
    """

    def __init__(self, done: Callable[[Job], None], name: str) -> None:
        self._done = done
        self._reads: deque[Job] = deque()
        self._writes: deque[Job] = deque()
        self._more: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kvhearth-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False if the thread has died; its jobs never end then."""
        return self._thread.is_alive()

    def put(self, job: Job) -> None:
        """Verify a job; never waits. The driver's caller bounds how many there are."""
        (self._reads if job.is_read else self._writes).append(job)
        self._more.put(True)

    def stop(self) -> None:
        """End the thread when it has done what was put; that needs no device."""
        self._more.put(False)
        self._thread.join()

    def _run(self) -> None:
        while self._more.get():
            job = (self._reads or self._writes).popleft()
            if not (job.cancelled and job.is_read):
                for index, (view, wanted) in enumerate(job.checks):
                    if xxhash.xxh3_128_digest(view) != wanted:
                        job.wrong.append(index)
            self._done(job)

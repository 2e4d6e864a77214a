"""The thread that compares checksums, so that the one that drives the disk is always free for it.

A checksum of 2 MiB takes as long as a fast drive takes for a quarter of it, and a thread that is
busy is served later than one that mostly waits: in one thread with the driver's work it would let
the drive run dry wherever processors are short.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import xxhash

from kvhearth_server.tiers.ssd.job import Job


class Verifier:
    """Takes jobs that the device has done, and hands them on to ``done`` on its own thread."""

    def __init__(self, done: Callable[[Job], None], name: str) -> None:
        self._done = done
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"kvhearth-{name}", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """False if the thread has died; its jobs never end then."""
        return self._thread.is_alive()

    def put(self, job: Job) -> None:
        """Verify a job; never waits. The driver's caller bounds how many there are."""
        self._jobs.put(job)

    def stop(self) -> None:
        """End the thread when it has done what was put; that needs no device."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if not (job.cancelled and job.is_read):
                for index, (view, wanted) in enumerate(job.checks):
                    if xxhash.xxh3_128_digest(view) != wanted:
                        job.wrong.append(index)
            self._done(job)

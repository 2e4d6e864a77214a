"""Bounce memory: aligned buffers between the drive and the arena, for bytes that are converted."""

from __future__ import annotations

import contextlib
import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from kvhearth_server.tiers.ssd.disk.executor import Job

SPARE_BYTES = 4096
"""Bytes of a buffer behind its image."""
_WAIT_S = 0.25


class Bounce(Protocol):
    """Conversion of one request's bytes. Both methods are called beside the loop.

    Attributes:
        size: bytes of the image on the disk.
        records: records in it.
    """

    size: int
    records: int

    def fill(self, image: memoryview) -> None:
        """Make the image of a write; ``SPARE_BYTES`` more may be overwritten."""
        ...

    def drain(self, image: memoryview) -> list[int]:
        """Take the image of a read to where it belongs; return the indices of wrong records."""
        ...


class Image:
    """One buffer."""

    def __init__(self, size: int) -> None:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.bytes = np.frombuffer(memory, np.uint8)

    @property
    def address(self) -> int:
        """Address of its first byte, at a page."""
        return int(self.bytes.ctypes.data)


class BounceMemory:
    """Buffers of ``budget`` bytes at most; one that is larger is lent alone. Thread-safe."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._lent = 0
        self._free: dict[int, list[Image]] = {}
        self._free_bytes = 0
        self._changed = threading.Condition()

    def take(self, size: int) -> Image | None:
        """Lend a buffer for an image of ``size`` bytes; None while there is no room."""
        with self._changed:
            return self._take(size + SPARE_BYTES)

    def wait(self, size: int, given_up: Callable[[], bool]) -> Image | None:
        """Lend a buffer as soon as there is room; None once ``given_up`` is true."""
        with self._changed:
            while not given_up():
                found = self._take(size + SPARE_BYTES)
                if found is not None:
                    return found
                self._changed.wait(_WAIT_S)
        return None

    def _take(self, whole: int) -> Image | None:
        if self._lent and self._lent + whole > self._budget:
            return None
        self._lent += whole
        if kept := self._free.get(whole):
            self._free_bytes -= whole
            return kept.pop()
        if self._lent + self._free_bytes > self._budget:
            self._free, self._free_bytes = {}, 0
        return Image(whole)

    def give(self, image: Image) -> None:
        """Take a buffer back."""
        with self._changed:
            size = len(image.bytes)
            self._lent -= size
            if self._lent + self._free_bytes + size <= self._budget:
                self._free.setdefault(size, []).append(image)
                self._free_bytes += size
            self._changed.notify_all()


class FillPool:
    """Threads that make the images of writes.

    Args:
        memory: for the images.
        ready: called by a thread with a job that has its image.
        failed: called by a thread with a job that got none.
        given_up: whether no job begins any more.
    """

    def __init__(
        self,
        memory: BounceMemory,
        ready: Callable[[Job], None],
        failed: Callable[[Job], None],
        given_up: Callable[[], bool],
        threads: int,
        name: str,
    ) -> None:
        self._memory = memory
        self._ready, self._failed, self._given_up = ready, failed, given_up
        self._waiting: deque[Job] = deque()
        self._working = 0
        self._ended = False
        self._changed = threading.Condition()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvhearth-{name}-fill-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """False if a thread has died or was stopped."""
        return all(thread.is_alive() for thread in self._threads)

    @property
    def busy(self) -> bool:
        """Whether a job waits for its image."""
        with self._changed:
            return bool(self._waiting or self._working) and self.alive

    def add(self, jobs: Sequence[Job]) -> None:
        """Queue jobs; never waits. The caller bounds the number of jobs."""
        with self._changed:
            for job in jobs:
                if job.urgent:
                    self._waiting.appendleft(job)
                else:
                    self._waiting.append(job)
            self._changed.notify_all()

    def stop(self) -> None:
        """End the threads once no job waits."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._ended)
                if not self._waiting:
                    return
                job = self._waiting.popleft()
                self._working += 1
            self._fill(job)
            with self._changed:
                self._working -= 1

    def _fill(self, job: Job) -> None:
        assert job.bounce is not None
        image = self._memory.wait(job.bounce.size, lambda: job.cancelled or self._given_up())
        if image is None:
            self._failed(job)
            return
        job.bounce.fill(image.bytes.data)
        job.back(image)
        self._ready(job)

"""Batches of blocks on their way between the arena and a remote: what a helper's threads do.

Some threads seal a batch's portions, others put those that are sealed. A thread that got a portion
also opens it, while its bytes are in the processor's cache.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

import numpy as np

from kvhearth.failpoints import hit
from kvhearth.model import CHECKSUM_BYTES
from kvhearth.worker_thread import SupervisedThread
from kvhearth_server.tiers.base import Corrupt, Done, Failed, Failure, Missing, Outcome
from kvhearth_server.tiers.remote.frames import Results, Work
from kvhearth_server.tiers.remote.helper.drivers.base import Driver
from kvhearth_server.tiers.remote.helper.memory import Memory
from kvhearth_server.tiers.remote.helper.sealing import Sealer
from kvhearth_server.tiers.remote.mover import Get, Put
from kvhearth_server.tiers.remote.record import Suspect, record_bytes

_SEALING_THREADS = 2
_FAILED: Outcome = Failed(Failure.IO)
Ended = Callable[[Work, Results, Counter[str]], None]


class Movers:
    """Threads that put and get.

    Args:
        cancelled: whether a ticket's request was given up.
        ended: called in a thread with the results of a batch and its counts.
    """

    def __init__(
        self,
        driver: Driver,
        memory: Memory,
        sealer: Sealer,
        cancelled: Callable[[int], bool],
        ended: Ended,
    ) -> None:
        self._driver, self._memory, self._sealer = driver, memory, sealer
        self._cancelled, self._ended = cancelled, ended
        self._sealing = _Threads("kvhearth-sealing", _SEALING_THREADS)
        self._putting = _Threads("kvhearth-putting", driver.parallel)
        self._getting = _Threads("kvhearth-getting", driver.parallel)

    def _portions(self, size: int, count: int) -> list[range]:
        """Divide rows evenly among the threads, in calls of the size that suits the driver."""
        each = -(-count // self._driver.parallel)
        step = max(1, min(self._driver.portion(size), each))
        return [range(at, min(at + step, count)) for at in range(0, count, step)]

    def put(self, work: Work, request: Put, names: list[str]) -> None:
        """Begin to seal a batch; what is sealed is on its way while more is.

        Raises:
            ValueError: a place is outside the arena.
        """
        self._memory.check(request)
        portions = self._portions(record_bytes(request.family), len(names))
        batch = _Batch(work, len(portions), self._ended)
        for rows in portions:
            self._sealing.run(partial(self._seal, names, batch, rows))

    def _seal(self, names: list[str], batch: _Batch, rows: Sequence[int]) -> None:
        """Seal a portion."""
        work, good = batch.work, list[int]()
        request = work.request
        assert isinstance(request, Put)
        try:
            for row in rows:
                if self._memory.seal(self._sealer, request, work.offsets, row):
                    good.append(row)
                else:
                    batch.outcomes[row] = Corrupt("source")
            hit("mover.staged")
        finally:
            self._putting.run(partial(batch.run, good, self._gone, partial(self._send, names)))

    def _send(self, names: list[str], batch: _Batch, rows: Sequence[int]) -> None:
        work, request = batch.work, batch.work.request
        assert isinstance(request, Put)
        size = record_bytes(request.family)
        values = [self._memory.staged(work.offsets[row], size) for row in rows]
        hit("mover.before_put")
        found = self._driver.put(
            [names[row] for row in rows], values, work.deadline, replace=request.replace
        )
        hit("mover.after_put")
        for row, outcome in zip(rows, found, strict=True):
            batch.outcomes[row] = outcome
        batch.count("put_bytes", size * sum(isinstance(each, Done) for each in found))

    def get(self, work: Work, request: Get, names: list[str]) -> None:
        """Get a batch, its portions side by side, and verify what comes.

        Raises:
            ValueError: a place is outside the arena.
        """
        self._memory.check(request)
        count = len(names)
        portions = self._portions(record_bytes(request.family), count)
        batch = _Batch(work, len(portions), self._ended)
        sums = np.zeros((count, request.family.shards), f"V{CHECKSUM_BYTES}")
        batch.results.checksums, batch.results.parents = sums, [b""] * count
        receive = partial(self._receive, names)
        for rows in portions:
            self._getting.run(partial(batch.run, rows, self._gone, receive))

    def _receive(self, names: list[str], batch: _Batch, rows: Sequence[int]) -> None:
        work, request = batch.work, batch.work.request
        assert isinstance(request, Get)
        size = record_bytes(request.family)
        into = [self._memory.staged(work.offsets[row], size) for row in rows]
        hit("mover.before_get")
        found = self._driver.get([names[row] for row in rows], into, work.deadline)
        hit("mover.after_get")
        for row, each in zip(rows, found, strict=True):
            if isinstance(each, memoryview):
                self._open(batch, request, row, each)
            else:
                if isinstance(each, Corrupt):
                    batch.count(Suspect.ALTERED, 1)
                batch.miss(row, each)
        hit("mover.unstaged")

    def _open(self, batch: _Batch, request: Get, row: int, record: memoryview) -> None:
        results, head = batch.results, self._memory.open(self._sealer, request, row, record)
        if isinstance(head, Suspect):
            batch.count(head, 1)
            batch.miss(row, head.outcome)
            return
        assert results.checksums is not None
        results.checksums[row] = np.frombuffer(head.checksums, results.checksums.dtype)
        batch.outcomes[row], results.parents[row] = Done(), head.parent
        batch.count("get_bytes", len(record))

    def _gone(self, work: Work) -> Outcome | None:
        """Outcome of rows that must not begin any more."""
        if self._cancelled(work.ticket):
            return Failed(Failure.CANCELLED)
        return Failed(Failure.TIMEOUT) if time.monotonic() >= work.deadline else None


class _Threads:
    """Threads that run what is queued. A pool of the standard library costs twice as much for each
    portion.
    """

    def __init__(self, name: str, count: int) -> None:
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.run = self._queue.put
        threads = SupervisedThread(name, self._step, wake=lambda: self.run(_nothing), threads=count)
        threads.start()

    def _step(self) -> None:
        self._queue.get()()


def _nothing() -> None:
    """Do nothing."""


class _Batch:
    """A batch under way. It is over when its last portion is."""

    def __init__(self, work: Work, portions: int, ended: Ended) -> None:
        self.work = work
        self.outcomes: list[Outcome] = [_FAILED] * len(work.request.keys)
        self.results = Results(self.outcomes)
        self._counts: Counter[str] = Counter()
        self._first_miss = len(self.outcomes)
        self._left = portions
        self._ended = ended
        self._lock = threading.Lock()
        self._began = time.monotonic()

    def count(self, name: str, amount: int) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name] += amount

    def miss(self, row: int, outcome: Outcome) -> None:
        """Take the outcome of a row that did not come. A batch ends at its first miss."""
        self.outcomes[row] = outcome
        if isinstance(outcome, Missing):
            with self._lock:
                self._first_miss = min(self._first_miss, row)

    def run(
        self,
        rows: Sequence[int],
        gone: Callable[[Work], Outcome | None],
        move: Callable[[_Batch, Sequence[int]], None],
    ) -> None:
        """Run a portion; the last one ends the batch. What it raises is logged by its thread."""
        try:
            if rows and rows[0] <= self._first_miss:
                if (why := gone(self.work)) is None:
                    move(self, rows)
                else:
                    for row in rows:
                        self.outcomes[row] = why
        finally:
            with self._lock:
                self._left -= 1
                last = not self._left
            if last:
                self._end()

    def _end(self) -> None:
        results, first = self.results, self._first_miss
        if results.checksums is not None:
            for row in range(first, len(self.outcomes)):
                self.outcomes[row], results.parents[row] = Missing(), b""
                results.checksums[row] = np.zeros((), results.checksums.dtype)
        put = isinstance(self.work.request, Put)
        milliseconds = round(1000 * (time.monotonic() - self._began))
        self._counts["put_ms" if put else "get_ms"] += milliseconds
        self._ended(self.work, results, self._counts)

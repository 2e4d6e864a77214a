"""Batches of blocks on their way between the arena and a remote: a helper's memory and threads.

Some threads seal a batch's portions, others put those that are sealed. A thread that got a portion
also opens it, while its bytes are in the processor's cache.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

import numpy as np

from kvhearth.failpoints import hit
from kvhearth.model import CHECKSUM_BYTES, U8, checksum_of
from kvhearth.native.blocks import address_of
from kvhearth.shared_memory import MADV_POPULATE_WRITE, SharedMapping, advise
from kvhearth.worker_thread import SupervisedThread
from kvhearth_server.tiers.base import Corrupt, Done, Failed, Failure, Missing
from kvhearth_server.tiers.remote.helper.drivers.base import Driver
from kvhearth_server.tiers.remote.helper.sealing import Sealer
from kvhearth_server.tiers.remote.mover import Answer, Get, Put, Work
from kvhearth_server.tiers.remote.record import Name, Suspect, record_bytes

_HUGE_BYTES = 2 << 20
_MAP_HUGETLB = 0x40000

_SEALING_THREADS = 2
Ended = Callable[[Answer, Counter[str]], None]


def _staging(size: int) -> U8:
    """Map memory of its own, in huge pages where there are any."""
    whole = -(-size // _HUGE_BYTES) * _HUGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        memory = mmap.mmap(-1, whole, flags=flags | _MAP_HUGETLB)
    except OSError as error:
        if error.errno not in (errno.ENOMEM, errno.EINVAL, errno.EPERM):
            raise
        memory = mmap.mmap(-1, whole, flags=flags)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    found = np.frombuffer(memory, np.uint8)
    # Faulted in now; before Linux 5.14 as it is used.
    advise(address_of(found), whole, MADV_POPULATE_WRITE)
    return found


class Memory:
    """The arena's regions and the staging memory. Its methods may run in any thread.

    Args:
        regions: descriptor and size of each arena segment; the descriptors are left open, since
            the locks that they bear tell the daemon who maps the arena.

    Attributes:
        staging: the staging memory, of which the daemon knows what is free.
    """

    def __init__(self, regions: Sequence[tuple[int, int]], staging_bytes: int) -> None:
        self._views = [np.asarray(SharedMapping(fd, size)).data for fd, size in regions]
        self.staging = _staging(staging_bytes).data

    def slots(self, request: Get, row: int) -> list[memoryview]:
        """Return the bytes of a block's slots."""
        length = request.family.length
        return [
            self._views[region][offset : offset + length]
            for region, _, offset in request.places[row].tolist()
        ]


class Movers:
    """Threads that put and get.

    Args:
        cancelled: tickets of requests that were given up.
        ended: called in a thread with the answer of a batch and its counts.
    """

    def __init__(
        self,
        driver: Driver,
        memory: Memory,
        sealer: Sealer,
        cancelled: set[int],
        ended: Ended,
    ) -> None:
        self._driver, self._memory, self._sealer = driver, memory, sealer
        self._cancelled, self._ended = cancelled, ended
        self._sealing = _Threads("kvhearth-sealing", _SEALING_THREADS)
        self._putting = _Threads("kvhearth-putting", driver.parallel)
        self._getting = _Threads("kvhearth-getting", driver.parallel)

    def move(self, work: Work, request: Get, names: list[str]) -> None:
        """Begin to move a batch, its portions side by side: a put's are sealed first."""
        count = len(names)
        # Rows are divided evenly among the threads, in calls of the size that suits the driver.
        each = -(-count // self._driver.parallel)
        step = max(1, min(self._driver.portion(record_bytes(request.family)), each))
        portions = [range(at, min(at + step, count)) for at in range(0, count, step)]
        batch = _Batch(work, names, len(portions))
        if isinstance(request, Put):
            for rows in portions:
                self._sealing.run(partial(self._seal, batch, request, rows))
            return
        sums = np.zeros((count, request.family.shards), f"V{CHECKSUM_BYTES}")
        batch.answer.checksums, batch.answer.parents = sums, [b""] * count
        for rows in portions:
            self._getting.run(partial(self._run, batch, rows, partial(self._receive, request)))

    def _seal(self, batch: _Batch, request: Put, rows: Sequence[int]) -> None:
        """Seal a portion, whose records are on their way while others are sealed."""
        good = list[int]()
        try:
            for row in rows:
                shards, sums = self._memory.slots(request, row), request.checksums[row].tobytes()
                if b"".join(map(checksum_of, shards)) == sums:
                    into = self._memory.staging[batch.work.staged(row)]
                    name, parent = batch.name(row), request.parents[row]
                    self._sealer.seal(name, parent, sums, shards, into)
                    good.append(row)
                else:
                    batch.answer.outcomes[row] = Corrupt("source")
            hit("mover.staged")
        finally:
            self._putting.run(partial(self._run, batch, good, self._send))

    def _send(self, batch: _Batch, rows: Sequence[int]) -> None:
        values = [self._memory.staging[batch.work.staged(row)] for row in rows]
        hit("mover.before_put")
        found = self._driver.put([batch.names[row] for row in rows], values, batch.work.deadline)
        hit("mover.after_put")
        for row, value, outcome in zip(rows, values, found, strict=True):
            batch.answer.outcomes[row] = outcome
            batch.count("put_bytes", len(value) * isinstance(outcome, Done))

    def _receive(self, request: Get, batch: _Batch, rows: Sequence[int]) -> None:
        into = [self._memory.staging[batch.work.staged(row)] for row in rows]
        hit("mover.before_get")
        found = self._driver.get([batch.names[row] for row in rows], into, batch.work.deadline)
        hit("mover.after_get")
        for row, each in zip(rows, found, strict=True):
            if isinstance(each, memoryview):
                self._open(batch, request, row, each)
            else:
                if isinstance(each, Corrupt):
                    batch.count(Suspect.ALTERED, 1)
                batch.answer.outcomes[row] = each
        hit("mover.unstaged")

    def _open(self, batch: _Batch, request: Get, row: int, record: memoryview) -> None:
        answer, shards = batch.answer, self._memory.slots(request, row)
        head = self._sealer.open(batch.name(row), record, shards)
        if isinstance(head, Suspect):
            batch.count(head, 1)
            answer.outcomes[row] = Corrupt("remote")
            return
        assert answer.checksums is not None
        answer.checksums[row] = np.frombuffer(head.checksums, answer.checksums.dtype)
        answer.outcomes[row], answer.parents[row] = Done(), head.parent
        batch.count("get_bytes", len(record))

    def _run(
        self,
        batch: _Batch,
        rows: Sequence[int],
        move: Callable[[_Batch, Sequence[int]], None],
    ) -> None:
        """Move a portion; the last one ends the batch. What it raises is logged by its thread."""
        try:
            why = Failure.TIMEOUT if time.monotonic() >= batch.work.deadline else None
            if batch.work.ticket in self._cancelled:
                why = Failure.CANCELLED
            if why is not None:
                for row in rows:
                    batch.answer.outcomes[row] = Failed(why)
            elif rows and rows[0] <= batch.first_miss():
                move(batch, rows)
        finally:
            if batch.is_over():
                self._ended(batch.answer, batch.end())


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

    def __init__(self, work: Work, names: list[str], portions: int) -> None:
        self.work, self.names = work, names
        self.answer = work.failed(Failure.IO)
        self._counts: Counter[str] = Counter()
        self._left = portions
        self._lock = threading.Lock()
        self._began = time.monotonic()

    def name(self, row: int) -> Name:
        """Return the identity of a row's block."""
        request = self.work.request
        return Name(self.names[row], request.space, request.family, request.keys[row])

    def count(self, name: str, amount: int) -> None:
        """Add to a counter."""
        with self._lock:
            self._counts[name] += amount

    def first_miss(self) -> int:
        """Return the row at which a get ends; the number of rows if there is none."""
        outcomes = self.answer.outcomes
        missing = isinstance(self.work.request, Put) or Missing() not in outcomes
        return len(outcomes) if missing else outcomes.index(Missing())

    def is_over(self) -> bool:
        """Count a portion that ended; return whether it was the last one."""
        with self._lock:
            self._left -= 1
            return not self._left

    def end(self) -> Counter[str]:
        """Clear the rows behind a get's first miss; return all counts."""
        answer = self.answer
        if answer.checksums is not None:
            first = self.first_miss()
            left = len(answer.outcomes) - first
            answer.outcomes[first:], answer.parents[first:] = [Missing()] * left, [b""] * left
            answer.checksums[first:] = np.zeros((), answer.checksums.dtype)
        put = isinstance(self.work.request, Put)
        self._counts["put_ms" if put else "get_ms"] += round(
            1000 * (time.monotonic() - self._began)
        )
        return self._counts

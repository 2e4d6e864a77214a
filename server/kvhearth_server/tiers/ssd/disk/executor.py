"""Executes disk requests on a thread, verifies moved bytes on others, measures the read rate."""

from __future__ import annotations

import errno
import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from kvhearth.failpoints import hit
from kvhearth.model import checksum_of
from kvhearth_server.observability.counters import SECONDS_BOUNDS, Histogram
from kvhearth_server.tiers.base import Failure
from kvhearth_server.tiers.ssd.disk.queues import (
    DiskQueue,
    Op,
    Request,
    reset_event,
    signal_event,
)
from kvhearth_server.tiers.ssd.disk.worker import StartWorker, ThreadWorker

Check = tuple[memoryview, bytes]
"""Bytes, and the xxh3_128 they must have."""

_REASONS = {
    errno.ENOSPC: Failure.NO_SPACE,
    errno.EDQUOT: Failure.NO_SPACE,
    errno.EROFS: Failure.READ_ONLY,
    errno.ECANCELED: Failure.CANCELLED,
}


@dataclass(slots=True, eq=False)
class Group:
    """``size`` jobs that were submitted together; ``left`` of them have not ended."""

    size: int
    left: int


@dataclass(slots=True, eq=False)
class Job:
    """A request in flight: the loop makes it, the executor fills in its result.

    Attributes:
        op, fd, offset, pieces: as in ``Request``.
        length: bytes of all pieces.
        checks: checksums to verify when the request has ended. This leaves the drive busy with its
            next requests, and no write is acknowledged whose source was wrong after it.
        wrong: indices of checks that failed. Failed records of a write are in no footer, and a
            scan finds that their payload does not match their header; failed bytes of a read must
            not be used.
        then: callback of the loop for the ended job.
        keep: memory that must outlive the job.
        sync: a write is done only when the file's data is flushed.
        urgent: goes before all jobs that wait.
        cancelled: set by the loop; a job that has not begun then ends with ECANCELED.
        begun_at: by the executor's clock, 0 while it waits for its turn.
        error: errno, 0 for none.
        short: fewer bytes were moved than requested.
        reported_stuck: the loop has reported that it is stuck.
        group: jobs it was submitted with; set by the executor.
    """

    op: Op
    fd: int
    offset: int
    pieces: tuple[tuple[int, int], ...]
    length: int
    checks: tuple[Check, ...]
    then: Callable[[Job], None]
    keep: object = None
    sync: bool = False
    urgent: bool = False
    cancelled: bool = False
    queued_at: float = 0.0
    begun_at: float = 0.0
    ended_at: float = 0.0
    error: int = 0
    short: bool = False
    reported_stuck: bool = False
    group: Group | None = None
    wrong: list[int] = field(default_factory=list)

    @property
    def is_read(self) -> bool:
        """Whether the job reads."""
        return self.op is Op.READ

    @property
    def good(self) -> bool:
        """Whether the device did all of it; ``wrong`` is independent of this."""
        return not self.error and not self.short

    @property
    def reason(self) -> Failure:
        """Reason of a failure, in a word."""
        return Failure.SHORT if self.short else _REASONS.get(self.error, Failure.IO)


_FEW = 12
"""Most waiting jobs that are left to one thread: two threads that read memory at the same time cost
the processor a fifth more for each byte.
"""


class ChecksumPool:
    """Compares jobs' bytes with their checksums; reads first, because callers wait for them.

    The checksum of a large block releases the interpreter lock, so the threads do not disturb
    others.

    Args:
        then: called on one of the threads, with each job.
        threads: number of threads, see ``SsdSettings.sum_threads``; with 0 ``check`` verifies.
    """

    def __init__(self, then: Callable[[Job], None], threads: int) -> None:
        self._then = then
        self._reads: deque[Job] = deque()
        self._writes: deque[Job] = deque()
        self._lock = threading.Lock()
        self._idle = threads
        self._calls: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvhearth-ssd-sums-{index}", daemon=True)
            for index in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def alive(self) -> bool:
        """False if a thread has died or was stopped."""
        return all(thread.is_alive() for thread in self._threads)

    def check(self, jobs: Sequence[Job]) -> None:
        """Queue jobs for verification; the indices of failed checks are added to ``Job.wrong``.

        Never waits. The caller bounds the number of jobs.
        """
        for job in jobs:
            (self._reads if job.is_read else self._writes).append(job)
        if not self._threads:
            self._verify()
            return
        waiting = len(self._reads) + len(self._writes)
        wanted = len(self._threads) if waiting > _FEW else 1
        with self._lock:
            called = max(0, wanted - (len(self._threads) - self._idle))
            self._idle -= called
        for _ in range(called):
            self._calls.put(True)

    def stop(self, deadline_s: float) -> bool:
        """End the threads once all queued jobs are verified; false if that takes too long."""
        end = time.monotonic() + deadline_s
        for _ in self._threads:
            self._calls.put(False)
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while self._calls.get():
            self._verify()

    def _verify(self) -> None:
        while (job := self._next()) is not None:
            for index, (view, wanted) in enumerate(job.checks):
                if checksum_of(view) != wanted:
                    job.wrong.append(index)
            self._then(job)

    def _next(self) -> Job | None:
        """Return a job that waits; without one, this thread is idle from now on."""
        while True:
            for waiting in (self._reads, self._writes):
                try:
                    return waiting.popleft()
                except IndexError:
                    continue
            with self._lock:
                # Jobs are queued before the lock is taken: either this thread sees them, or the
                # caller sees that this thread is idle.
                if not self._reads and not self._writes:
                    self._idle += 1
                    return None


_CHECKED_S = 5.0
"""Longest time that the last checks may take when the thread ends."""
_FIRST_JOBS = 8
"""Jobs of the first submission in a turn: few, lest they wait until all are prepared."""
_TOLD_JOBS = 32
"""Ended jobs that are reported before their whole group, lest the loop get too many at once."""
_BEFORE = {op: f"ssd.before_{op.name.lower()}" for op in Op}
_AFTER = {op: f"ssd.after_{op.name.lower()}" for op in Op}


class IoExecutor:
    """Executes jobs: reads before writes, at most ``depth`` at once.

    While reads wait or run, writes get at most a quarter of the depth, and always at least one:
    callers wait for a promotion but not for a write-back, which must not starve either.
    """

    def __init__(
        self,
        queue: DiskQueue,
        event_fd: int,
        *,
        sum_threads: int = 1,
        clock: Callable[[], float] = time.monotonic,
        start: StartWorker = ThreadWorker,
    ) -> None:
        self.event_fd = event_fd
        self._queue = queue
        self._clock = clock
        self._reads: deque[Job] = deque()
        self._writes: deque[Job] = deque()
        self._ended: deque[Job] = deque()
        self._running: dict[int, Job] = {}
        self.running: Mapping[int, Job] = MappingProxyType(self._running)
        """Reads and writes in the kernel, for counting them; the executor's thread changes it."""
        self._running_writes = 0
        self._unflushed: dict[int, list[Job]] = {}
        self._flushing: dict[int, tuple[int, list[Job]]] = {}
        self._tags = itertools.count(1)
        self._checked: deque[Job] = deque()
        self._stop = False
        self.broken = ""
        self._telling = threading.Lock()
        self._checkers = ChecksumPool(self._verified, sum_threads)
        self._worker = start("kvhearth-ssd", self._turn, queue.event_fd)

    # -- the loop's side ---------------------------------------------------------------------------

    def submit(self, jobs: Sequence[Job]) -> None:
        """Queue jobs; never waits. The caller bounds the number of jobs.

        ``event_fd`` becomes readable when the last of them has ended, or many have.
        """
        if not jobs:
            return
        now, group = self._clock(), Group(len(jobs), len(jobs))
        for job in jobs:
            job.queued_at, job.group = now, group
            waiting = self._reads if job.op is Op.READ else self._writes
            if job.urgent:
                waiting.appendleft(job)
            else:
                waiting.append(job)
        self._worker.wake()

    def take(self, count: int) -> list[Job]:
        """Return up to ``count`` jobs that have ended; the event is set while more have."""
        reset_event(self.event_fd)
        if not self._worker.alive:
            # Jobs that were queued while the thread was ending; no other thread touches them any
            # more.
            self._cancel_waiting(errno.EIO)
        ended = list[Job]()
        while self._ended and len(ended) < count:
            ended.append(self._ended.popleft())
        if self._ended:
            signal_event(self.event_fd)
        return ended

    @property
    def alive(self) -> bool:
        """False if a thread has died; some jobs never end then."""
        return self._worker.alive and self._checkers.alive

    def stop(self, deadline_s: float) -> bool:
        """End the thread once nothing runs; false if the device did not finish in time.

        Jobs that have not begun end with ECANCELED.
        """
        self._stop = True
        self._worker.wake()
        return self._worker.join(deadline_s)

    # -- the thread --------------------------------------------------------------------------------

    def _turn(self) -> bool:
        try:
            self._reap()
        except OSError as error:
            self._break(error)
            self._checkers.stop(_CHECKED_S)
            return False
        if not self._stop:
            self._start()
            return True
        return not self._empty()

    def _reap(self) -> None:
        reaped = self._queue.reap()
        now = self._clock()
        ended = []
        for tag, result in reaped:
            if tag in self._flushing:
                self._flushed(tag, result)
            else:
                job = self._running.pop(tag)
                self._running_writes -= job.op is Op.WRITE
                ended.append((job, result))
        if ended and not self._stop:
            self._start()  # keeps the drive busy while the results are examined
        unchecked = [job for job, result in ended if self._end(job, result, now)]
        if unchecked:
            self._checkers.check(unchecked)

    def _cancel_waiting(self, error: int) -> None:
        while self._reads or self._writes:
            self._finish((self._reads or self._writes).popleft(), error)

    def _empty(self) -> bool:
        self._cancel_waiting(errno.ECANCELED)
        if self._running or self._flushing:
            return False
        self._checkers.stop(_CHECKED_S)
        for job in itertools.chain(self._checked, *self._unflushed.values()):
            self._finish(job, errno.ECANCELED)
        self._checked.clear()
        self._unflushed.clear()
        return True

    def _start(self) -> None:
        try:
            self._flush()
            most = _FIRST_JOBS
            while jobs := self._pick_some(most):
                most = self._queue.depth
                requests = []
                now = self._clock()
                for job in jobs:
                    hit(_BEFORE[job.op])
                    job.begun_at = now
                    tag = next(self._tags)
                    self._running[tag] = job
                    requests.append(Request(job.op, job.fd, job.offset, job.pieces, tag))
                taken = self._queue.submit(requests)
                if taken < len(requests):
                    self._put_back(requests[taken:])
                    return
        except OSError as error:
            self._break(error)

    def _pick_some(self, most: int) -> list[Job]:
        """Pick jobs for one submission. Each system call releases the interpreter lock, and getting
        it back from a busy loop takes longer than preparing many jobs.
        """
        jobs: list[Job] = []
        while len(jobs) < most and (job := self._pick(len(jobs))):
            if job.cancelled:
                self._finish(job, errno.ECANCELED)
                continue
            self._running_writes += job.op is Op.WRITE
            jobs.append(job)
        return jobs

    def _pick(self, picked: int) -> Job | None:
        running = len(self._running) + picked
        if running + len(self._flushing) >= self._queue.depth:
            return None
        if self._reads and (self._running_writes or not self._writes):
            return self._reads.popleft()
        reading = bool(self._reads) or running > self._running_writes
        most = max(1, self._queue.depth // 4) if reading else self._queue.depth
        if self._writes and self._running_writes < most:
            return self._writes.popleft()
        return None

    def _put_back(self, requests: list[Request]) -> None:
        for request in reversed(requests):
            job = self._running.pop(request.tag)
            job.begun_at = 0.0
            self._running_writes -= job.op is Op.WRITE
            (self._reads if job.op is Op.READ else self._writes).appendleft(job)

    def _end(self, job: Job, result: int, now: float) -> bool:
        """Record the result of a job. Return whether its bytes are to be verified."""
        job.ended_at = now
        if result < 0:
            self._finish(job, -result)
            return False
        job.short = result != job.length
        hit(_AFTER[job.op])
        if job.good and job.checks and not (job.is_read and job.cancelled):
            return True
        self._verified(job)
        return False

    def _verified(self, job: Job) -> None:
        """Hand a job back, or have its file flushed first. Also called by the checksum threads."""
        if job.good and job.sync:
            self._checked.append(job)
            self._worker.wake()
        else:
            self._finish(job, 0)

    def _flush(self) -> None:
        while self._checked:
            job = self._checked.popleft()
            self._unflushed.setdefault(job.fd, []).append(job)
        if not self._unflushed:
            return
        busy = {fd for fd, _ in self._flushing.values()}
        for fd in [fd for fd in self._unflushed if fd not in busy]:
            if len(self._running) + len(self._flushing) >= self._queue.depth:
                return
            tag = next(self._tags)
            hit("ssd.before_sync")
            if not self._queue.submit([Request(Op.SYNC, fd, 0, (), tag)]):
                return
            self._flushing[tag] = (fd, self._unflushed.pop(fd))

    def _flushed(self, tag: int, result: int) -> None:
        hit("ssd.after_sync")
        _, jobs = self._flushing.pop(tag)
        for job in jobs:
            self._finish(job, -result if result < 0 else 0)

    def _finish(self, job: Job, error: int) -> None:
        """Hand a job back, and wake the loop once for a whole group: a batch is useless before its
        end, and each turn of the loop costs as much as a few blocks.
        """
        job.error = error
        self._ended.append(job)
        group = job.group
        if group is None:
            signal_event(self.event_fd)
            return
        with self._telling:
            group.left -= 1
            left = group.left
        # The last few of a group come together, with one wake-up.
        if not left or (left > _TOLD_JOBS // 2 and not (group.size - left) % _TOLD_JOBS):
            signal_event(self.event_fd)

    def _break(self, error: OSError) -> None:
        """Stop after the queue failed: no job begins, and running ones belong to the kernel."""
        self.broken = f"{self._queue.name}: {error.strerror or error}"
        self._stop = True
        self._cancel_waiting(errno.EIO)
        signal_event(self.event_fd)

    def close(self) -> None:
        """Close the queue; only after ``stop`` returned true."""
        self._queue.close()


_START_BYTES_PER_S = 1e9
_START_LATENCY_S = 0.002
_WEIGHT = 0.1
_GAP_S = 0.25


class ReadRate:
    """Moving averages: a read's latency, a record's size, and bytes a second while reads run.

    ``seconds`` has the time of every request in the kernel and on the drive, by direction.
    """

    def __init__(self) -> None:
        self.seconds = {True: Histogram(SECONDS_BOUNDS), False: Histogram(SECONDS_BOUNDS)}
        """By whether it is a read."""
        self.bytes_per_s = _START_BYTES_PER_S
        self.latency_s = _START_LATENCY_S
        self._read_bytes = float(1 << 20)
        self._last_at = 0.0

    def note(self, jobs: Iterable[Job], now: float) -> None:
        """Update the averages with jobs that have just ended."""
        done = [job for job in jobs if job.good and job.begun_at]
        for job in done:
            if job.op is not Op.SYNC:
                self.seconds[job.is_read].observe(job.ended_at - job.begun_at)
        reads = [job for job in done if job.op is Op.READ]
        if not reads:
            return
        size = sum(job.length for job in reads)
        took = max(job.ended_at - job.begun_at for job in reads)
        self.latency_s += _WEIGHT * (took - self.latency_s)
        records = sum(max(1, len(job.checks)) for job in reads)
        self._read_bytes += _WEIGHT * (size / records - self._read_bytes)
        # Idle time is left out: few reads do not make the drive slow.
        busy_since = max(self._last_at, min(job.begun_at for job in reads))
        gap, self._last_at = now - busy_since, now
        if 0 < gap < _GAP_S:
            self.bytes_per_s += _WEIGHT * (size / gap - self.bytes_per_s)

    def wait_s(self, records: int) -> float:
        """Estimate the seconds until this many queued records have been read."""
        return min(5.0, self.estimate_s(0, records))

    def estimate_s(self, size_bytes: int, ahead: int) -> float:
        """Estimate the seconds to read ``size_bytes`` behind ``ahead`` records of others."""
        return self.latency_s + (ahead * self._read_bytes + size_bytes) / self.bytes_per_s

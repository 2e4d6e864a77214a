"""The log: places in open segments, seals, files made ahead of need, pages for headers."""

from __future__ import annotations

import errno
import itertools
import mmap
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvhearth.model import U8, Records
from kvhearth_server.tiers.base import Counts, Failure
from kvhearth_server.tiers.ssd.directory import CapacityReached, Directory, Segment, SegmentState
from kvhearth_server.tiers.ssd.disk.executor import IoExecutor, Job
from kvhearth_server.tiers.ssd.disk.queues import Op, signal_event
from kvhearth_server.tiers.ssd.files import Busy
from kvhearth_server.tiers.ssd.format import (
    PAGE_BYTES,
    RECORD_BYTES,
    SegmentHead,
    footer_pages,
    id_of,
    segment_page,
    write_footer,
)
from kvhearth_server.tiers.ssd.settings import SsdSettings
from kvhearth_server.tiers.ssd.write_limits import Wear, WriteBudget


class HeaderPages:
    """A fixed number of pages, each for the header of a record in flight."""

    def __init__(self, count: int) -> None:
        self._mapping = mmap.mmap(-1, count * PAGE_BYTES)
        self._bytes: U8 = np.frombuffer(self._mapping, np.uint8).reshape(count, PAGE_BYTES)
        self._address = int(self._bytes.ctypes.data)
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of pages that can be taken."""
        return len(self._free)

    @property
    def lent(self) -> int:
        """Number of pages that were taken and not given back."""
        return len(self._bytes) - len(self._free)

    def take(self, records: Records) -> list[int]:
        """Write headers to as many pages and return the pages' numbers. There must be enough."""
        count = len(records)
        pages = self.lend(count)
        self._bytes[pages, :RECORD_BYTES] = records.view(np.uint8).reshape(count, RECORD_BYTES)
        return pages

    def lend(self, count: int) -> list[int]:
        """Take ``count`` pages without writing to them. There must be enough."""
        pages = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return pages

    def address(self, page: int) -> int:
        """Return the address of a page."""
        return self._address + page * PAGE_BYTES

    def give(self, pages: list[int]) -> None:
        """Give back pages that the device no longer uses."""
        self._free.extend(pages)


class Buffer:
    """A piece of aligned memory for one request; it lives as long as something refers to it."""

    def __init__(self, content: bytes | int) -> None:
        size = content if isinstance(content, int) else len(content)
        self.bytes: U8 = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self.address = int(self.bytes.ctypes.data)
        if not isinstance(content, int):
            self.bytes[:] = np.frombuffer(content, np.uint8)

    def __len__(self) -> int:
        return len(self.bytes)


Result = Segment | OSError | None
_Task = tuple[Callable[[], Result], Callable[[Result], None]]


class FileWorker:
    """Runs file system calls that may wait on a thread of its own, one task at a time."""

    def __init__(self, directory: Directory, event_fd: int) -> None:
        self._event_fd = event_fd
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._ended: deque[tuple[Callable[[Result], None], Result]] = deque()
        self._pending = 0
        name = f"kvhearth-files-{directory.path.name}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        """Whether a task's result has not been handed over yet."""
        return self._pending > 0

    def start(self, task: Callable[[], Result], then: Callable[[Result], None]) -> None:
        """Run ``task`` on the thread; ``poll`` then calls ``then`` with its result on the loop.

        A raised ``OSError`` becomes the result; ``Busy`` becomes a ``BlockingIOError``.
        """
        self._pending += 1
        self._tasks.put((task, then))

    def poll(self) -> None:
        """Hand over the results of finished tasks."""
        while self._ended:
            then, result = self._ended.popleft()
            self._pending -= 1
            then(result)

    def stop(self, deadline_s: float) -> bool:
        """End the thread; false if a call of the file system does not return."""
        self._tasks.put(None)
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._tasks.get()) is not None:
            task, then = job
            result: Result
            try:
                result = task()
            except OSError as error:
                result = error
            except Busy as error:
                result = BlockingIOError(errno.EAGAIN, str(error))
            self._ended.append((then, result))
            signal_event(self._event_fd)


_READY_MAX = 4
_AHEAD_S = 10.0


@dataclass(eq=False)
class TenantLog:
    """One tenant's segments in one directory: the open one, and those that follow it.

    Attributes:
        segments_max: the tenant's quota.
        held: number of its segments in any state but free.
        ready: the next segments in their order; the first pages of some are still being written.
        sealing: number of segments that are full but not wholly written.
        carry_share: largest share of a segment for hot blocks that are carried.
        ahead, ahead_until: recent maximum of ``sealing``, and the time until which it counts.
    """

    tenant: str
    log_dir: LogDirectory
    segments_max: int
    carry_share: float
    held: int = 0
    open: Segment | None = None
    ready: deque[Segment] = field(default_factory=deque)
    sealing: int = 0
    ahead: int = 0
    ahead_until: float = 0.0

    def __post_init__(self) -> None:
        self.tenant_id = id_of(self.tenant)

    @property
    def carry_pages(self) -> int:
        """Most pages of hot blocks that are carried from a segment."""
        return int(self.log_dir.directory.segment_bytes // PAGE_BYTES * self.carry_share)

    def closed(self, now: float) -> None:
        """Count a segment that is full but not wholly written yet."""
        self.sealing += 1
        if self.sealing >= self.ahead or now >= self.ahead_until:
            self.ahead, self.ahead_until = self.sealing, now + _AHEAD_S

    def ready_wanted(self, now: float) -> int:
        """Return how many segments should be ready: one more than the recent maximum of segments
        being sealed, because places are given out ahead of the drive. At most an eighth of the
        quota, because ready segments hold nothing.
        """
        if not self.segments_max:
            return 0
        ahead = self.ahead if now < self.ahead_until else self.sealing
        return max(1, min(1 + ahead, self.segments_max // 8, _READY_MAX))

    def kept_pages(self, *, carried: bool) -> int:
        """Return the pages of the open segment that a new or carried block must leave free."""
        return 0 if carried or self.ready else self.carry_pages

    @property
    def over_quota(self) -> bool:
        """Whether it has more segments than allowed, because the quota was lowered."""
        return self.log_dir.directory.writable and self.held > self.segments_max

    def needs_reclaim(self, now: float) -> bool:
        """Whether too few segments are ready, and only reclaiming can provide more."""
        if self.log_dir.file_worker.busy:
            return False
        if self.over_quota:
            return True
        full = self.held >= self.segments_max or self.log_dir.is_full(now)
        return full and len(self.ready) < self.ready_wanted(now)


@dataclass(eq=False)
class LogDirectory:
    """A directory with the logs of its tenants.

    Attributes:
        segments_max: most files.
        logs: by tenant; "" has the segments that no tenant may use, and no quota.
        free: segments that hold nothing, for any tenant.
        retry_at: time before which no file is made.
    """

    directory: Directory
    file_worker: FileWorker
    segments_max: int
    logs: dict[str, TenantLog] = field(default_factory=dict)
    free: list[Segment] = field(default_factory=list)
    retry_at: float = 0.0

    def log_of(self, tenant_id: int) -> TenantLog:
        """Return the log to which a segment of a tenant belongs; a tenant alone has them all."""
        logs = list(self.logs.values())
        named = (log for log in logs[1:] if log.tenant_id == tenant_id)
        return logs[0] if len(logs) == 1 else next(named, logs[0])

    def is_full(self, now: float) -> bool:
        """Whether no segment is free, and none can be made."""
        files = len(self.directory.segments)
        return not self.free and (files >= self.segments_max or now < self.retry_at)


class PageWriter:
    """Writes first pages and footers of segments."""

    def __init__(self, executor: IoExecutor, wear: Wear, clock: Callable[[], float]) -> None:
        self._driver, self._wear, self._clock = executor, wear, clock

    def write(
        self, segment: Segment, content: Buffer, offset: int, then: Callable[[Job], None]
    ) -> None:
        """Write whole pages at ``offset``; ``then`` is called with the ended request."""
        self._wear.wrote(len(content))
        pieces = ((content.address, len(content)),)
        job = Job(Op.WRITE, segment.fd, offset, pieces, len(content), (), then, content)
        # All stores wait for a segment's first page; nothing waits for its footer.
        job.urgent = offset == 0
        self._driver.submit([job])

    def note(self, directory: Directory, job: Job) -> None:
        """Report the result of a write to the directory's health."""
        if job.good:
            directory.health.write_done()
        elif job.reason != Failure.CANCELLED:
            directory.health.write_failed(job.reason, self._clock())


_STRIPE_BYTES = 8 << 20
_SEQUENCE_GAP = 1 << 20
_ROOM_RETRY_S = 60.0
_NO_ROOM = {
    errno.ENOSPC: ("no_space", "no space left on its file system for another segment"),
    errno.EDQUOT: ("no_space", "no quota left on its file system for another segment"),
    errno.EMFILE: ("no_descriptors", "the daemon has no descriptor left for another segment"),
    errno.ENFILE: ("no_descriptors", "the machine has no descriptor left for another segment"),
}
"""Causes that prevent another segment although the drive works."""
_OTHERS = ("no_space", "its capacity is reached by files in it that are not the log's")


@dataclass(frozen=True)
class Run:
    """Neighbouring places for ``count`` blocks from page ``position`` of a segment."""

    segment: Segment
    position: int
    count: int


class Log:
    """All segments of all directories. Called on the loop only."""

    def __init__(
        self,
        log_dirs: list[LogDirectory],
        executor: IoExecutor,
        counts: Counts,
        *,
        settings: SsdSettings,
        clock: Callable[[], float],
    ) -> None:
        self.log_dirs = log_dirs
        self.segments: dict[int, Segment] = {}
        self.next_sequence = 1
        self.draining = False
        self.paused = True
        self.wear = Wear(WriteBudget(settings.bytes_per_day, clock()), counts, clock)
        self._pages = PageWriter(executor, self.wear, clock)
        self._counts = counts
        self._settings = settings
        self._clock = clock
        self._turn = itertools.cycle(range(len(log_dirs)))
        self._numbers = itertools.count(1)

    @property
    def tenant_logs(self) -> list[TenantLog]:
        """The logs of all directories."""
        return [log for log_dir in self.log_dirs for log in log_dir.logs.values()]

    @property
    def needs_reclaim(self) -> bool:
        """Whether a log waits for the reclaimer's next turn."""
        now = self._clock()
        return any(log.needs_reclaim(now) for log in self.tenant_logs)

    def new_number(self) -> int:
        """Return a new segment number."""
        return next(self._numbers)

    def add(self, segment: Segment) -> None:
        """Add a segment, in whatever state it is."""
        self.segments[segment.number] = segment
        self.next_sequence = max(self.next_sequence, segment.head.sequence + 1)
        if segment.state is SegmentState.FREE and segment.damaged and segment.directory.writable:
            self.remove(segment)
        elif segment.state is SegmentState.FREE:
            self._directory_of(segment).free.append(segment)
        else:
            self.log_of(segment).held += 1

    def resume(self, segment: Segment) -> None:
        """Continue appending to a segment that a dead daemon left unfinished."""
        log = self.log_of(segment)
        if log.open is None and log.segments_max:
            segment.state, log.open = SegmentState.OPEN, segment
        else:
            self._close(segment)

    @property
    def has_place(self) -> bool:
        """Whether any directory has a segment that can be filled, or filled further."""
        return any(
            log_dir.free or any(log.open for log in log_dir.logs.values())
            for log_dir in self.log_dirs
        )

    def begin(self, youngest: int = 0) -> None:
        """Allow new segments to be opened, once the sequences of all readable segments are known.

        Segments that are still locked may be a little younger than all others, hence the gap.

        Args:
            youngest: the greatest sequence of segments that were not added yet.
        """
        self.next_sequence = max(self.next_sequence, youngest + 1) + _SEQUENCE_GAP
        self.paused = False
        self.tick()

    def fits(self, pages: int, records: int) -> bool:
        """Whether a block of this size fits into an empty segment of any directory."""
        return any(_empty(log_dir).room_for(pages, records) for log_dir in self.log_dirs)

    # -- places ------------------------------------------------------------------------------------

    def allocate(
        self, tenant: str, pages: int, records: int, count: int, *, carried: bool = False
    ) -> list[Run]:
        """Allocate places for up to ``count`` blocks of ``pages`` pages and ``records`` records
        each; none for a tenant without a quota.

        While a log has no next segment, part of its open one is kept for ``carried`` blocks:
        otherwise new blocks would leave those no room, and everything hot would be lost.

        Each run holds its segment like a write in flight: call ``ended`` once its writes are
        counted in ``Segment.writes``.
        """
        runs: list[Run] = []
        alone = len(self.log_dirs) == 1
        stripe = count if alone else max(1, _STRIPE_BYTES // (pages * PAGE_BYTES))
        misses = 0
        while count and misses < len(self.log_dirs):
            log = self.log_dirs[next(self._turn)].logs.get(tenant)
            segment = self._writable(log, pages, records, carried) if log is not None else None
            if log is None or segment is None:
                misses += 1
                continue
            misses = 0
            keep = log.kept_pages(carried=carried)
            take = min(count, stripe, segment.room_for(pages, records, keep))
            runs.append(Run(segment, segment.end, take))
            segment.writes += 1
            segment.end += take * pages
            segment.promised += take * records
            count -= take
        return runs

    def _writable(self, log: TenantLog, pages: int, records: int, carried: bool) -> Segment | None:
        files = log.log_dir.directory
        if not files.writable or not files.health.may_write(self._clock()):
            return None
        # Only the first segment counts: a segment's sequence in the log says how young its blocks
        # are.
        ready = bool(log.ready) and log.ready[0].state is SegmentState.OPEN
        full = log.open is not None and not log.open.room_for(pages, records)
        if full and log.open is not None:
            if not ready or not _empty(log.log_dir).room_for(pages, records):
                return None  # no next segment, or the block is too large for any segment here
            self._close(log.open)
            log.open = None
        if log.open is None and ready:
            log.open = log.ready.popleft()
            self._prepare(log)
        found = log.open
        if found is None or not found.room_for(pages, records, log.kept_pages(carried=carried)):
            return None
        return found

    def ended(self, segment: Segment, records: Records | None, writes: int) -> None:
        """Account for ``writes`` ended writes; ``records`` are the good ones, if any."""
        segment.writes -= writes
        if records is not None and len(records):
            segment.records.append(records)
        if segment.state is SegmentState.SEALING:
            self.seal(segment)

    # -- the end of a segment ----------------------------------------------------------------------

    def _close(self, segment: Segment) -> None:
        """Stop giving out places in a segment."""
        segment.state = SegmentState.SEALING
        self.log_of(segment).closed(self._clock())
        self.seal(segment)

    def seal(self, segment: Segment) -> None:
        """Write the footer once no write is in flight."""
        if segment.writes:
            return
        parts = segment.footer_parts()
        content = Buffer(footer_pages(sum(map(len, parts))) * PAGE_BYTES)
        write_footer(content.bytes, segment.head, parts, segment.end)
        offset = segment.directory.segment_bytes - len(content)
        segment.writes += 1
        self._pages.write(segment, content, offset, lambda job: self._sealed(segment, job))

    def _sealed(self, segment: Segment, job: Job) -> None:
        segment.writes -= 1
        self.log_of(segment).sealing -= 1
        self._pages.note(segment.directory, job)
        # Without its footer a segment is recovered from its record headers.
        self._counts.add("segments_sealed" if job.good else "footers_failed")
        segment.state = SegmentState.SEALED
        segment.records = []

    def release(self, segment: Segment) -> None:
        """Make a segment reusable that has no live block and no reader."""
        log = self.log_of(segment)
        log.held -= 1
        self._counts.add("segments_reclaimed")
        segment.state = SegmentState.FREE
        if segment.damaged:
            self.remove(segment)
        else:
            log.log_dir.free.append(segment)
        self.tick()

    def remove(self, segment: Segment) -> None:
        """Delete permanently a file that is in nobody's list."""
        log_dir = self._directory_of(segment)
        segment.state = SegmentState.LOST
        log_dir.directory.segments.remove(segment)
        del self.segments[segment.number]

        def task() -> Result:
            log_dir.directory.remove_segment(segment)
            return None

        log_dir.file_worker.start(task, lambda _: None)

    # -- the beginning of a segment ----------------------------------------------------------------

    def tick(self) -> None:
        """Take over newly made files, and ensure that every log has its next segment."""
        for log_dir in self.log_dirs:
            log_dir.file_worker.poll()
            files = log_dir.directory
            while log_dir.free and files.writable and len(files.segments) > log_dir.segments_max:
                self.remove(log_dir.free.pop())
            for log in log_dir.logs.values():
                self._prepare(log)

    def _prepare(self, log: TenantLog) -> None:
        now, log_dir = self._clock(), log.log_dir
        files = log_dir.directory
        if self.draining or self.paused or not files.writable:
            return
        if not files.health.may_write(now):
            return
        wanted = log.ready_wanted(now)
        while log_dir.free and len(log.ready) < wanted and log.held < log.segments_max:
            self._head(log, log_dir.free.pop())
        if (
            len(log.ready) < wanted
            and log.held < log.segments_max
            and not log_dir.is_full(now)
            and not log_dir.file_worker.busy
        ):
            self._make_file(log_dir, now)

    def _make_file(self, log_dir: LogDirectory, now: float) -> None:
        number, files = self.new_number(), log_dir.directory
        size, flush = files.segment_bytes, self._settings.flush
        # A file that is not prewritten is slower at first, but its blocks are written only once.
        prewrite = self._settings.prewrite and self.wear.budget.has(size, now)
        prewritten = size if prewrite else 0
        # Spend at once: otherwise other directories and blocks would spend the same bytes
        # meanwhile.
        self.wear.budget.spend(prewritten, now)
        log_dir.file_worker.start(
            lambda: files.create_segment(number, prewrite=prewrite, flush=flush),
            lambda result: self._created(log_dir, result, prewritten),
        )

    def _created(self, log_dir: LogDirectory, result: Result, prewritten: int) -> None:
        if isinstance(result, Segment):
            self.wear.wrote(prewritten, taken=True)
            # A file system that cannot reserve had to be written to, whatever the budget.
            self.wear.wrote(result.zeros - prewritten)
            log_dir.directory.segments.append(result)
            self.add(result)
            return
        self.wear.budget.give_back(prewritten)
        now = self._clock()
        code = (result.errno if result is not None else None) or errno.EIO
        health = log_dir.directory.health
        why = _OTHERS if isinstance(result, CapacityReached) else _NO_ROOM.get(code)
        if why is not None:
            # Existing segments can be reclaimed; another one is tried later.
            log_dir.retry_at = now + _ROOM_RETRY_S
            health.no_room(log_dir.retry_at, *why)
        else:
            health.write_failed("read_only" if code == errno.EROFS else "io", now)
            log_dir.retry_at = now + health.retry_after_s(now)
        self._counts.add("segments_not_made")

    def _head(self, log: TenantLog, segment: Segment) -> None:
        files = log.log_dir.directory
        head = SegmentHead(
            files.log_id,
            self.next_sequence,
            files.segment_bytes,
            int(time.time()),
            log.tenant_id,
        )
        self.next_sequence += 1
        segment.restart(head)
        segment.state = SegmentState.WRITING_HEADER
        log.held += 1
        log.ready.append(segment)
        segment.writes += 1
        self._pages.write(
            segment,
            Buffer(segment_page(head)),
            0,
            lambda job: self._header_written(log, segment, job),
        )

    def _header_written(self, log: TenantLog, segment: Segment, job: Job) -> None:
        segment.writes -= 1
        self._pages.note(segment.directory, job)
        if job.good:
            segment.state = SegmentState.OPEN
            return
        segment.state = SegmentState.FREE
        log.ready.remove(segment)
        log.held -= 1
        log.log_dir.free.append(segment)

    def log_of(self, segment: Segment) -> TenantLog:
        """Return the log that a segment in any state but free belongs to."""
        return self._directory_of(segment).log_of(segment.head.tenant_id)

    def _directory_of(self, segment: Segment) -> LogDirectory:
        return next(each for each in self.log_dirs if each.directory is segment.directory)


def _empty(log_dir: LogDirectory) -> Segment:
    """Return an empty segment of the directory, to query the room it has."""
    return Segment(0, log_dir.directory, log_dir.directory.path)

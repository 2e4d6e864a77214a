"""The log: places in open segments, seals, files made ahead of need, pages for headers."""

from __future__ import annotations

import errno
import itertools
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kvhearth.model import U8, Records
from kvhearth_server.tiers.base import Counts, Failure
from kvhearth_server.tiers.ssd.directory import (
    CapacityReached,
    Directory,
    Result,
    Segment,
    SegmentState,
    TenantLog,
)
from kvhearth_server.tiers.ssd.disk.executor import IoExecutor, Job
from kvhearth_server.tiers.ssd.disk.queues import Op
from kvhearth_server.tiers.ssd.format import (
    PAGE_BYTES,
    RECORD_BYTES,
    SegmentHead,
    footer_pages,
    segment_page,
    write_footer,
)
from kvhearth_server.tiers.ssd.settings import SsdSettings
from kvhearth_server.tiers.ssd.write_limits import WriteBudget


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
        directories: list[Directory],
        executor: IoExecutor,
        settings: SsdSettings,
        counts: Counts,
        clock: Callable[[], float],
    ) -> None:
        self.directories = directories
        self.segments: dict[int, Segment] = {}
        self.next_sequence = 1
        self.draining = False
        self.paused = True
        self.budget = WriteBudget(settings.bytes_per_day, counts, clock())
        self._executor = executor
        self._counts = counts
        self._settings = settings
        self._clock = clock
        self._turn = itertools.cycle(range(len(directories)))
        self._numbers = itertools.count(1)

    @property
    def tenant_logs(self) -> list[TenantLog]:
        """The logs of all directories."""
        return [log for directory in self.directories for log in directory.logs.values()]

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
            segment.directory.free.append(segment)
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
            directory.free or any(log.open for log in directory.logs.values())
            for directory in self.directories
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
        return any(_empty(directory).room_for(pages, records) for directory in self.directories)

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
        alone = len(self.directories) == 1
        stripe = count if alone else max(1, _STRIPE_BYTES // (pages * PAGE_BYTES))
        misses = 0
        while count and misses < len(self.directories):
            log = self.directories[next(self._turn)].logs.get(tenant)
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
        directory = log.directory
        if not directory.writable or not directory.health.may_write(self._clock()):
            return None
        # Only the first segment counts: a segment's sequence in the log says how young its blocks
        # are.
        ready = bool(log.ready) and log.ready[0].state is SegmentState.OPEN
        full = log.open is not None and not log.open.room_for(pages, records)
        if full and log.open is not None:
            if not ready or not _empty(log.directory).room_for(pages, records):
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
        self._write_pages(segment, content, offset, lambda job: self._sealed(segment, job))

    def _write_pages(
        self, segment: Segment, content: Buffer, offset: int, then: Callable[[Job], None]
    ) -> None:
        """Write a first page or a footer; ``then`` is called with the ended request."""
        segment.writes += 1
        self.budget.wrote(len(content), self._clock())

        def ended(job: Job) -> None:
            segment.writes -= 1
            if job.good:
                segment.directory.health.write_done()
            elif job.reason != Failure.CANCELLED:
                segment.directory.health.write_failed(job.reason, self._clock())
            then(job)

        pieces = ((content.address, len(content)),)
        job = Job(Op.WRITE, segment.fd, offset, pieces, len(content), (), ended, content)
        # All stores wait for a segment's first page; nothing waits for its footer.
        job.urgent = offset == 0
        self._executor.submit([job])

    def _sealed(self, segment: Segment, job: Job) -> None:
        self.log_of(segment).sealing -= 1
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
            log.directory.free.append(segment)
        self.tick()

    def remove(self, segment: Segment) -> None:
        """Delete permanently a file that is in nobody's list."""
        directory = segment.directory
        segment.state = SegmentState.LOST
        directory.segments.remove(segment)
        del self.segments[segment.number]

        def task() -> Result:
            directory.remove_segment(segment)
            return None

        directory.file_worker.start(task, lambda _: None)

    # -- the beginning of a segment ----------------------------------------------------------------

    def tick(self) -> None:
        """Take over newly made files, and ensure that every log has its next segment."""
        for directory in self.directories:
            directory.file_worker.poll()
            while (
                directory.free
                and directory.writable
                and len(directory.segments) > directory.segments_max
            ):
                self.remove(directory.free.pop())
            for log in directory.logs.values():
                self._prepare(log)

    def _prepare(self, log: TenantLog) -> None:
        now, directory = self._clock(), log.directory
        if self.draining or self.paused or not directory.writable:
            return
        if not directory.health.may_write(now):
            return
        wanted = log.ready_wanted(now)
        while directory.free and len(log.ready) < wanted and log.held < log.segments_max:
            self._head(log, directory.free.pop())
        if (
            len(log.ready) < wanted
            and log.held < log.segments_max
            and not directory.is_full(now)
            and not directory.file_worker.busy
        ):
            self._make_file(directory, now)

    def _make_file(self, directory: Directory, now: float) -> None:
        number = self.new_number()
        size, flush = directory.segment_bytes, self._settings.flush
        # A file that is not prewritten is slower at first, but its blocks are written only once.
        prewrite = self._settings.prewrite and self.budget.has(size, now)
        prewritten = size if prewrite else 0
        # Spend at once: otherwise other directories and blocks would spend the same bytes
        # meanwhile.
        self.budget.spend(prewritten, now)
        directory.file_worker.start(
            lambda: directory.create_segment(number, prewrite=prewrite, flush=flush),
            lambda result: self._created(directory, result, prewritten),
        )

    def _created(self, directory: Directory, result: Result, prewritten: int) -> None:
        now = self._clock()
        if isinstance(result, Segment):
            self.budget.wrote(prewritten, now, taken=True)
            # A file system that cannot reserve had to be written to, whatever the budget.
            self.budget.wrote(result.zeros - prewritten, now)
            directory.segments.append(result)
            self.add(result)
            return
        self.budget.give_back(prewritten)
        code = (result.errno if result is not None else None) or errno.EIO
        health = directory.health
        why = _OTHERS if isinstance(result, CapacityReached) else _NO_ROOM.get(code)
        if why is not None:
            # Existing segments can be reclaimed; another one is tried later.
            directory.retry_at = now + _ROOM_RETRY_S
            health.no_room(directory.retry_at, *why)
        else:
            health.write_failed("read_only" if code == errno.EROFS else "io", now)
            directory.retry_at = now + health.retry_after_s(now)
        self._counts.add("segments_not_made")

    def _head(self, log: TenantLog, segment: Segment) -> None:
        directory = log.directory
        head = SegmentHead(
            directory.log_id,
            self.next_sequence,
            directory.segment_bytes,
            int(time.time()),
            log.tenant_id,
        )
        self.next_sequence += 1
        segment.restart(head)
        segment.state = SegmentState.WRITING_HEADER
        log.held += 1
        log.ready.append(segment)
        page = Buffer(segment_page(head))
        self._write_pages(segment, page, 0, lambda job: self._header_written(log, segment, job))

    def _header_written(self, log: TenantLog, segment: Segment, job: Job) -> None:
        if job.good:
            segment.state = SegmentState.OPEN
            return
        segment.state = SegmentState.FREE
        log.ready.remove(segment)
        log.held -= 1
        log.directory.free.append(segment)

    def log_of(self, segment: Segment) -> TenantLog:
        """Return the log that a segment in any state but free belongs to."""
        return segment.directory.log_of(segment.head.tenant_id)


def _empty(directory: Directory) -> Segment:
    """Return an empty segment of the directory, to query the room it has."""
    return Segment(0, directory, directory.path)

"""The log: which segment takes the next record, when one is full, when one is free again.

Each directory has one open segment and, so that nothing ever waits for it, a next one whose first
page is written already; more than one while places are given out faster than the drive writes.
Places are given out in stripes over all directories that may be written to.
"""

from __future__ import annotations

import errno
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvhearth.model import Records
from kvhearth_server.tiers.base import Counts
from kvhearth_server.tiers.ssd.budget import Wear, WriteBudget
from kvhearth_server.tiers.ssd.directory import CapacityReached, Segment, SegmentState
from kvhearth_server.tiers.ssd.driver import Driver
from kvhearth_server.tiers.ssd.format import (
    PAGE_BYTES,
    SegmentHead,
    footer_pages,
    segment_page,
    write_footer,
)
from kvhearth_server.tiers.ssd.janitor import Result
from kvhearth_server.tiers.ssd.job import Job
from kvhearth_server.tiers.ssd.lane import Lane, PageWriter
from kvhearth_server.tiers.ssd.pages import Buffer
from kvhearth_server.tiers.ssd.settings import SsdSettings

_STRIPE_BYTES = 8 << 20
_SEQUENCE_GAP = 1 << 20
_ROOM_RETRY_S = 60.0
_NO_ROOM = {
    errno.ENOSPC: ("no_space", "no space left on its file system for another segment"),
    errno.EDQUOT: ("no_space", "no quota left on its file system for another segment"),
    errno.EMFILE: ("no_descriptors", "the daemon has no descriptor left for another segment"),
    errno.ENFILE: ("no_descriptors", "the machine has no descriptor left for another segment"),
}
"""Why there is no other segment, though the drive does all that it is asked for."""
_OTHERS = ("no_space", "its capacity is reached by files in it that are not the log's")


@dataclass(frozen=True)
class Run:
    """Neighbouring places for ``count`` blocks from page ``position`` of a segment."""

    segment: Segment
    position: int
    count: int


class Log:
    """All segments of all directories. Every call is the loop's."""

    def __init__(
        self,
        lanes: list[Lane],
        driver: Driver,
        counts: Counts,
        *,
        settings: SsdSettings,
        clock: Callable[[], float],
    ) -> None:
        self.lanes = lanes
        self.segments: dict[int, Segment] = {}
        self.next_sequence = 1
        self.draining = False
        self.paused = True
        self.wear = Wear(WriteBudget(settings.bytes_per_day, clock()), counts, clock)
        self._pages = PageWriter(driver, self.wear, clock)
        self._counts = counts
        self._settings = settings
        self._clock = clock
        self._turn = itertools.cycle(range(len(lanes)))
        self._numbers = itertools.count(1)

    def new_number(self) -> int:
        """A number for a segment."""
        return next(self._numbers)

    def add(self, segment: Segment) -> None:
        """Take a segment in, in whatever state it is."""
        self.segments[segment.number] = segment
        self.next_sequence = max(self.next_sequence, segment.head.sequence + 1)
        if segment.state is SegmentState.FREE and segment.damaged and segment.directory.writable:
            self.remove(segment)
        elif segment.state is SegmentState.FREE:
            self._lane_of(segment).free.append(segment)
        elif segment.state is SegmentState.SEALING:
            self._close(segment)

    def resume(self, segment: Segment) -> None:
        """Go on appending to a segment that a dead daemon left unfinished."""
        lane = self._lane_of(segment)
        if lane.open is None:
            segment.state, lane.open = SegmentState.OPEN, segment
        else:
            self._close(segment)

    @property
    def has_place(self) -> bool:
        """Whether a directory has a segment that can be filled, or filled further."""
        return any(lane.free or lane.open for lane in self.lanes)

    def begin(self, youngest: int = 0) -> None:
        """The sequences of all segments that can be read are known: new segments may be opened.

        Those that are still locked may be a little younger than all others, hence the gap.

        Args:
            youngest: the greatest sequence of segments that were not added yet.
        """
        self.next_sequence = max(self.next_sequence, youngest + 1) + _SEQUENCE_GAP
        self.paused = False
        self.tick()

    def fits(self, pages: int, records: int) -> bool:
        """Whether a block of so many pages and records fits into an empty segment anywhere."""
        return any(_empty(lane).room_for(pages, records) for lane in self.lanes)

    # -- places ------------------------------------------------------------------------------------

    def allocate(self, pages: int, records: int, count: int, *, carried: bool = False) -> list[Run]:
        """Places for up to ``count`` blocks of ``pages`` pages and ``records`` records each.

        While a directory has no next segment, part of its open one is kept for ``carried`` blocks:
        otherwise new blocks would leave those no room, and everything hot would be lost.

        Each run holds its segment like a write in flight: call ``ended`` once its writes are
        counted in ``Segment.writes``.
        """
        runs: list[Run] = []
        alone = len(self.lanes) == 1
        stripe = count if alone else max(1, _STRIPE_BYTES // (pages * PAGE_BYTES))
        misses = 0
        while count and misses < len(self.lanes):
            lane = self.lanes[next(self._turn)]
            segment = self._writable(lane, pages, records, carried)
            if segment is None:
                misses += 1
                continue
            misses = 0
            keep = lane.kept_pages(carried=carried)
            take = min(count, stripe, segment.room_for(pages, records, keep))
            runs.append(Run(segment, segment.end, take))
            segment.writes += 1
            segment.end += take * pages
            segment.promised += take * records
            count -= take
        return runs

    def _writable(self, lane: Lane, pages: int, records: int, carried: bool) -> Segment | None:
        if not lane.directory.writable or not lane.directory.health.may_write(self._clock()):
            return None
        # Only the first: a segment's number in the log says how young its blocks are.
        ready = bool(lane.ready) and lane.ready[0].state is SegmentState.OPEN
        full = lane.open is not None and not lane.open.room_for(pages, records)
        if full and lane.open is not None:
            if not ready or not _empty(lane).room_for(pages, records):
                return None  # nothing to change to, or too large for any segment here
            self._close(lane.open)
            lane.open = None
        if lane.open is None and ready:
            lane.open = lane.ready.popleft()
            self._prepare(lane)
        found = lane.open
        if found is None or not found.room_for(pages, records, lane.kept_pages(carried=carried)):
            return None
        return found

    def ended(self, segment: Segment, records: Records | None, writes: int) -> None:
        """``writes`` writes of records have ended; the records that are good, if any."""
        segment.writes -= writes
        if records is not None and len(records):
            segment.records.append(records)
        if segment.state is SegmentState.SEALING:
            self.seal(segment)

    # -- the end of a segment ----------------------------------------------------------------------

    def _close(self, segment: Segment) -> None:
        """It takes no more places."""
        segment.state = SegmentState.SEALING
        self._lane_of(segment).closed(self._clock())
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
        self._lane_of(segment).sealing -= 1
        self._pages.note(segment.directory, job)
        # Without its footer a segment is recovered from its record headers.
        self._counts.add("segments_sealed" if job.good else "footers_failed")
        segment.state = SegmentState.SEALED
        segment.records = []

    def release(self, segment: Segment) -> None:
        """Nothing in it is live and nothing reads it: it can be filled anew."""
        lane = self._lane_of(segment)
        self._counts.add("segments_reclaimed")
        if segment.damaged or lane.surplus:
            self.remove(segment)
            return
        segment.state = SegmentState.FREE
        lane.free.append(segment)
        self._prepare(lane)

    def remove(self, segment: Segment) -> None:
        """Delete a file for good."""
        lane = self._lane_of(segment)
        segment.state = SegmentState.LOST
        lane.directory.segments.remove(segment)
        del self.segments[segment.number]

        def task() -> Result:
            lane.directory.remove_segment(segment)
            return None

        lane.janitor.start(task, lambda _: None)

    # -- the beginning of a segment ----------------------------------------------------------------

    def tick(self) -> None:
        """Take files that were made, and see that every directory has its next segment."""
        for lane in self.lanes:
            lane.janitor.poll()
            while lane.surplus and lane.free:
                self.remove(lane.free.pop())
            self._prepare(lane)

    def _prepare(self, lane: Lane) -> None:
        now = self._clock()
        directory = lane.directory
        if self.draining or self.paused or not directory.writable:
            return
        if not directory.health.may_write(now):
            return
        wanted = lane.ready_wanted(now)
        while lane.free and len(lane.ready) < wanted:
            self._head(lane, lane.free.pop())
        if (
            len(lane.ready) < wanted
            and len(directory.segments) < lane.count_max
            and not lane.janitor.busy
            and now >= lane.retry_at
        ):
            number = self.new_number()
            size, flush = directory.segment_bytes, self._settings.flush
            # Without it the file is slower at first, but a block of it costs no second write.
            prewrite = self._settings.prewrite and self.wear.budget.has(size, now)
            prewritten = size if prewrite else 0
            # At once: other directories, and blocks, would spend the same bytes meanwhile.
            self.wear.budget.spend(prewritten, now)
            lane.janitor.start(
                lambda: directory.create_segment(number, prewrite=prewrite, flush=flush),
                lambda result: self._created(lane, result, prewritten),
            )

    def _created(self, lane: Lane, result: Result, prewritten: int) -> None:
        if isinstance(result, Segment):
            self.wear.wrote(prewritten, taken=True)
            # A file system that cannot reserve had to be written to, budget or not.
            self.wear.wrote(result.zeros - prewritten)
            lane.directory.segments.append(result)
            self.add(result)
            return
        self.wear.budget.give_back(prewritten)
        now = self._clock()
        code = (result.errno if result is not None else None) or errno.EIO
        health = lane.directory.health
        why = _OTHERS if isinstance(result, CapacityReached) else _NO_ROOM.get(code)
        if why is not None:
            # What there is can be reclaimed; more is asked for again later.
            lane.retry_at = now + _ROOM_RETRY_S
            health.no_room(lane.retry_at, *why)
        else:
            health.write_failed("read_only" if code == errno.EROFS else "io", now)
            lane.retry_at = now + health.retry_after_s(now)
        self._counts.add("segments_not_made")

    def _head(self, lane: Lane, segment: Segment) -> None:
        head = SegmentHead(
            lane.directory.log_id,
            self.next_sequence,
            lane.directory.segment_bytes,
            int(time.time()),
        )
        self.next_sequence += 1
        segment.restart(head)
        segment.state = SegmentState.HEADING
        lane.ready.append(segment)
        segment.writes += 1
        self._pages.write(
            segment, Buffer(segment_page(head)), 0, lambda job: self._headed(lane, segment, job)
        )

    def _headed(self, lane: Lane, segment: Segment, job: Job) -> None:
        segment.writes -= 1
        self._pages.note(lane.directory, job)
        if job.good:
            segment.state = SegmentState.OPEN
            return
        segment.state = SegmentState.FREE
        lane.ready.remove(segment)
        lane.free.append(segment)

    def _lane_of(self, segment: Segment) -> Lane:
        return next(lane for lane in self.lanes if lane.directory is segment.directory)


def _empty(lane: Lane) -> Segment:
    """A segment of the lane in which nothing is yet, to ask what it has room for."""
    return Segment(0, lane.directory, lane.directory.path)

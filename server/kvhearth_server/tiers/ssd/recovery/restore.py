"""Recovers the log after a start: reads segments and adopts them, a little at each turn."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from kvhearth.model import U32, Bools, Records
from kvhearth_server.tiers.base import Counts
from kvhearth_server.tiers.ssd.directory import Segment, SegmentState
from kvhearth_server.tiers.ssd.disk.queues import signal_event
from kvhearth_server.tiers.ssd.disk.worker import StartWorker
from kvhearth_server.tiers.ssd.files import Busy, Files
from kvhearth_server.tiers.ssd.format import (
    PAGE_BYTES,
    Doubt,
    Footer,
    SegmentHead,
    doubts_of,
    footer_lines,
    footer_of,
    footer_pages,
    parse_footer_page,
    parse_segment_page,
)
from kvhearth_server.tiers.ssd.index import SsdIndex
from kvhearth_server.tiers.ssd.log import Log
from kvhearth_server.tiers.ssd.recovery.scanner import (
    SCAN_BYTES,
    Reader,
    Recovered,
    RecoveredChunk,
    Scan,
    whole_blocks,
    youngest_life,
)
from kvhearth_server.tiers.ssd.settings import segment_cost_bytes

_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
_TAIL_BYTES = 64 << 10
_AHEAD = 4
"""Parsed segments that wait for the loop."""


class Recovery:
    """Reads segments until all were taken and ``done`` is true.

    Attributes:
        youngest: the greatest sequence of all segments, set before the first ``take`` returns one;
            None if a segment's first page does not tell its sequence.
    """

    def __init__(
        self,
        segments: list[Segment],
        files: Files,
        event_fd: int,
        start: StartWorker,
    ) -> None:
        self.read = 0
        self.youngest: int | None = None
        self._segments = segments
        self._files = files
        self._event_fd = event_fd
        self._ready = deque[Recovered]()
        self._reader: Reader | None = None
        self._stop = threading.Event()
        self._worker = start("kvhearth-recover", self._turn, -1)

    @property
    def done(self) -> bool:
        """Whether every segment was read and taken."""
        return not self._worker.alive and not self._ready

    @property
    def unread(self) -> list[Segment]:
        """Segments that were not reached, after the end, unless it was stopped."""
        return [] if self._stop.is_set() else self._segments[self.read :]

    def take(self) -> Recovered | None:
        """Return the next segment, if one is ready."""
        if not self._ready:
            return None
        found = self._ready.popleft()
        self._worker.wake()
        return found

    def stop(self, deadline_s: float) -> bool:
        """Give up; false if a read hangs."""
        self._stop.set()
        self._worker.wake()
        return self._worker.join(deadline_s)

    def _turn(self) -> bool:
        if self._reader is None:
            self._reader = Reader(mmap.mmap(-1, SCAN_BYTES), self._files)
            self._sort(self._reader)
        while self.read < len(self._segments) and not self._stop.is_set():
            if len(self._ready) >= _AHEAD:
                return True
            found = read_segment(self._segments[self.read], self._reader, self._stop.is_set)
            found.sort_out()
            self.read += 1
            self._ready.append(found)
            signal_event(self._event_fd)
        signal_event(self._event_fd)
        return False

    def _sort(self, reader: Reader) -> None:
        lives: dict[Segment, int | None] = {}
        for segment in self._segments:
            if self._stop.is_set():
                return
            lives[segment] = _sequence(segment, reader)
        known = {each: life for each, life in lives.items() if life is not None}
        if len(known) == len(lives):
            self.youngest = max(known.values(), default=0)
        self._segments = [
            *(each for each, life in known.items() if not life),
            *sorted(filter(known.get, known), key=known.__getitem__, reverse=True),
            *(each for each in lives if each not in known),
        ]


def _sequence(segment: Segment, reader: Reader) -> int | None:
    """Return a segment's sequence by its first page; 0 for a file without one or that cannot be
    read, None if only its footer or its records tell it.
    """
    try:
        _open(segment)
        page = reader.lend(segment.fd, 0, PAGE_BYTES)
        head = parse_segment_page(page) if len(page) == PAGE_BYTES else Doubt.TRUNCATED
        if isinstance(head, SegmentHead):
            return head.sequence if head.log_id == segment.directory.log_id else 0
        return 0 if not page.any() and _unused(segment, reader) else None
    except (Busy, OSError):
        return 0


def _open(segment: Segment) -> None:
    if segment.file is None:
        segment.directory.open_segment(segment)


def _never_written(segment: Segment) -> bool:
    """Whether the file system has no data behind the first page."""
    try:
        os.lseek(segment.fd, PAGE_BYTES, os.SEEK_DATA)
    except OSError as error:
        return error.errno == errno.ENXIO
    return False


def read_segment(
    segment: Segment, reader: Reader, stopped: Callable[[], bool] = lambda: False
) -> Recovered:
    """Open, lock and read one segment file; problems are reported in the result."""
    found = Recovered(segment)
    try:
        _open(segment)
        _read(segment, reader, found, stopped)
        if found.foreign:
            segment.directory.close_segment(segment)
    except Busy:
        found.locked = True
    except OSError as error:
        found.failed = error
        found.locked = error.errno in _NO_DESCRIPTORS
    return found


def _read(segment: Segment, reader: Reader, found: Recovered, stopped: Callable[[], bool]) -> None:
    directory = segment.directory
    facts = os.fstat(segment.fd)
    wanted, taken = directory.segment_bytes, facts.st_blocks * 512
    segment.damaged = facts.st_size != wanted or taken < wanted
    first = reader.read(segment.fd, 0, PAGE_BYTES)
    head = parse_segment_page(first) if len(first) == PAGE_BYTES else Doubt.TRUNCATED
    if isinstance(head, Doubt):
        if facts.st_size == wanted and not first.any() and _unused(segment, reader):
            found.empty = True
            return
        found.doubts[head] += 1
    elif facts.st_size < wanted:
        found.doubts[Doubt.TRUNCATED] += 1
    foreign = _foreign(segment, reader, head)
    long = facts.st_size > wanted and taken > segment_cost_bytes(wanted)
    other_size = isinstance(head, SegmentHead) and head.segment_bytes != wanted
    if foreign or long or other_size:
        found.doubts[Doubt.FOREIGN if foreign else Doubt.OUTSIZED] += 1
        found.foreign, found.empty = foreign, True
        return
    if isinstance(head, Doubt):
        # Its footer, or else its records, still identify the life of the segment.
        head = SegmentHead(directory.log_id, 0, wanted, 0)
        overwritten = _overwritten(segment, reader, stopped)
    else:
        overwritten = False
    found.head = head
    whole = facts.st_size == wanted and not overwritten
    lines = _footer(segment, reader, found) if whole else None
    if lines is None:
        # A file that was made longer is not read to its end: nothing behind its proper size is
        # ours.
        Scan(reader, found, min(facts.st_size, wanted)).run(stopped)
        return
    found.records = _believed(lines, found.head, wanted, found.doubts)


def _foreign(segment: Segment, reader: Reader, head: SegmentHead | Doubt) -> bool:
    """Whether its first page, or its footer if that page is lost, belongs to another log."""
    mine = segment.directory.log_id
    if isinstance(head, SegmentHead):
        return head.log_id != mine
    footer = _footer_said(segment, reader)
    return footer is not None and footer.log_id != mine


def _footer_said(segment: Segment, reader: Reader) -> SegmentHead | None:
    last = os.fstat(segment.fd).st_size // PAGE_BYTES - 1
    if last < 1:
        return None
    page = reader.lend(segment.fd, last * PAGE_BYTES, PAGE_BYTES)
    footer = parse_footer_page(page) if len(page) == PAGE_BYTES else None
    return footer.head if isinstance(footer, Footer) else None


def _unused(segment: Segment, reader: Reader) -> bool:
    """Whether a file whose first page is zeros was never used. Little reading decides it: nothing
    was ever written behind that page, or there is neither a footer nor a record near the beginning.
    """
    if _never_written(segment):
        return True
    if _footer_said(segment, reader) is not None:
        return False
    return not youngest_life(segment, reader, SCAN_BYTES)


def _overwritten(segment: Segment, reader: Reader, stopped: Callable[[], bool]) -> bool:
    """Whether a segment without a valid first page was being overwritten, i.e. its footer is older
    than its records and lists blocks that are partly gone.

    Mostly the first record decides. All headers are examined if none of the first is believed.
    """
    footer = _footer_said(segment, reader)
    if footer is None:
        return False
    life = youngest_life(segment, reader, 2 * PAGE_BYTES)
    if not life:
        life = youngest_life(segment, reader, segment.directory.segment_bytes, stopped)
    return life > footer.sequence


def _footer(segment: Segment, reader: Reader, found: Recovered) -> Records | None:
    """Return the lines of a footer of this life of the segment."""
    size = segment.directory.segment_bytes
    tail = reader.lend(segment.fd, max(0, size - _TAIL_BYTES), min(size, _TAIL_BYTES))
    if len(tail) < PAGE_BYTES:
        return None
    footer = footer_of(tail[-PAGE_BYTES:], found.head)
    if not isinstance(footer, Footer):
        if footer is not None:
            found.doubts[footer] += 1
        return None
    need = footer_pages(footer.count) * PAGE_BYTES
    if need > len(tail):
        tail = reader.lend(segment.fd, size - need, need)
    lines = footer_lines(tail, footer) if len(tail) >= need else None
    if lines is None:
        found.doubts[Doubt.DAMAGED] += 1
        return None
    found.head = replace(found.head, sequence=footer.head.sequence)
    found.end = footer.end
    return lines


def _believed(lines: Records, head: SegmentHead, end_bytes: int, doubts: Counter[Doubt]) -> Records:
    """Return the lines that belong here, of whole blocks only."""
    wrong = doubts_of(lines, head, end_bytes)
    if wrong:
        for reason, rows in wrong.items():
            doubts[reason] += len(rows)
        lines = np.delete(lines, np.concatenate(list(wrong.values())))
    return whole_blocks(lines, doubts)


_BLOCKS_A_TURN = 2048
_RETRY_S = 0.5


class Restorer:
    """Turns the list of segment files into an index of all believed blocks."""

    def __init__(
        self,
        segments: list[Segment],
        index: SsdIndex,
        log: Log,
        counts: Counts,
        *,
        files: Files,
        event_fd: int,
        start: StartWorker,
    ) -> None:
        self._index, self._log, self._counts = index, log, counts
        self._files, self._event_fd, self._start = files, event_fd, start
        self._recovery: Recovery | None = self._recover(segments)
        self._current: Recovered | None = None
        self._at = 0
        self._locked: list[Segment] = []
        self._retried: list[Segment] = []
        self._retry_at = self._now = 0.0
        self.recovering = True
        self.unfinished = True
        """Whether ``step`` has something to do, at once or later."""

    @property
    def locked(self) -> int:
        """Number of files that requests of a dead daemon still hold. Slots that it was loading into
        may still be written to.
        """
        return len({*self._locked, *self._retried}) + self.recovering

    def step(self, now: float) -> bool:
        """Adopt some more; true if there is more to do at once."""
        self._now = now
        if self._current is None and self._recovery is not None:
            self._current = self._recovery.take()
            if self._current is not None:
                self._begin(self._current)
        if self._current is not None:
            self._go_on(self._current)
            self._let_write()
            return True
        if self._recovery is not None and self._recovery.done:
            if unread := self._recovery.unread:
                self._pass_over(unread)
                return True
            self._recovery, self._retried = None, []
            if self.recovering:
                self.recovering = False
                if self._log.paused:
                    self._log.begin()
        if self._recovery is None and self._locked and now >= self._retry_at:
            self._retry_at = now + _RETRY_S
            self._retried, self._locked = self._locked, []
            self._recovery = self._recover(self._retried)
        self.unfinished = self._recovery is not None or bool(self._locked)
        return False

    def _let_write(self) -> None:
        """Allow writes as soon as there is a place, although older segments are not read yet."""
        if self._log.paused and self._recovery is not None and self._log.has_place:
            youngest = self._recovery.youngest
            if youngest is not None:
                self._log.begin(youngest)

    def _pass_over(self, unread: list[Segment]) -> None:
        """Continue behind the first of these segments, on which the reader failed by a bug."""
        lost = Recovered(unread[0], failed=OSError("the reader failed"))
        self._counts.add("recovery_failures")
        self._end(lost)
        self._recovery = self._recover(unread[1:])

    def _recover(self, segments: list[Segment]) -> Recovery:
        return Recovery(segments, self._files, self._event_fd, self._start)

    def stop(self, deadline_s: float) -> bool:
        """Give up; false if a read hangs."""
        return self._recovery is None or self._recovery.stop(deadline_s)

    def _begin(self, found: Recovered) -> None:
        for reason, count in found.doubts.items():
            self._counts.add(f"dropped_{reason.value}", count)
        self._at = 0
        if found.chunks:
            found.segment.head = found.head
            self._log.segments[found.segment.number] = found.segment
            self._index.expect(found.segment.number, sum(each.rows.size for each in found.chunks))

    def _go_on(self, found: Recovered) -> None:
        if found.chunks:
            chunk, end = found.chunks[-1], self._at + _BLOCKS_A_TURN
            span = slice(self._at, end)
            self._adopt(found.segment, chunk, chunk.keys[span], chunk.rows[span])
            self._at = end
            if end >= len(chunk.keys):
                found.chunks.pop()
                self._at = 0
        if not found.chunks:
            self._end(found)
            self._current = None

    def _adopt(
        self, segment: Segment, of: RecoveredChunk, keys: list[bytes], rows: Records
    ) -> None:
        """Bind some blocks of a chunk, given by ``keys`` and ``rows``."""
        if self._index.number_of(of.namespace) < 0:
            self._counts.add("dropped_namespaces", len(keys))
            return
        before, number = len(self._index), segment.number
        if not self._index.bind_new(of.namespace, of.group, keys, number, rows):
            younger = self._younger(segment, of, keys, rows["epoch"][:, 0])
            self._counts.add(f"dropped_{Doubt.DUPLICATE.value}", int(younger.sum()))
            # A carried block of old weights may lie behind the block of newer weights: the last one
            # is bound.
            kept = np.flatnonzero(~younger)
            kept = kept[np.argsort(rows["epoch"][kept, 0], kind="stable")]
            rows, keys = rows[kept], [keys[row] for row in kept.tolist()]
            if not keys:
                return
            self._index.bind(of.namespace, of.group, keys, number, rows)
        replaced = before + len(keys) - len(self._index)
        self._counts.add(f"dropped_{Doubt.DUPLICATE.value}", replaced)
        self._counts.add("recovered_blocks", len(keys) - replaced)

    def _younger(
        self, segment: Segment, of: RecoveredChunk, keys: list[bytes], epochs: U32
    ) -> Bools:
        """Return which keys are bound to a block that is younger than the one in this segment.

        The epoch takes precedence over the segment: each directory has a segment open, so a block
        of newer weights may lie in a segment that was begun before that of the older weights'
        block.
        """
        entries = self._index.find(of.namespace, of.group, keys)
        bound = self._index.heads(entries)["epoch"]
        younger = np.zeros(len(keys), np.bool_)
        for row in np.flatnonzero(entries >= 0).tolist():
            other = self._log.segments[int(entries[row]) >> 32]
            theirs = int(bound[row]), other.head.sequence
            younger[row] = theirs > (int(epochs[row]), segment.head.sequence)
        return younger

    def _end(self, found: Recovered) -> None:
        segment = found.segment
        segment.head = found.head
        if found.locked:
            if found.failed is not None:
                message = "the daemon has no descriptor left to read a segment file back with"
                segment.directory.health.no_room(
                    self._now + 4 * _RETRY_S, "no_descriptors", message
                )
            self._locked.append(segment)
            return
        if found.failed is not None:
            segment.state = SegmentState.LOST
            segment.directory.health.read_failed("io")
            self._counts.add("segments_lost")
            return
        self._counts.add("recovered_segments")
        if found.foreign:
            segment.state = SegmentState.LOST
            segment.directory.pass_over(segment.path, "is of another log")
            return
        if found.empty:
            segment.state = SegmentState.FREE
        elif found.resume and segment.directory.writable:
            self._resume(found)
            return
        else:
            segment.state = SegmentState.SEALED
        self._log.add(segment)

    def _resume(self, found: Recovered) -> None:
        segment = found.segment
        segment.end, segment.promised = found.end, len(found.records)
        segment.records = [found.records] if len(found.records) else []
        segment.state = SegmentState.BUSY
        self._log.add(segment)
        self._log.resume(segment)

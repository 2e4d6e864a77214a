"""Reads the log back: from footers where segments have them, from record headers where not.

A thread reads and parses one segment after another and hands each to the loop, which serves the
blocks known by then. Pieces that are not believed are counted by reason and left alone. Segments
that stores need come first: unused files, then the youngest, which were being filled or were next.
"""

from __future__ import annotations

import errno
import mmap
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable

import numpy as np

from kvhearth.model import U8, Records
from kvhearth_server.tiers.ssd.directory import Segment
from kvhearth_server.tiers.ssd.disk.syscalls import signal_event
from kvhearth_server.tiers.ssd.files import Busy, Files
from kvhearth_server.tiers.ssd.format import (
    PAGE_BYTES,
    Doubt,
    SegmentHead,
    doubts_of,
    footer_count,
    footer_pages,
    footer_said,
    parse_footer,
    parse_segment_page,
)
from kvhearth_server.tiers.ssd.recovery.scanner import (
    SCAN_BYTES,
    Reader,
    Recovered,
    scan,
    whole_blocks,
    youngest_life,
)
from kvhearth_server.tiers.ssd.settings import segment_cost_bytes

_NO_DESCRIPTORS = frozenset({errno.EMFILE, errno.ENFILE})
_TAIL_BYTES = 64 << 10
_AHEAD = 4
"""Parsed segments that wait for the loop."""


class Recovery:
    """The reading thread, from its start until its queue is empty and ``done`` is true.

    Attributes:
        youngest: the greatest sequence of all segments, set before the first ``take`` returns one;
            None if a segment's first page does not tell its sequence.
    """

    def __init__(self, segments: list[Segment], files: Files, event_fd: int) -> None:
        self.total = len(segments)
        self.read = 0
        self.youngest: int | None = None
        self._segments = segments
        self._files = files
        self._event_fd = event_fd
        self._ready: queue.Queue[Recovered] = queue.Queue(_AHEAD)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvhearth-recover", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether every segment was read and taken."""
        return not self._thread.is_alive() and self._ready.empty()

    @property
    def unread(self) -> list[Segment]:
        """Segments that the ended thread did not reach, unless it was stopped."""
        return [] if self._stop.is_set() else self._segments[self.read :]

    def take(self) -> Recovered | None:
        """Return the next segment, if one is ready."""
        try:
            return self._ready.get_nowait()
        except queue.Empty:
            return None

    def stop(self, deadline_s: float) -> bool:
        """Give up; false if a read hangs."""
        self._stop.set()
        self._thread.join(deadline_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        reader = Reader(mmap.mmap(-1, SCAN_BYTES), self._files)
        self._sort(reader)
        for segment in self._segments:
            found = read_segment(segment, reader, self._stop.is_set)
            found.sort_out()
            self.read += 1
            while not self._stop.is_set():
                try:
                    self._ready.put(found, timeout=0.1)
                    break
                except queue.Full:
                    continue
            signal_event(self._event_fd)
            if self._stop.is_set():
                break
        signal_event(self._event_fd)

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
    if foreign or long or _other_size(head, wanted):
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
        scan(segment, reader, found, min(facts.st_size, wanted), stopped)
        return
    found.sealed = True
    found.records = _believed(lines, found.head, wanted, found.doubts)


def _other_size(head: SegmentHead | Doubt, wanted: int) -> bool:
    return isinstance(head, SegmentHead) and head.segment_bytes != wanted


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
    return footer_said(page) if len(page) == PAGE_BYTES else None


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
    head = found.head
    if not head.sequence:
        head = _head_of_footer(tail[-PAGE_BYTES:], head)
    answer = footer_count(tail[-PAGE_BYTES:], head)
    if answer is None or isinstance(answer, Doubt):
        if answer is not None:
            found.doubts[answer] += 1
        return None
    count, end = answer
    need = footer_pages(count) * PAGE_BYTES
    if need > len(tail):
        tail = reader.lend(segment.fd, size - need, need)
    lines = parse_footer(tail, count) if len(tail) >= need else None
    if lines is None:
        found.doubts[Doubt.DAMAGED] += 1
        return None
    found.head, found.end = head, end
    return lines


def _head_of_footer(page: U8, head: SegmentHead) -> SegmentHead:
    sequence = int(page[16:24].view("<u8")[0])
    return SegmentHead(head.log_id, sequence, head.segment_bytes, 0)


def _believed(lines: Records, head: SegmentHead, end_bytes: int, doubts: Counter[Doubt]) -> Records:
    """Return the lines that belong here, of whole blocks only."""
    wrong = doubts_of(lines, head, end_bytes)
    if wrong:
        for reason, rows in wrong.items():
            doubts[reason] += len(rows)
        lines = np.delete(lines, np.concatenate(list(wrong.values())))
    return whole_blocks(lines, doubts)

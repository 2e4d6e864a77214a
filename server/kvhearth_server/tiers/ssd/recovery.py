"""Reading a log back: from footers where segments have them, from record headers where not.

A thread reads and parses one segment after another and hands each to the loop, which serves what
is known so far. What is not believed is counted by reason and left alone.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import xxhash

from kvhearth.model import I64, U8, Records
from kvhearth_server.tiers.ssd.directory import Segment
from kvhearth_server.tiers.ssd.disk.kernel import signal_event
from kvhearth_server.tiers.ssd.files import Busy
from kvhearth_server.tiers.ssd.format import (
    PAGE_BYTES,
    RECORD_BYTES,
    RECORD_DTYPE,
    RECORD_MAGIC,
    Doubt,
    SegmentHead,
    crc_good,
    doubts_of,
    footer_count,
    footer_pages,
    pages_of,
    parse_footer,
    parse_segment_page,
)

_TAIL_BYTES = 64 << 10
_SCAN_BYTES = 8 << 20
_AHEAD = 4
"""Parsed segments that wait for the loop."""

_FIRST_WORD = RECORD_DTYPE.fields["namespace"][1] // 8 if RECORD_DTYPE.fields else 0
_NAMESPACE_WORDS = slice(_FIRST_WORD, _FIRST_WORD + 4)
_NO_HEAD = SegmentHead(0, 0, 0, 0)


@dataclass
class Recovered:
    """What one segment has.

    Attributes:
        records: headers that are believed, in the order of their places; of whole blocks only.
        sealed: it had its footer.
        resume: it can be appended to at ``end``; otherwise it is closed for good.
        empty: nothing of ours is in it.
        locked: another process's requests hold it; to be tried again.
        failed: it cannot be read at all.
    """

    segment: Segment
    head: SegmentHead = _NO_HEAD
    records: Records = field(default_factory=lambda: np.zeros(0, RECORD_DTYPE))
    end: int = 1
    sealed: bool = False
    resume: bool = False
    empty: bool = False
    locked: bool = False
    failed: OSError | None = None
    doubts: Counter[Doubt] = field(default_factory=Counter)


class Recovery:
    """The thread, from ``start`` until its queue is empty and ``done`` is true."""

    def __init__(self, segments: list[Segment], event_fd: int) -> None:
        self.total = len(segments)
        self.read = 0
        self._segments = segments
        self._event_fd = event_fd
        self._ready: queue.Queue[Recovered] = queue.Queue(_AHEAD)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvhearth-recover", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Everything was read and taken."""
        return not self._thread.is_alive() and self._ready.empty()

    def take(self) -> Recovered | None:
        """The next segment, if one is ready."""
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
        with mmap.mmap(-1, _SCAN_BYTES) as memory:
            reader = Reader(memory)
            for segment in self._segments:
                found = read_segment(segment, reader, self._stop.is_set)
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
            del reader
        signal_event(self._event_fd)


class Reader:
    """Aligned reads into one buffer that is used again and again."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    def read(self, fd: int, offset: int, size: int) -> U8:
        """Up to ``size`` bytes, fewer at the end of the file; a copy is the caller's business.

        Raises:
            OSError: the device failed.
        """
        with memoryview(self._memory)[:size] as piece:
            count = os.preadv(fd, [piece], offset)
            return np.frombuffer(bytes(piece[:count]), np.uint8)

    def view(self, fd: int, offset: int, size: int) -> memoryview:
        """The same without a copy: valid until the next call, and to be released before it."""
        piece = memoryview(self._memory)[:size]
        count = os.preadv(fd, [piece], offset)
        whole = piece[:count]
        piece.release()
        return whole


def read_segment(
    segment: Segment, reader: Reader, stopped: Callable[[], bool] = lambda: False
) -> Recovered:
    """Open, lock and read one segment file; whatever is wrong with it is in the result."""
    found = Recovered(segment)
    try:
        segment.directory.open_segment(segment)
        _read(segment, reader, found, stopped)
    except Busy:
        found.locked = True
    except OSError as error:
        found.failed = error
    return found


def _read(segment: Segment, reader: Reader, found: Recovered, stopped: Callable[[], bool]) -> None:
    directory = segment.directory
    facts = os.fstat(segment.fd)
    wanted = directory.segment_bytes
    segment.damaged = facts.st_size != wanted or facts.st_blocks * 512 < wanted
    first = reader.read(segment.fd, 0, PAGE_BYTES)
    head = parse_segment_page(first) if len(first) == PAGE_BYTES else Doubt.TRUNCATED
    if isinstance(head, Doubt):
        if not first.any():
            found.empty = True
            return
        # Its footer, or else its records, still say which life of the segment they are of.
        found.doubts[head] += 1
        head = SegmentHead(directory.log_id, 0, wanted, 0)
    elif head.log_id != directory.log_id or head.segment_bytes != wanted:
        found.doubts[Doubt.FOREIGN] += 1
        found.empty = True
        return
    found.head = head
    lines = _footer(segment, reader, found) if facts.st_size == wanted else None
    if lines is None:
        _scan(segment, reader, found, facts.st_size, stopped)
        return
    found.sealed = True
    found.records = _believed(lines, found.head, wanted, found.doubts)


def _footer(segment: Segment, reader: Reader, found: Recovered) -> Records | None:
    """The lines of a footer of this life of the segment."""
    size = segment.directory.segment_bytes
    tail = reader.read(segment.fd, max(0, size - _TAIL_BYTES), min(size, _TAIL_BYTES))
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
        starts = range(size - need, size, _SCAN_BYTES)
        tail = np.concatenate(
            [reader.read(segment.fd, at, min(_SCAN_BYTES, size - at)) for at in starts]
        )
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
    """Lines that belong here, of whole blocks only."""
    wrong = doubts_of(lines, head, end_bytes)
    if wrong:
        for reason, rows in wrong.items():
            doubts[reason] += len(rows)
        lines = np.delete(lines, np.concatenate(list(wrong.values())))
    return _whole_blocks(lines, doubts)


def _whole_blocks(lines: Records, doubts: Counter[Doubt]) -> Records:
    """Leave out shards of blocks that are not all there, one after another."""
    if not len(lines) or (lines["shard_count"] == 1).all():
        return lines
    count = lines["shard_count"].astype(np.int64)
    shard = lines["shard"].astype(np.int64)
    heads = np.flatnonzero((shard == 0) & (np.arange(len(lines)) + count <= len(lines)))
    keep = np.zeros(len(lines), np.bool_)
    for shards in np.unique(count[heads]).tolist():
        starts = heads[count[heads] == shards]
        rows = starts[:, None] + np.arange(shards)
        block = lines[rows]
        good = (block["shard"] == np.arange(shards)).all(axis=1)
        step = 1 + -(-block["length"].astype(np.int64) // PAGE_BYTES)
        gap = np.diff(block["position"].astype(np.int64), axis=1)
        good &= (gap == step[:, :1]).all(axis=1)
        for name in ("key", "namespace", "sequence", "epoch", "group", "shard_count", "length"):
            good &= (block[name] == block[name][:, :1]).all(axis=1)
        keep[rows[good].reshape(-1)] = True
    if (lost := int((~keep).sum())) > 0:
        doubts[Doubt.INCOMPLETE] += lost
    return lines[keep]


# -- without a footer ------------------------------------------------------------------------------


def _scan(
    segment: Segment,
    reader: Reader,
    found: Recovered,
    size: int,
    stopped: Callable[[], bool],
) -> None:
    """Find records by their headers, on any page that is not inside a believed one, and sum their
    payloads: the last ones may be torn.
    """
    headers = list(_headers(segment, reader, found, size, stopped))
    if not found.head.sequence and headers:
        # The segment's own page is lost: the youngest life among its records is the one.
        last = max(int(row["segment_sequence"]) for row in headers)
        found.head = SegmentHead(found.head.log_id, last, found.head.segment_bytes, 0)
        headers = [row for row in headers if int(row["segment_sequence"]) == last]
        closed = True
    else:
        closed = False
    lines = np.array(headers, RECORD_DTYPE) if headers else np.zeros(0, RECORD_DTYPE)
    wrong = doubts_of(lines, found.head, min(size, found.head.segment_bytes))
    for reason, rows in wrong.items():
        found.doubts[reason] += len(rows)
    if wrong:
        lines = np.delete(lines, np.concatenate(list(wrong.values())))
    good, end = [], 1
    for index, row in enumerate(lines):
        if stopped():
            return
        if int(row["position"]) < end:
            continue  # inside of one that is believed: its payload only looks like a header
        if _payload_good(segment, reader, row):
            good.append(index)
            end = int(row["position"]) + 1 + pages_of(int(row["length"]))
        else:
            found.doubts[Doubt.TORN] += 1
    found.records = _whole_blocks(lines[good], found.doubts)
    found.end = end
    found.empty = not len(found.records)
    # A torn record may lie behind the last good one; it is overwritten, and nobody believes it.
    found.resume = not closed and not segment.damaged and not found.empty


def _headers(
    segment: Segment,
    reader: Reader,
    found: Recovered,
    size: int,
    stopped: Callable[[], bool],
) -> Iterator[Records]:
    """Record headers of this log, of this life, that are on the page they say."""
    head = found.head
    for at in range(0, size, _SCAN_BYTES):
        if stopped():
            return
        data = reader.read(
            segment.fd, at, min(_SCAN_BYTES, -(-(size - at) // PAGE_BYTES) * PAGE_BYTES)
        )
        pages = len(data) // PAGE_BYTES
        grid = data[: pages * PAGE_BYTES].reshape(pages, PAGE_BYTES)[:, :RECORD_BYTES]
        rows = np.ascontiguousarray(grid).view(RECORD_DTYPE).reshape(-1)
        mine = rows["magic"] == RECORD_MAGIC
        for index in np.flatnonzero(mine).tolist():
            row = rows[index]
            if not crc_good(row):
                found.doubts[Doubt.DAMAGED] += 1
            elif int(row["log_id"]) != head.log_id:
                found.doubts[Doubt.FOREIGN] += 1
            elif head.sequence and int(row["segment_sequence"]) < head.sequence:
                continue  # of an earlier life
            elif int(row["position"]) != at // PAGE_BYTES + index:
                found.doubts[Doubt.MISPLACED] += 1
            else:
                yield row


def _payload_good(segment: Segment, reader: Reader, row: Records) -> bool:
    """Whether the bytes behind a header have its checksum."""
    left, at = int(row["length"]), (int(row["position"]) + 1) * PAGE_BYTES
    digest = xxhash.xxh3_128()
    while left:
        step = min(left, _SCAN_BYTES)
        view = reader.view(segment.fd, at, pages_of(step) * PAGE_BYTES)
        with view:
            if len(view) < step:
                return False
            with view[:step] as piece:
                digest.update(piece)
        left -= step
        at += step
    return digest.digest() == row["checksum"].tobytes()


def rows_by_family(records: Records) -> Iterator[tuple[bytes, int, I64]]:
    """(namespace, group, rows) of contiguous records; rows rise."""
    if not len(records):
        return
    words = records.view(np.uint64).reshape(len(records), -1)[:, _NAMESPACE_WORDS]
    if (words == words[0]).all() and (records["group"] == records["group"][0]).all():
        yield records["namespace"][0].tobytes(), int(records["group"][0]), np.arange(len(records))
        return
    # Not a view of the two fields: that would have all the others between them.
    names = np.column_stack([words, records["group"].astype(np.uint64)])
    packed = np.ascontiguousarray(names).view("V40").reshape(-1)
    groups: dict[bytes, list[int]] = {}
    for row, name in enumerate(packed.tolist()):
        groups.setdefault(name, []).append(row)
    for rows in groups.values():
        first = records[rows[0]]
        yield first["namespace"].tobytes(), int(first["group"]), np.array(rows, np.int64)

"""Scans segments without a footer for records, and sorts recovered records for the index."""

from __future__ import annotations

import mmap
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from kvhearth.model import I64, U8, Records, RunningChecksum, checksum_of
from kvhearth_server.tiers.ssd.directory import NO_HEAD, Segment
from kvhearth_server.tiers.ssd.files import Files
from kvhearth_server.tiers.ssd.format import (
    LIVES_MAX,
    PAGE_BYTES,
    RECORD_BYTES,
    RECORD_DTYPE,
    RECORD_MAGIC,
    Doubt,
    SegmentHead,
    crc_good,
    doubts_of,
    pages_of,
    record_pages,
)
from kvhearth_server.tiers.ssd.index import rows_of

_OFFSETS = {name: place[1] for name, place in (RECORD_DTYPE.fields or {}).items()}
_ALIKE = ("key", "key_bytes", "namespace", "sequence", "epoch", "group", "shard_count", "length")
"""Fields that are equal in all shards of a block."""
_NAMESPACE_WORDS = slice(_OFFSETS["namespace"] // 8, _OFFSETS["namespace"] // 8 + 4)


@dataclass(frozen=True)
class RecoveredChunk:
    """Blocks alike in namespace, group, shards and width of their keys.

    Attributes:
        keys: n keys.
        rows: ``index.ROW_DTYPE`` (n, shards).
    """

    namespace: bytes
    group: int
    keys: list[bytes]
    rows: Records


@dataclass
class Recovered:
    """Content of one segment.

    Attributes:
        records: believed headers of whole blocks, in the order of their places. For a segment with
            a footer they lie in the reader's memory.
        chunks: the same for the index; set by ``sort_out``.
        resume: it can be appended to at ``end``; otherwise it is closed permanently.
        empty: it holds nothing of this log.
        foreign: it belongs to another log and is left alone.
        locked: requests of another process hold it; or they may, because no descriptor was left to
            examine it, as ``failed`` says. It is tried again.
        failed: it cannot be read at all.
    """

    segment: Segment
    head: SegmentHead = NO_HEAD
    records: Records = field(default_factory=lambda: np.zeros(0, RECORD_DTYPE))
    chunks: list[RecoveredChunk] = field(default_factory=list)
    end: int = 1
    resume: bool = False
    empty: bool = False
    foreign: bool = False
    locked: bool = False
    failed: OSError | None = None
    doubts: Counter[Doubt] = field(default_factory=Counter)

    def sort_out(self) -> None:
        """Make the chunks; afterwards nothing refers to the reader's memory."""
        if not self.locked and self.failed is None:
            self.chunks = list(_chunks(self.records))
        if not self.resume:
            self.records = np.zeros(0, RECORD_DTYPE)


def whole_blocks(lines: Records, doubts: Counter[Doubt]) -> Records:
    """Drop shards of blocks whose shards are not all there, one after another."""
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
        for name in _ALIKE:
            good &= (block[name] == block[name][:, :1]).all(axis=1)
        keep[rows[good].reshape(-1)] = True
    if (lost := int((~keep).sum())) > 0:
        doubts[Doubt.INCOMPLETE] += lost
    return lines[keep]


def _chunks(lines: Records) -> Iterator[RecoveredChunk]:
    for rows in _families(lines):
        mine = lines if rows is None else lines[rows]
        namespace, group = mine["namespace"][0].tobytes(), int(mine["group"][0])
        # The shape of a block as one number, which most often is the same for all.
        shape = mine["shard_count"].astype(np.int64) * 256 + mine["key_bytes"]
        kinds = [int(shape[0])] if (shape == shape[0]).all() else np.unique(shape).tolist()
        for kind in kinds:
            shards, width = divmod(kind, 256)
            alike = mine if len(kinds) == 1 else mine[shape == kind]
            heads = alike.view(np.uint8).reshape(len(alike), -1)[::shards]
            names = heads[:, _OFFSETS["key"] : _OFFSETS["key"] + width]
            keys: list[bytes] = np.ascontiguousarray(names).view(f"V{width}").ravel().tolist()
            yield RecoveredChunk(namespace, group, keys, rows_of(alike.reshape(-1, shards)))


def _families(lines: Records) -> Iterator[I64 | None]:
    """Yield the rows of each namespace and group among contiguous lines; None for all rows."""
    if not len(lines):
        return
    words = lines.view("<u8").reshape(len(lines), -1)[:, _NAMESPACE_WORDS]
    if (words == words[0]).all() and (lines["group"] == lines["group"][0]).all():
        yield None
        return
    # Not a view of the two fields: it would include all fields between them.
    names = np.column_stack([words, lines["group"].astype(np.uint64)])
    packed = np.ascontiguousarray(names).view("V40").reshape(-1)
    groups: dict[bytes, list[int]] = {}
    for row, name in enumerate(packed.tolist()):
        groups.setdefault(name, []).append(row)
    for rows in groups.values():
        yield np.array(rows, np.int64)


SCAN_BYTES = 8 << 20
"""Bytes read at once."""

_DOUBTS = (Doubt.DAMAGED, Doubt.FOREIGN, Doubt.MISPLACED)


class Reader:
    """Aligned reads into reused memory."""

    def __init__(self, memory: mmap.mmap, files: Files) -> None:
        self._memory, self._files = memory, files

    def read(self, fd: int, offset: int, size: int) -> U8:
        """Return a copy of up to ``size`` bytes, fewer at the end of the file.

        Raises:
            OSError: the device failed.
        """
        return self.lend(fd, offset, size).copy()

    def lend(self, fd: int, offset: int, size: int) -> U8:
        """Return the same without a copy: valid until the next call."""
        if size > len(self._memory):
            self._memory = mmap.mmap(-1, size)
        done = 0
        while done < size:
            step = min(size - done, SCAN_BYTES)
            with memoryview(self._memory)[done : done + step] as piece:
                count = self._files.read_into(fd, piece, offset + done)
            done += count
            if count < step:
                break
        return np.frombuffer(self._memory, np.uint8, done)


class _Window:
    """Pages that are read at once, and the records that seem to begin in them."""

    def __init__(self, segment: Segment, reader: Reader, first: int, size: int) -> None:
        wanted = pages_of(max(0, min(SCAN_BYTES, size - first * PAGE_BYTES))) * PAGE_BYTES
        data = reader.lend(segment.fd, first * PAGE_BYTES, wanted)
        self.first, self.pages = first, len(data) // PAGE_BYTES
        pages = data[: self.pages * PAGE_BYTES].reshape(-1, PAGE_BYTES)
        self._bytes = pages.reshape(-1).data
        self.rows: Records = pages[:, :RECORD_BYTES].copy().view(RECORD_DTYPE).reshape(-1)
        self.lengths: list[int] = self.rows["length"].tolist()
        self.checksums: list[bytes] = self.rows["checksum"].tolist()

    def candidates(self, head: SegmentHead, end_bytes: int) -> Iterator[tuple[int, Doubt | None]]:
        """Yield (index, reason for not believing it) of pages that look like a header, in order.
        Headers of an earlier life are left out.
        """
        places = np.flatnonzero(self.rows["magic"] == RECORD_MAGIC)
        rows = self.rows[places]
        doubts: list[Doubt | None] = [None] * len(rows)
        whole = crc_good(rows)
        ours = rows["log_id"] == head.log_id
        late = rows["segment_sequence"] >= head.sequence
        right = rows["position"] == self.first + places
        good = whole & ours & right
        for index in np.flatnonzero(~good).tolist():
            row = bool(whole[index]), bool(ours[index]), bool(right[index])
            doubts[index] = _DOUBTS[row.index(False)]
        rest = np.flatnonzero(good)
        for doubt, which in doubts_of(rows[rest], head, end_bytes).items():
            for index in rest[which].tolist():
                doubts[index] = doubt
        for index in np.flatnonzero(~whole | ~ours | late).tolist():
            yield int(places[index]), doubts[index]

    def youngest_life(self, log_id: int) -> int:
        """Return the greatest segment sequence of an otherwise valid header; 0 for none."""
        places = np.flatnonzero(self.rows["magic"] == RECORD_MAGIC)
        rows = self.rows[places]
        good = crc_good(rows) & (rows["log_id"] == log_id)
        good &= rows["position"] == self.first + places
        good &= rows["segment_sequence"] <= LIVES_MAX
        return int(rows["segment_sequence"][good].max(initial=0))

    def payload_good(self, index: int) -> bool:
        """Whether the payload of a header has its checksum; it must lie in the window."""
        begin = (index + 1) * PAGE_BYTES
        payload = self._bytes[begin : begin + self.lengths[index]]
        return checksum_of(payload) == self.checksums[index]


def youngest_life(
    segment: Segment, reader: Reader, size: int, stopped: Callable[[], bool] = lambda: False
) -> int:
    """Return the greatest segment sequence of headers in the first ``size`` bytes; 0 for none."""
    last, page = 0, 1
    while (window := _Window(segment, reader, page, size)).pages and not stopped():
        last = max(last, window.youngest_life(segment.directory.log_id))
        page += window.pages
    return last


class Scan:
    """Scan of one file of ``size`` bytes.

    Finds records by their headers, on any page that is not inside a believed one, and verifies
    their payloads, because the last ones may be torn. The file is read once, in large pieces.
    """

    def __init__(self, reader: Reader, found: Recovered, size: int) -> None:
        self._segment, self._reader = found.segment, reader
        self._found, self._size = found, size
        self._good: list[Records] = []

    def run(self, stopped: Callable[[], bool]) -> None:
        found = self._found
        closed = not found.head.sequence
        if closed:
            # The segment's first page is lost: the youngest life among its records counts.
            last = youngest_life(self._segment, self._reader, self._size, stopped)
            found.head = SegmentHead(found.head.log_id, last, found.head.segment_bytes, 0)
        page = found.end
        while (window := _Window(self._segment, self._reader, page, self._size)).pages:
            if stopped():
                return
            good: list[int] = []
            page = self._take(window, good)
            self._good.append(window.rows[good])
        lines = np.concatenate([np.zeros(0, RECORD_DTYPE), *self._good])
        found.records = whole_blocks(lines, found.doubts)
        found.empty = not len(found.records)
        # A torn record may lie behind the last good one; it is overwritten, and it is never
        # believed.
        found.resume = not closed and not self._segment.damaged and not found.empty

    def _take(self, window: _Window, good: list[int]) -> int:
        """Take the good records. Return the page at which the next window begins."""
        found, window_end = self._found, window.first + window.pages
        end_bytes = min(self._size, found.head.segment_bytes)
        for index, doubt in window.candidates(found.head, end_bytes):
            at = window.first + index
            if at < found.end:
                continue  # inside a believed record: its payload only looks like a header
            if doubt is not None:
                found.doubts[doubt] += 1
                continue
            after = at + record_pages(window.lengths[index])
            inside = after <= window_end
            if not inside and index:
                return at
            if inside:
                is_good = window.payload_good(index)
            else:
                wanted = window.checksums[index]
                is_good = self._long_payload_good(window.rows[index], wanted)
            if is_good:
                good.append(index)
                found.end = after
            else:
                found.doubts[Doubt.TORN] += 1
            if not inside:
                return max(found.end, at + 1)  # the window's memory was needed for the payload
        return max(found.end, window_end)

    def _long_payload_good(self, row: Records, wanted: bytes | None) -> bool:
        """Whether a payload that is longer than a window has its checksum."""
        left, at = int(row["length"]), (int(row["position"]) + 1) * PAGE_BYTES
        digest = RunningChecksum()
        while left:
            step = min(left, SCAN_BYTES)
            data = self._reader.lend(self._segment.fd, at, pages_of(step) * PAGE_BYTES)
            if len(data) < step:
                return False
            digest.update(data[:step].data)
            left -= step
            at += step
        return digest.digest() == wanted

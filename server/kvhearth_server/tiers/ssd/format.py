"""The on-disk format, version 1 (docs/on-disk-format.md): how it is written and how it is doubted.

A segment file is a header page, then records, then (once it is full) a footer at its very end. A
record is a header page and the payload, padded to whole pages. Everything is little endian, and
every header says where it belongs, so that a page in the wrong place is told from a right one.
"""

from __future__ import annotations

import enum
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from kvhearth.model import CHECKSUM_BYTES, I64, U8, Records

PAGE_BYTES = 4096
VERSION = 1

RECORD_MAGIC = 0x5256_4B48
SEGMENT_MAGIC = 0x5356_4B48
FOOTER_MAGIC = 0x4656_4B48
DIRECTORY_MAGIC = 0x4456_4B48

LIVES_MAX = 1 << 63
"""A greater segment sequence makes no sense: there are none to come after it."""

RECORD_DTYPE = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("group", "u1"),
        ("key_bytes", "u1"),
        ("log_id", "<u8"),
        ("segment_sequence", "<u8"),
        ("position", "<u4"),
        ("length", "<u4"),
        ("epoch", "<u4"),
        ("shard", "<u2"),
        ("shard_count", "<u2"),
        ("sequence", "<u8"),
        ("parent_sequence", "<u8"),
        ("namespace", "V32"),
        ("key", "V64"),
        ("checksum", f"V{CHECKSUM_BYTES}"),
        ("reserved", "V20"),
        ("crc", "<u4"),
    ]
)
"""A record's header, and its line in the footer. ``position`` is its page in the segment,
``checksum`` the payload's xxh3_128, ``crc`` the CRC-32 of all bytes before it.
"""

RECORD_BYTES = RECORD_DTYPE.itemsize

SEGMENT_DTYPE = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("reserved", "<u2"),
        ("log_id", "<u8"),
        ("segment_sequence", "<u8"),
        ("segment_bytes", "<u8"),
        ("opened_at", "<u8"),
        ("padding", "V20"),
        ("crc", "<u4"),
    ]
)
"""The first page of a segment. ``opened_at`` is Unix time in seconds, for people."""

FOOTER_DTYPE = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("reserved", "<u2"),
        ("log_id", "<u8"),
        ("segment_sequence", "<u8"),
        ("segment_bytes", "<u8"),
        ("count", "<u4"),
        ("end_position", "<u4"),
        ("digest", "V16"),
        ("padding", "V4"),
        ("crc", "<u4"),
    ]
)
"""The last page of a full segment. ``digest`` is the xxh3_128 of the ``count`` record headers that
fill the pages before it, ``end_position`` the page after the last record.
"""

DIRECTORY_DTYPE = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("reserved", "<u2"),
        ("log_id", "<u8"),
        ("segment_bytes", "<u8"),
        ("padding", "V36"),
        ("crc", "<u4"),
    ]
)
"""The file that makes a directory one of ours."""


class Doubt(enum.StrEnum):
    """Why a piece of a log is not believed; the label of a counter."""

    TORN = "torn"
    """A payload that is not what its header says."""
    DAMAGED = "damaged"
    """A header or footer whose check fails."""
    VERSION = "version"
    FOREIGN = "foreign"
    """Of another directory's log."""
    MISPLACED = "misplaced"
    """Of another segment or another place of this one."""
    TRUNCATED = "truncated"
    """Its bytes would lie outside of the file or over the footer."""
    INCOMPLETE = "incomplete"
    """Not all shards of the block are there."""
    DUPLICATE = "duplicate"
    """The same block was written again later."""
    OUTSIZED = "outsized"
    """A segment of a size that the directory has no more."""


@dataclass(frozen=True)
class SegmentHead:
    """What the first page of a segment says."""

    log_id: int
    sequence: int
    segment_bytes: int
    opened_at: int


@dataclass(frozen=True)
class DirectoryHead:
    """What the directory's own file says."""

    log_id: int
    segment_bytes: int


def pages_of(length: int) -> int:
    """Pages that ``length`` bytes take."""
    return -(-length // PAGE_BYTES)


def record_pages(length: int) -> int:
    """Pages of a record with a payload of ``length`` bytes."""
    return 1 + pages_of(length)


def footer_pages(count: int) -> int:
    """Pages of a footer that lists ``count`` records."""
    return 1 + pages_of(count * RECORD_BYTES)


# -- writing ---------------------------------------------------------------------------------------


def seal(rows: Records) -> None:
    """Set the last field, ``crc``, of headers of any kind; the others are set."""
    size = rows.dtype.itemsize - 4
    data = rows.tobytes()
    step = rows.dtype.itemsize
    starts = range(0, len(data), step)
    rows["crc"].reshape(-1)[:] = [zlib.crc32(data[at : at + size]) for at in starts]


def segment_page(head: SegmentHead) -> bytes:
    """The first page of a segment."""
    row = np.zeros(1, SEGMENT_DTYPE)
    row["magic"], row["version"] = SEGMENT_MAGIC, VERSION
    row["log_id"], row["segment_sequence"] = head.log_id, head.sequence
    row["segment_bytes"], row["opened_at"] = head.segment_bytes, head.opened_at
    seal(row)
    return row.tobytes().ljust(PAGE_BYTES, b"\0")


def directory_page(head: DirectoryHead) -> bytes:
    """The content of the directory's own file."""
    row = np.zeros(1, DIRECTORY_DTYPE)
    row["magic"], row["version"] = DIRECTORY_MAGIC, VERSION
    row["log_id"], row["segment_bytes"] = head.log_id, head.segment_bytes
    seal(row)
    return row.tobytes().ljust(PAGE_BYTES, b"\0")


def write_footer(pages: U8, head: SegmentHead, parts: Sequence[Records], end_position: int) -> None:
    """Make zeroed ``pages``, ``footer_pages`` of them, the footer of a segment, which ends where
    the segment ends. ``parts``: record headers, in the order of their places.
    """
    at = 0
    for part in parts:
        data = part.view(np.uint8).reshape(-1)
        pages[at : at + len(data)] = data
        at += len(data)
    row = pages[-PAGE_BYTES:][: FOOTER_DTYPE.itemsize].view(FOOTER_DTYPE)
    row["magic"], row["version"] = FOOTER_MAGIC, VERSION
    row["log_id"], row["segment_sequence"] = head.log_id, head.sequence
    row["segment_bytes"], row["count"] = head.segment_bytes, at // RECORD_BYTES
    row["end_position"] = end_position
    row["digest"] = np.frombuffer(xxhash.xxh3_128_digest(pages[:at].data), "V16")
    seal(row)


# -- reading ---------------------------------------------------------------------------------------


def _row(page: bytes | U8, dtype: np.dtype[np.void], magic: int) -> Records | Doubt:
    row = np.frombuffer(page, dtype, 1)
    data = row.tobytes()
    if row["magic"][0] != magic or zlib.crc32(data[:-4]) != row["crc"][0]:
        return Doubt.DAMAGED
    return row if row["version"][0] == VERSION else Doubt.VERSION


def parse_segment_page(page: bytes | U8) -> SegmentHead | Doubt:
    """What a segment's first page says, or why it is not believed."""
    row = _row(page, SEGMENT_DTYPE, SEGMENT_MAGIC)
    if isinstance(row, Doubt):
        return row
    names = ("log_id", "segment_sequence", "segment_bytes", "opened_at")
    head = SegmentHead(*(int(row[name][0]) for name in names))
    return head if head.sequence <= LIVES_MAX else Doubt.DAMAGED


def parse_directory_page(page: bytes | U8) -> DirectoryHead | Doubt:
    """What the directory's own file says, or why it is not believed."""
    if len(page) < DIRECTORY_DTYPE.itemsize:
        return Doubt.TRUNCATED
    row = _row(page, DIRECTORY_DTYPE, DIRECTORY_MAGIC)
    if isinstance(row, Doubt):
        return row
    return DirectoryHead(int(row["log_id"][0]), int(row["segment_bytes"][0]))


def footer_said(page: bytes | U8) -> SegmentHead | None:
    """Whose footer a last page is, if it is one."""
    row = _row(page, FOOTER_DTYPE, FOOTER_MAGIC)
    if isinstance(row, Doubt):
        return None
    log_id, sequence, size = (
        int(row[name][0]) for name in ("log_id", "segment_sequence", "segment_bytes")
    )
    return SegmentHead(log_id, sequence, size, 0) if sequence <= LIVES_MAX else None


def footer_count(page: bytes | U8, head: SegmentHead) -> tuple[int, int] | Doubt | None:
    """(records, end position) by a segment's last page; None if it is no footer of this life.

    A segment that is filled anew still has the footer of its last life until it is full.
    """
    row = _row(page, FOOTER_DTYPE, FOOTER_MAGIC)
    if isinstance(row, Doubt):
        magic = np.frombuffer(page, "<u4", 1)[0]
        return row if magic == FOOTER_MAGIC else None
    if int(row["log_id"][0]) != head.log_id:
        return Doubt.FOREIGN
    if int(row["segment_sequence"][0]) != head.sequence:
        return None
    if head.sequence > LIVES_MAX:
        return Doubt.DAMAGED
    count, end = int(row["count"][0]), int(row["end_position"][0])
    if (footer_pages(count) + end) * PAGE_BYTES > head.segment_bytes:
        return Doubt.DAMAGED
    return count, end


def parse_footer(tail: U8, count: int) -> Records | None:
    """The record headers of a footer whose last page was believed; None if they are not as they
    were written.

    Args:
        tail: the last bytes of the segment, at least ``footer_pages(count)`` pages.
    """
    start = len(tail) - footer_pages(count) * PAGE_BYTES
    lines = tail[start : start + count * RECORD_BYTES]
    row = np.frombuffer(tail[-PAGE_BYTES:], FOOTER_DTYPE, 1)
    if xxhash.xxh3_128_digest(lines.data) != row["digest"][0].tobytes():
        return None
    return lines.view(RECORD_DTYPE)


def pending_aborts_of(rows: Records, head: SegmentHead, end_bytes: int) -> dict[Doubt, I64]:
    """Rows of record headers that do not belong into the segment, by reason.

    ``end_bytes``: where records must end. Checks are not looked at: see ``crc_good``.
    """
    if _none_doubted(rows, head, end_bytes):
        return {}
    found: dict[Doubt, I64] = {}
    left = np.ones(len(rows), np.bool_)
    pages = 1 + -(-rows["length"].astype(np.int64) // PAGE_BYTES)
    ends = (rows["position"].astype(np.int64) + pages) * PAGE_BYTES
    sizes = (rows["key_bytes"] > 0) & (rows["key_bytes"] <= 64) & (rows["length"] > 0)
    sane = (rows["shard"] < rows["shard_count"]) & (rows["position"] > 0) & sizes
    for reason, bad in (
        (Doubt.DAMAGED, rows["magic"] != RECORD_MAGIC),
        (Doubt.VERSION, rows["version"] != VERSION),
        (Doubt.FOREIGN, rows["log_id"] != head.log_id),
        (Doubt.MISPLACED, rows["segment_sequence"] != head.sequence),
        (Doubt.TRUNCATED, ends > end_bytes),
        (Doubt.DAMAGED, ~sane),
    ):
        hit = np.flatnonzero(left & bad)
        if len(hit):
            found[reason] = np.concatenate([found.get(reason, hit[:0]), hit])
            left[hit] = False
    return found


def _none_doubted(rows: Records, head: SegmentHead, end_bytes: int) -> bool:
    """Whether all of them belong there, which is the rule: five words of each say it, and one pass
    brings these out of the rows.
    """
    words = rows.view("<u8").reshape(len(rows), RECORD_BYTES // 8)
    kind, log_id, sequence, place, shape = np.ascontiguousarray(words[:, :5].T)
    key_bytes = kind >> 56
    position, length = place & 0xFFFF_FFFF, place >> 32
    ends = position + 1 + (length + (PAGE_BYTES - 1)) // PAGE_BYTES
    good = kind & 0xFFFF_FFFF_FFFF == RECORD_MAGIC | VERSION << 32
    good &= (key_bytes > 0) & (key_bytes <= 64) & (position > 0) & (length > 0)
    good &= (log_id == head.log_id) & (sequence == head.sequence)
    good &= (ends <= end_bytes // PAGE_BYTES) & (shape >> 32 & 0xFFFF < shape >> 48)
    return bool(good.all())


def crc_good(row: Records) -> bool:
    """Whether one record header is as it was written."""
    data = row.tobytes()
    return zlib.crc32(data[:-4]) == int(row["crc"])

"""On-disk format, version 1 (docs/on-disk-format.md): encoding and validation.

A segment file is a header page, then records, then (once it is full) a footer at its very end. A
record is a header page and the payload, padded to whole pages. Everything is little endian. Every
header names the place it belongs to, so that a misplaced page can be recognized.
"""

from __future__ import annotations

import enum
import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from kvhearth.model import CHECKSUM_BYTES, I64, U8, Bools, Records

PAGE_BYTES = 4096
VERSION = 1

RECORD_MAGIC = 0x5256_4B48
SEGMENT_MAGIC = 0x5356_4B48
FOOTER_MAGIC = 0x4656_4B48
DIRECTORY_MAGIC = 0x4456_4B48

LIVES_MAX = 1 << 63
"""Greatest segment sequence that is believed: a greater one would leave none for later segments."""

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
        ("zeros", "V20"),
        ("crc", "<u4"),
    ]
)
"""Header of a record, and its line in the footer. ``position`` is its page in the segment,
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
        ("tenant_id", "<u8"),
        ("padding", "V12"),
        ("crc", "<u4"),
    ]
)
"""First page of a segment. ``opened_at`` is Unix time in seconds, for people; ``tenant_id`` is
``id_of`` the tenant whose blocks the segment has.
"""

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
"""Last page of a full segment. ``digest`` is the xxh3_128 of the ``count`` record headers that fill
the pages before it, ``end_position`` the page after the last record.
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
"""Content of the file that marks a directory as one of KVHearth's."""


class Doubt(enum.StrEnum):
    """Reasons for not believing a piece of a log; the label of a counter."""

    TORN = "torn"
    """The payload does not match its header."""
    DAMAGED = "damaged"
    """The check of a header or footer fails."""
    VERSION = "version"
    FOREIGN = "foreign"
    """It belongs to another directory's log."""
    MISPLACED = "misplaced"
    """It belongs to another segment, or to another place of this one."""
    TRUNCATED = "truncated"
    """Its bytes would lie outside the file or over the footer."""
    INCOMPLETE = "incomplete"
    """Some shards of the block are missing."""
    DUPLICATE = "duplicate"
    """The same block was written again later."""
    OUTSIZED = "outsized"
    """The segment has a size that the directory no longer uses."""


@dataclass(frozen=True)
class SegmentHead:
    """Content of a segment's first page."""

    log_id: int
    sequence: int
    segment_bytes: int
    opened_at: int
    tenant_id: int = 0


@dataclass(frozen=True)
class DirectoryHead:
    """Content of the directory's own file."""

    log_id: int
    segment_bytes: int


def id_of(tenant: str) -> int:
    """Return the number by which a segment names its tenant; 0 for none."""
    if not tenant:
        return 0
    return int.from_bytes(hashlib.sha256(tenant.encode()).digest()[:8], "little")


def pages_of(length: int) -> int:
    """Return the pages that ``length`` bytes take."""
    return -(-length // PAGE_BYTES)


def record_pages(length: int) -> int:
    """Return the pages of a record with a payload of ``length`` bytes."""
    return 1 + pages_of(length)


def footer_pages(count: int) -> int:
    """Return the pages of a footer that lists ``count`` records."""
    return 1 + pages_of(count * RECORD_BYTES)


# -- writing ---------------------------------------------------------------------------------------


def _crcs(rows: Records) -> list[int]:
    data, step = rows.tobytes(), rows.dtype.itemsize
    return [zlib.crc32(data[at : at + step - 4]) for at in range(0, len(data), step)]


def seal(rows: Records) -> None:
    """Set the last field, ``crc``, of headers of any kind whose other fields are set."""
    rows["crc"].reshape(-1)[:] = _crcs(rows)


def _page(dtype: np.dtype[np.void], magic: int, **fields: object) -> bytes:
    """Return a page that begins with a sealed header of these fields."""
    row = np.zeros(1, dtype)
    for name, value in {"magic": magic, "version": VERSION, **fields}.items():
        row[name] = value
    seal(row)
    return row.tobytes().ljust(PAGE_BYTES, b"\0")


def segment_page(head: SegmentHead) -> bytes:
    """Return the first page of a segment."""
    return _page(
        SEGMENT_DTYPE,
        SEGMENT_MAGIC,
        log_id=head.log_id,
        segment_sequence=head.sequence,
        segment_bytes=head.segment_bytes,
        opened_at=head.opened_at,
        tenant_id=head.tenant_id,
    )


def directory_page(head: DirectoryHead) -> bytes:
    """Return the content of the directory's own file."""
    facts = {"log_id": head.log_id, "segment_bytes": head.segment_bytes}
    return _page(DIRECTORY_DTYPE, DIRECTORY_MAGIC, **facts)


def write_footer(pages: U8, head: SegmentHead, parts: Sequence[Records], end_position: int) -> None:
    """Turn zeroed ``pages``, ``footer_pages`` of them, into the footer of a segment. It ends where
    the segment ends. ``parts``: record headers, in the order of their places.
    """
    at = 0
    for part in parts:
        data = part.view(np.uint8).reshape(-1)
        pages[at : at + len(data)] = data
        at += len(data)
    last = _page(
        FOOTER_DTYPE,
        FOOTER_MAGIC,
        log_id=head.log_id,
        segment_sequence=head.sequence,
        segment_bytes=head.segment_bytes,
        count=at // RECORD_BYTES,
        end_position=end_position,
        digest=np.frombuffer(xxhash.xxh3_128_digest(pages[:at].data), "V16"),
    )
    pages[-PAGE_BYTES:] = np.frombuffer(last, np.uint8)


# -- reading ---------------------------------------------------------------------------------------


def _row(page: bytes | U8, dtype: np.dtype[np.void], magic: int) -> Records | Doubt:
    row = np.frombuffer(page, dtype, 1)
    if row["magic"][0] != magic or not crc_good(row)[0]:
        return Doubt.DAMAGED
    return row if row["version"][0] == VERSION else Doubt.VERSION


def parse_segment_page(page: bytes | U8) -> SegmentHead | Doubt:
    """Return the content of a segment's first page, or the reason for not believing it."""
    row = _row(page, SEGMENT_DTYPE, SEGMENT_MAGIC)
    if isinstance(row, Doubt):
        return row
    names = ("log_id", "segment_sequence", "segment_bytes", "opened_at", "tenant_id")
    head = SegmentHead(*(int(row[name][0]) for name in names))
    return head if head.sequence <= LIVES_MAX else Doubt.DAMAGED


def parse_directory_page(page: bytes | U8) -> DirectoryHead | Doubt:
    """Return the content of the directory's own file, or the reason for not believing it."""
    if len(page) < DIRECTORY_DTYPE.itemsize:
        return Doubt.TRUNCATED
    row = _row(page, DIRECTORY_DTYPE, DIRECTORY_MAGIC)
    if isinstance(row, Doubt):
        return row
    return DirectoryHead(int(row["log_id"][0]), int(row["segment_bytes"][0]))


@dataclass(frozen=True)
class Footer:
    """Content of a last page: the segment's head, and the headers of records before the page."""

    head: SegmentHead
    count: int
    end: int
    digest: bytes


def parse_footer_page(page: bytes | U8) -> Footer | Doubt | None:
    """Return the content of a last page, or the reason for not believing it; None if it is no
    footer.
    """
    if np.frombuffer(page, "<u4", 1)[0] != FOOTER_MAGIC:
        return None
    row = _row(page, FOOTER_DTYPE, FOOTER_MAGIC)
    if isinstance(row, Doubt):
        return row
    names = ("log_id", "segment_sequence", "segment_bytes", "count", "end_position")
    log_id, sequence, size, count, end = (int(row[name][0]) for name in names)
    if sequence > LIVES_MAX:
        return Doubt.DAMAGED
    return Footer(SegmentHead(log_id, sequence, size, 0), count, end, row["digest"][0].tobytes())


def footer_of(page: bytes | U8, head: SegmentHead) -> Footer | Doubt | None:
    """Return the footer of this life of a segment, by its last page. A head without a sequence
    stands for any life.

    A segment that is being overwritten still has the footer of its last life until it is full.
    """
    footer = parse_footer_page(page)
    if not isinstance(footer, Footer):
        return footer
    if footer.head.log_id != head.log_id:
        return Doubt.FOREIGN
    if head.sequence and footer.head.sequence != head.sequence:
        return None
    if (footer_pages(footer.count) + footer.end) * PAGE_BYTES > head.segment_bytes:
        return Doubt.DAMAGED
    return footer


def footer_lines(tail: U8, footer: Footer) -> Records | None:
    """Return the record headers of a footer; None if they have changed since they were written.

    Args:
        tail: the last bytes of the segment, at least ``footer_pages(footer.count)`` pages.
    """
    start = len(tail) - footer_pages(footer.count) * PAGE_BYTES
    lines = tail[start : start + footer.count * RECORD_BYTES]
    good = xxhash.xxh3_128_digest(lines.data) == footer.digest
    return lines.view(RECORD_DTYPE) if good else None


def doubts_of(rows: Records, head: SegmentHead, end_bytes: int) -> dict[Doubt, I64]:
    """Return the rows of record headers that do not belong in the segment, by reason.

    ``end_bytes``: upper bound of the records' end. Checksums of headers are not examined: see
    ``crc_good``.
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
    """Whether all rows belong in the segment, which is the usual case. One pass extracts the five
    words of each row that decide this.
    """
    words = rows.view("<u8").reshape(len(rows), RECORD_BYTES // 8)
    kind, log_id, sequence, place, shape = np.ascontiguousarray(words[:, :5].T)
    key_bytes = kind >> 56
    position, length = place & 0xFFFF_FFFF, place >> 32
    ends = position + 1 + (length + (PAGE_BYTES - 1)) // PAGE_BYTES
    kind = kind & 0xFFFF_FFFF_FFFF
    good = kind == RECORD_MAGIC | VERSION << 32
    good &= (key_bytes > 0) & (key_bytes <= 64) & (position > 0) & (length > 0)
    good &= (log_id == head.log_id) & (sequence == head.sequence)
    good &= (ends <= end_bytes // PAGE_BYTES) & (shape >> 32 & 0xFFFF < shape >> 48)
    return bool(good.all())


def crc_good(rows: Records) -> Bools:
    """Return which headers are as they were written."""
    return np.asarray(np.array(_crcs(rows), np.uint32) == rows["crc"])

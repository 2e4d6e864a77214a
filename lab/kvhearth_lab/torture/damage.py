"""Damage to the daemon's files from outside: locates blocks, flips bits, tears records.

The files are read by the formats that the daemon writes (``memory/journal``, ``tiers/ssd/format``).
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvhearth.model import checksum_of
from kvhearth_lab.torture.world_config import SLAB_BYTES, SLOT_BYTES_MIN
from kvhearth_server.core.slot_table import Geometry, State
from kvhearth_server.engine.epoch_store import FILE_NAME, RESERVE_BYTES
from kvhearth_server.memory.journal import HEADER_BYTES, HEADER_DTYPE, STATE_WORDS, journal_path
from kvhearth_server.tiers.ssd.format import (
    FOOTER_MAGIC,
    PAGE_BYTES,
    RECORD_BYTES,
    RECORD_DTYPE,
    RECORD_MAGIC,
    SegmentHead,
    crc_good,
    parse_segment_page,
    record_pages,
)

SECTOR_BYTES = 512
ARENA, DRIVE = "arena", "drive"
"""Places of damage."""
_NAMESPACES = Path(FILE_NAME).stem
_BOUND = (STATE_WORDS[State.COMMITTED], STATE_WORDS[State.SUMMED])


@dataclass(frozen=True)
class InArena:
    """A shard in a slot, with the places of its header and its bytes."""

    key: bytes
    shards: int
    header_at: int
    path: Path
    offset: int
    length: int


@dataclass(frozen=True)
class OnDisk:
    """A record of a segment file.

    ``page`` is the page of its header. ``whole`` means that its payload is right. ``family`` is its
    namespace and KV group.
    """

    family: tuple[bytes, int]
    key: bytes
    epoch: int
    shard: int
    shards: int
    path: Path
    page: int
    length: int
    whole: bool

    @property
    def offset(self) -> int:
        """Offset of its header in bytes."""
        return self.page * PAGE_BYTES

    @property
    def bytes(self) -> int:
        """Size of header page and payload pages."""
        return record_pages(self.length) * PAGE_BYTES


# -- the arena -------------------------------------------------------------------------------------


def in_arena(folder: Path, memory_bytes: int) -> list[InArena]:
    """Return all bound shards according to the journal of an arena with one tenant."""
    geometry = Geometry.of([("default", memory_bytes)], SLAB_BYTES, SLOT_BYTES_MIN)
    path = journal_path(folder)
    if not path.exists():
        return []
    data = np.fromfile(path, np.uint8)
    slabs_end = geometry.slab_count * 8
    end = slabs_end + geometry.slot_count * HEADER_BYTES
    if len(data) < end:
        return []
    sizes = data[:slabs_end].view(np.uint64) & np.uint64(0xFFFF_FFFF)
    headers = data[slabs_end:end].view(HEADER_DTYPE)
    found = []
    for slot in np.flatnonzero(np.isin(headers["state"], _BOUND)).tolist():
        slab, index = divmod(slot, geometry.stride)
        row = headers[slot]
        found.append(
            InArena(
                bytes(row["key"])[: int(row["key_bytes"])],
                int(row["shard_count"]),
                slabs_end + slot * HEADER_BYTES,
                folder / "segment-0",
                slab * SLAB_BYTES + index * int(sizes[slab]),
                int(row["length"]),
            )
        )
    return found


# -- drives ----------------------------------------------------------------------------------------


def segment_files(folder: Path) -> list[Path]:
    """Return the segment files, sorted by name."""
    return sorted(folder.glob("*.segment"))


def on_disk(folder: Path) -> list[OnDisk]:
    """Return all records of the present lives of a directory's segments."""
    return [record for path in segment_files(folder) for record in _records(path)]


def _whole_blocks(folder: Path) -> Iterator[OnDisk]:
    """Yield a record of each block whose shards are all there, each with a matching checksum."""
    shards: dict[tuple[Path, tuple[bytes, int], bytes, int], set[int]] = {}
    for record in on_disk(folder):
        if record.whole:
            found = shards.setdefault((record.path, record.family, record.key, record.epoch), set())
            found.add(record.shard)
            if len(found) == record.shards:
                yield record


def blocks_on_disk(folder: Path) -> set[tuple[bytes, int]]:
    """Return (key, epoch) of whole blocks."""
    return {(each.key, each.epoch) for each in _whole_blocks(folder)}


def keys_on_disk(folder: Path) -> set[bytes]:
    """Return the keys of whole blocks."""
    return {each.key for each in _whole_blocks(folder)}


def names_on_disk(folder: Path) -> set[tuple[tuple[bytes, int], bytes]]:
    """Return (family, key) of whole blocks, at least as many as a tier can have. A cold start that
    could not trust the epochs gives namespaces new names, and the same keys are stored again under
    these.
    """
    return {(each.family, each.key) for each in _whole_blocks(folder)}


def _records(path: Path) -> Iterator[OnDisk]:
    data = np.fromfile(path, np.uint8)
    pages = len(data) // PAGE_BYTES
    if not pages:
        return
    grid = data[: pages * PAGE_BYTES].reshape(pages, PAGE_BYTES)
    rows = np.ascontiguousarray(grid[:, :RECORD_BYTES]).view(RECORD_DTYPE).reshape(-1)
    mine = (rows["magic"] == RECORD_MAGIC) & (rows["position"] == np.arange(pages))
    head = parse_segment_page(data[:PAGE_BYTES])
    if isinstance(head, SegmentHead):
        mine &= (rows["log_id"] == head.log_id) & (rows["segment_sequence"] == head.sequence)
    else:
        # The first page is damaged: take the youngest life.
        lives = [int(row["segment_sequence"]) for row in rows[mine] if crc_good(row)]
        mine &= rows["segment_sequence"] == max(lives, default=0)
    for page in np.flatnonzero(mine).tolist():
        row = rows[page]
        if not crc_good(row):
            continue
        length = int(row["length"])
        start = (page + 1) * PAGE_BYTES
        payload = data[start : start + length]
        whole = checksum_of(payload.data) == row["checksum"].tobytes()
        key = row["key"].tobytes()[: int(row["key_bytes"])]
        shard, shards, epoch = (int(row[name]) for name in ("shard", "shard_count", "epoch"))
        family = row["namespace"].tobytes(), int(row["group"])
        yield OnDisk(family, key, epoch, shard, shards, path, page, length, whole)


def footers(folder: Path) -> list[Path]:
    """Return the segment files whose last page is a footer of any life."""
    found = []
    for path in segment_files(folder):
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - PAGE_BYTES))
            if int.from_bytes(file.read(4), "little") == FOOTER_MAGIC:
                found.append(path)
    return found


# -- damage ----------------------------------------------------------------------------------------


def flip_bit(path: Path, offset: int, bit: int) -> None:
    """Flip one bit of a file, and make it visible to readers."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        (byte,) = os.pread(descriptor, 1, offset)
        os.pwrite(descriptor, bytes([byte ^ (1 << bit)]), offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def zero(path: Path, offset: int, length: int) -> None:
    """Zero bytes of a file, and make that visible to readers."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, bytes(length), offset)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def tear(record: OnDisk, sectors: int, rng: random.Random) -> None:
    """Keep the first ``sectors`` sectors of a record. The rest becomes as if the drive had never
    written it: zeros or old bytes.
    """
    keep = sectors * SECTOR_BYTES
    left = record.bytes - keep
    if left <= 0:
        return
    old = bytes(left) if rng.random() < 0.5 else rng.randbytes(left)
    descriptor = os.open(record.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(descriptor, old, record.offset + keep)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def taken_bytes(folder: Path) -> int:
    """Return the space that a directory takes by its file system's count, itself included."""
    return sum(_taken(folder))


def claimed_bytes(folder: Path) -> int:
    """Return the same, with the whole reserve for the namespaces. Otherwise a segment too many
    would fit into the reserve, and only a daemon with many namespaces would miss the space.
    """
    others, names = _taken(folder)
    return others + max(names, RESERVE_BYTES)


def _taken(folder: Path) -> tuple[int, int]:
    """Return the space of a directory without the namespaces' files, and of these files."""
    others, names = folder.stat().st_blocks * 512, 0
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                taken = entry.stat(follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue
            if entry.name.startswith(_NAMESPACES):
                names += taken
            else:
                others += taken
    return others, names

"""What the SSD tier is told: places, sizes, bounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvhearth_server.tiers.ssd.format import PAGE_BYTES

MIB = 1 << 20
SEGMENTS_MAX = 1024
"""Most segment files of a directory: each costs a descriptor for good."""

SEGMENTS_LEAST = 4
"""Fewest: the open one, the next one, and two among which to choose when room must be made."""

NAMESPACES_NAME, NAMESPACES_FRESH_NAME = "namespaces.json", "namespaces.new"
"""Not the tier's: whoever writes them keeps room for them beside each place's capacity."""

_SEGMENT_BYTES_USUAL = 256 * MIB
_SEGMENT_BYTES_LEAST = 64 * MIB
_SEGMENTS_WANTED = 32


def segment_bytes_for(capacity_bytes: int) -> int:
    """A good segment size: 256 MiB, less for a small directory so that there is something to
    choose from when room must be made, more for one that would need too many files.
    """
    size = _SEGMENT_BYTES_USUAL
    while size > _SEGMENT_BYTES_LEAST and capacity_bytes // size < _SEGMENTS_WANTED:
        size //= 2
    while capacity_bytes // size > SEGMENTS_MAX:
        size *= 2
    return size


def segment_cost_bytes(segment_bytes: int) -> int:
    """Most that a segment file may take by the file system's count.

    File systems count the blocks of a file's extent tree as the file's: 12 to 16 bytes an extent,
    and at worst each page is an extent of its own.
    """
    return segment_bytes + segment_bytes // 256 + 16 * PAGE_BYTES


def directory_overhead_bytes() -> int:
    """Kept free for the directory itself and its head file."""
    return 16 * PAGE_BYTES


def segments_max(capacity_bytes: int, segment_bytes: int) -> int:
    """Segment files that ``capacity_bytes`` have room for."""
    return min(SEGMENTS_MAX, segments_that_fit(capacity_bytes, segment_bytes))


def segments_that_fit(capacity_bytes: int, segment_bytes: int) -> int:
    """The same if there could be any number of files."""
    room = capacity_bytes - directory_overhead_bytes()
    return max(0, room // segment_cost_bytes(segment_bytes))


def capacity_least(segment_bytes: int) -> int:
    """Least capacity of a directory with such segments."""
    return SEGMENTS_LEAST * segment_cost_bytes(segment_bytes) + directory_overhead_bytes()


@dataclass(frozen=True)
class Place:
    """One directory, on a drive of its own if there are several, and what may be taken of it."""

    path: Path
    capacity_bytes: int


@dataclass(frozen=True)
class SsdSettings:
    """Settings of the tier.

    Attributes:
        places: directories that exist; records are striped over them.
        segment_bytes: of new directories, 0 for ``segment_bytes_for``; one that has segments
            keeps its size.
        interface: auto, io_uring, libaio or threads.
        depth: requests in the kernel at once.
        queue_reads, queue_writes: records to read, requests to write that wait or run before
            ``Throttled("queue")``.
        batch_blocks_max: most blocks of a batch.
        request_bytes: neighbours are joined to requests of up to this. There is room for two blocks
            of 2 MiB and their headers: together they cost the processor a tenth less.
        flush: acknowledge a store only after the drive's own cache was flushed (``fdatasync``):
            survives a power cut, not only the death of the process.
        verify_stores: check a slot's bytes, before its store is acknowledged.
        sum_threads: most threads that verify what was moved. One keeps up with 15 to 20 GB/s;
            others help it when much comes at once, and cost the processor more a byte.
        prewrite: write new segments once before use: first writes run at full speed then. Left out
            while the budget does not have a whole segment.
        bytes_per_day: most bytes written to all directories together, of whatever kind, 0 for no
            bound. Over a span of time a debt of one segment may come on top.
        carry_share: of a segment, at most so much is carried over when it is reclaimed.
        slow_s: a request that takes longer makes the tier degraded.
        stuck_s: a request that takes longer is reported stuck.
        open_s: a directory that takes longer to open is not used.
    """

    places: tuple[Place, ...]
    segment_bytes: int = 0
    interface: str = "auto"
    depth: int = 32
    queue_reads: int = 4096
    queue_writes: int = 1024
    batch_blocks_max: int = 512
    request_bytes: int = 4608 << 10
    flush: bool = False
    verify_stores: bool = True
    sum_threads: int = 1
    prewrite: bool = False
    bytes_per_day: int = 0
    carry_share: float = 0.25
    slow_s: float = 1.0
    stuck_s: float = 5.0
    open_s: float = 10.0

    def __post_init__(self) -> None:
        if not self.places:
            raise ValueError("the SSD tier needs a directory")
        if len({place.path.resolve() for place in self.places}) != len(self.places):
            raise ValueError("a directory is named twice")
        if self.segment_bytes % PAGE_BYTES or 0 < self.segment_bytes < 16 * PAGE_BYTES:
            raise ValueError(f"segment_bytes must be a multiple of {PAGE_BYTES}, 64KiB or more")
        if not 0 <= self.carry_share < 1 or not 0 < self.depth <= 4096:
            raise ValueError("carry_share must be below 1, depth 1 to 4096")
        if min(self.queue_reads, self.queue_writes, self.batch_blocks_max) < 1:
            raise ValueError("queues and batches have room for at least one block")
        if self.sum_threads < 1:
            raise ValueError("somebody must verify: sum_threads is at least 1")

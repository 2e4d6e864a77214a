"""Settings of the SSD tier: places, sizes, bounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from kvhearth_server.tiers.ssd.format import PAGE_BYTES

MIB = 1 << 20
SEGMENTS_MAX = 1024
"""Most segment files of a directory. Each one keeps a descriptor open permanently."""

SEGMENTS_LEAST = 4
"""Fewest segment files: the open one, the next one, and two to choose from to make room."""

_SEGMENT_BYTES_USUAL = 256 * MIB
_SEGMENT_BYTES_LEAST = 64 * MIB
_SEGMENTS_WANTED = 32


def segment_bytes_for(capacity_bytes: int) -> int:
    """Return a good segment size: 256 MiB; less for a small directory, so that reclaiming has
    segments to choose from; more for a directory that would need too many files.
    """
    size = _SEGMENT_BYTES_USUAL
    while size > _SEGMENT_BYTES_LEAST and capacity_bytes // size < _SEGMENTS_WANTED:
        size //= 2
    while capacity_bytes // size > SEGMENTS_MAX:
        size *= 2
    return size


def segment_cost_bytes(segment_bytes: int) -> int:
    """Return the most bytes that a segment file may take by the file system's count.

    File systems charge the blocks of a file's extent tree to the file: 12 to 16 bytes an extent,
    and at worst each page is an extent of its own.
    """
    return segment_bytes + segment_bytes // 256 + 16 * PAGE_BYTES


def directory_overhead_bytes() -> int:
    """Return the bytes kept free for the directory itself and its head file."""
    return 16 * PAGE_BYTES


def segments_max(capacity_bytes: int, segment_bytes: int) -> int:
    """Return how many segment files fit into ``capacity_bytes``, at most ``SEGMENTS_MAX``."""
    return min(SEGMENTS_MAX, segments_that_fit(capacity_bytes, segment_bytes))


def segments_that_fit(capacity_bytes: int, segment_bytes: int) -> int:
    """Return how many segment files fit into ``capacity_bytes`` without that bound."""
    room = capacity_bytes - directory_overhead_bytes()
    return max(0, room // segment_cost_bytes(segment_bytes))


def quota_segments(segments: int, part: float) -> int:
    """Return how many of a directory's segments a part of it is, 0 to 1."""
    return int(segments * part + 1e-9)  # 1/3 of 63 is 21


def capacity_least(segment_bytes: int) -> int:
    """Return the least capacity of a directory with such segments."""
    return SEGMENTS_LEAST * segment_cost_bytes(segment_bytes) + directory_overhead_bytes()


@dataclass(frozen=True)
class SsdDirectorySpec:
    """One directory and its capacity. Several directories should be on different drives."""

    path: Path
    capacity_bytes: int


@dataclass(frozen=True)
class SsdSettings:
    """Settings of the tier; ``config.model`` checks those that a user gives.

    Attributes:
        places: existing directories; records are striped across them.
        segment_bytes: segment size of new directories, 0 for ``segment_bytes_for``; a directory
            that has segments keeps its size.
        interface: auto, libaio or threads.
        depth: requests in the kernel at once.
        queue_reads, queue_writes: records to read and requests to write that may wait or run
            before ``Throttled("queue")``.
        batch_blocks_max: most blocks of a batch.
        request_bytes: upper bound of a request that joins neighbours. The default has room for two
            blocks of 2 MiB and their headers: together they cost the processor a tenth less.
        flush: acknowledge a store only after the drive's own cache was flushed (``fdatasync``):
            it then survives a power cut, not only the death of the process.
        sum_threads: most threads that verify moved bytes. One keeps up with 15 to 20 GB/s; more
            help with bursts, and cost the processor more for each byte.
        prewrite: write new segments once before use, so that first writes run at full speed.
            Skipped while the budget has less than a whole segment left.
        bytes_per_day: most bytes of any kind written to all directories together, 0 for no bound.
            Over any span of time a debt of one segment may be added.
        carry_share: largest share of a segment that is carried over when it is reclaimed.
        quotas: part of each directory that each tenant may use, 0 to 1.
        slow_s: a request that takes longer makes the tier degraded.
        stuck_s: a request that takes longer is reported stuck.
        open_s: a directory that takes longer to open is not used.
    """

    places: tuple[SsdDirectorySpec, ...]
    segment_bytes: int = 0
    interface: str = "auto"
    depth: int = 32
    queue_reads: int = 4096
    queue_writes: int = 1024
    batch_blocks_max: int = 512
    request_bytes: int = 4608 << 10
    flush: bool = False
    sum_threads: int = 1
    prewrite: bool = False
    bytes_per_day: int = 0
    carry_share: float = 0.25
    quotas: dict[str, float] = field(default_factory=lambda: {"": 1.0})
    slow_s: float = 1.0
    stuck_s: float = 5.0
    open_s: float = 10.0

    def __post_init__(self) -> None:
        if len({place.path.resolve() for place in self.places}) != len(self.places):
            raise ValueError("a directory is named twice")

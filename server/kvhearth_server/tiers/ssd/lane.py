"""A directory as the log uses it, and the writing of pages that belong to no block."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvhearth_server.tiers.ssd.budget import Wear
from kvhearth_server.tiers.ssd.directory import Directory, Segment
from kvhearth_server.tiers.ssd.disk.base import Op
from kvhearth_server.tiers.ssd.driver import Driver
from kvhearth_server.tiers.ssd.format import PAGE_BYTES
from kvhearth_server.tiers.ssd.janitor import Janitor
from kvhearth_server.tiers.ssd.job import Job
from kvhearth_server.tiers.ssd.pages import Buffer

_READY_MAX = 4
_AHEAD_S = 10.0


@dataclass(eq=False)
class Lane:
    """A directory with its open segment and those that come after it.

    Attributes:
        ready: the next segments in their order, the first pages of some still being written.
        sealing: segments that are full but not wholly written.
        ahead, ahead_until: most of them lately, and until when that counts.
    """

    directory: Directory
    janitor: Janitor
    count_max: int
    carry_share: float
    open: Segment | None = None
    ready: deque[Segment] = field(default_factory=deque)
    sealing: int = 0
    ahead: int = 0
    ahead_until: float = 0.0
    retry_at: float = 0.0
    free: list[Segment] = field(default_factory=list)

    @property
    def carry_pages(self) -> int:
        """Pages of an open segment that are kept for what is carried over to it."""
        return int(self.directory.segment_bytes // PAGE_BYTES * self.carry_share)

    def closed(self, now: float) -> None:
        """A segment is full, and not wholly written yet."""
        self.sealing += 1
        if self.sealing >= self.ahead or now >= self.ahead_until:
            self.ahead, self.ahead_until = self.sealing, now + _AHEAD_S

    def ready_wanted(self, now: float) -> int:
        """How many segments should be ready: as many as places are given out ahead of the drive,
        and one. At most an eighth of the files, because they hold nothing.
        """
        ahead = self.ahead if now < self.ahead_until else self.sealing
        return max(1, min(1 + ahead, self.count_max // 8, _READY_MAX))

    def kept_pages(self, *, carried: bool) -> int:
        """Pages of the open segment that are not to be used for a block, carried or new."""
        return 0 if carried or self.ready else self.carry_pages

    @property
    def surplus(self) -> bool:
        """There are more files than there may be: the capacity was lowered."""
        return self.directory.writable and len(self.directory.segments) > self.count_max

    def starved(self, now: float) -> bool:
        """Too few segments are ready, and no more can be had but by reclaiming one."""
        if self.surplus and not self.janitor.busy:
            return True
        files = len(self.directory.segments)
        full = files >= self.count_max or now < self.retry_at
        ready = len(self.ready) + len(self.free)
        return ready < self.ready_wanted(now) and full and not self.janitor.busy


class PageWriter:
    """Writes first pages and footers of segments."""

    def __init__(self, driver: Driver, wear: Wear, clock: Callable[[], float]) -> None:
        self._driver, self._wear, self._clock = driver, wear, clock

    def write(
        self, segment: Segment, content: Buffer, offset: int, then: Callable[[Job], None]
    ) -> None:
        """Write whole pages at ``offset``; ``then`` is called with the request when it ended."""
        self._wear.wrote(len(content))
        pieces = ((content.address, len(content)),)
        job = Job(Op.WRITE, segment.fd, offset, pieces, len(content), (), then, content)
        # A segment's first page is waited for by all that is stored; its footer by nobody.
        job.urgent = offset == 0
        self._driver.submit([job])

    def note(self, directory: Directory, job: Job) -> None:
        """Tell the directory's health how a write went."""
        if job.good:
            directory.health.write_done()
        elif job.reason != "cancelled":
            directory.health.write_failed(job.reason, self._clock())

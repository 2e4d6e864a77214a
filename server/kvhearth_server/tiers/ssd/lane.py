"""A directory as the log uses it, and the writing of pages that belong to no block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from kvhearth_server.tiers.base import Counts
from kvhearth_server.tiers.ssd.directory import Directory, Segment
from kvhearth_server.tiers.ssd.disk.base import Op
from kvhearth_server.tiers.ssd.driver import Driver
from kvhearth_server.tiers.ssd.format import PAGE_BYTES
from kvhearth_server.tiers.ssd.janitor import Janitor
from kvhearth_server.tiers.ssd.job import Job
from kvhearth_server.tiers.ssd.pages import Buffer


@dataclass(eq=False)
class Lane:
    """A directory with its open segment and the next one."""

    directory: Directory
    janitor: Janitor
    count_max: int
    carry_share: float
    open: Segment | None = None
    next: Segment | None = None
    retry_at: float = 0.0
    free: list[Segment] = field(default_factory=list)

    @property
    def carry_pages(self) -> int:
        """Pages of an open segment that are kept for what is carried over to it."""
        return int(self.directory.segment_bytes // PAGE_BYTES * self.carry_share)

    @property
    def surplus(self) -> bool:
        """There are more files than there may be: the capacity was lowered."""
        return self.directory.writable and len(self.directory.segments) > self.count_max

    def starved(self, now: float) -> bool:
        """There is no next segment, and none can be had but by reclaiming one."""
        if self.surplus and not self.janitor.busy:
            return True
        files = len(self.directory.segments)
        full = files >= self.count_max or now < self.retry_at
        return self.next is None and not self.free and full and not self.janitor.busy


class PageWriter:
    """Writes first pages and footers of segments."""

    def __init__(self, driver: Driver, counts: Counts, clock: Callable[[], float]) -> None:
        self._driver, self._counts, self._clock = driver, counts, clock

    def write(
        self, segment: Segment, content: Buffer, offset: int, then: Callable[[Job], None]
    ) -> None:
        """Write whole pages at ``offset``; ``then`` is called with the request when it ended."""
        self._counts.add("written_bytes", len(content))
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

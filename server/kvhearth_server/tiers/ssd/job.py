"""One disk request with all that its driver must know of it."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field

from kvhearth_server.tiers.ssd.disk.base import Op

Check = tuple[memoryview, bytes]
"""Bytes, and the xxh3_128 they must have."""

_REASONS = {
    errno.ENOSPC: "no_space",
    errno.EDQUOT: "no_space",
    errno.EROFS: "read_only",
    errno.ECANCELED: "cancelled",
}


@dataclass(slots=True, eq=False)
class Group:
    """Jobs that were submitted together; ``left`` of them have not ended."""

    left: int


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way: the loop makes it, the driver fills in how it went.

    Attributes:
        op, fd, offset, pieces: as in ``Request``.
        length: bytes of all pieces.
        checks: verified when it has ended: so the drive has its next requests meanwhile, and of a
            write nothing is acknowledged that was not right after it.
        wrong: indices of checks that failed. Of a write, those records are in no footer, and a
            scan finds that their payload is not what their header says; of a read, their bytes are
            not to be used.
        then: what the loop calls when it has ended.
        keep: memory that must outlive it.
        sync: a write is done only when the file's data is flushed.
        urgent: goes before all that wait.
        cancelled: set by the loop; a job that has not begun then ends with ECANCELED.
        begun_at: by the driver's clock, 0 while it waits for its turn.
        error: errno, 0 for none.
        short: fewer bytes were moved than asked for.
        told_stuck: the loop has said that it is stuck.
        group: those it was submitted with; set by the driver.
    """

    op: Op
    fd: int
    offset: int
    pieces: tuple[tuple[int, int], ...]
    length: int
    checks: tuple[Check, ...]
    then: Callable[[Job], None]
    keep: object = None
    sync: bool = False
    urgent: bool = False
    cancelled: bool = False
    queued_at: float = 0.0
    begun_at: float = 0.0
    ended_at: float = 0.0
    error: int = 0
    short: bool = False
    told_stuck: bool = False
    group: Group | None = None
    wrong: list[int] = field(default_factory=list)

    @property
    def is_read(self) -> bool:
        """Whether it brings bytes."""
        return self.op is Op.READ

    @property
    def good(self) -> bool:
        """Whether the device did all of it; ``wrong`` is another matter."""
        return not self.error and not self.short

    @property
    def reason(self) -> str:
        """Why it is not good, in a word."""
        return "short" if self.short else _REASONS.get(self.error, "io")

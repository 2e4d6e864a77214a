"""Figures of tiers at one moment, for metrics and status pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvhearth_server.observability.timings import Histogram


@dataclass(frozen=True)
class DirectoryFigures:
    """Figures of one directory.

    Attributes:
        capacity_bytes: most bytes that it may use.
        file_bytes: length of its segment files, which are allocated in whole.
        segments: number of files by state.
        findings: current problems: a word of the tier's, and a sentence.
    """

    path: str
    capacity_bytes: int
    file_bytes: int
    segments: Mapping[str, int]
    findings: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class TenantFigures:
    """A tenant's use of a tier: the bytes of its segment files, and its quota."""

    tenant: str
    used_bytes: int
    quota_bytes: int


@dataclass(frozen=True)
class TierFigures:
    """Figures of a tier of files at one moment.

    Attributes:
        interface_broken: problem of the disk interface; empty for none.
        directories: all of them; those that could not be opened have no files.
        tenants: those that have a quota.
        blocks, live_bytes: loadable blocks and their payload.
        files_found, files_recovered: segment files at the start; those read back so far.
        locked_files: files that requests of a dead daemon may still hold.
        queued_reads, queued_writes: requests that wait or run.
        running_requests: requests in the kernel.
        read_latency_s, read_bytes_per_s: moving averages.
        budget_left_bytes: bytes that may be written now; None without a budget.
        counts: the tier's counters since the start, by name.
        io_seconds: time of requests in the kernel and on the drives, by direction: read, write.
    """

    interface: str
    interface_broken: str
    directories: list[DirectoryFigures]
    tenants: list[TenantFigures]
    blocks: int
    live_bytes: int
    recovering: bool
    files_found: int
    files_recovered: int
    locked_files: int
    queued_reads: int
    queued_writes: int
    running_requests: int
    read_latency_s: float
    read_bytes_per_s: float
    budget_left_bytes: int | None
    counts: Mapping[str, int]
    io_seconds: Mapping[str, Histogram] = field(default_factory=dict)

    @property
    def capacity_bytes(self) -> int:
        """Capacity of all directories together."""
        return sum(each.capacity_bytes for each in self.directories)

    @property
    def file_bytes(self) -> int:
        """Length of all directories' segment files."""
        return sum(each.file_bytes for each in self.directories)

    @property
    def reasons(self) -> list[str]:
        """All current problems, for people."""
        message = [sentence for each in self.directories for _, sentence in each.findings]
        return [*message, *filter(None, [self.interface_broken])]

    def count(self, name: str) -> int:
        """Return a counter of the tier; 0 where nothing was counted."""
        return self.counts.get(name, 0)


@dataclass(frozen=True)
class RemoteFigures:
    """Figures of a remote at one moment.

    Attributes:
        name: the remote's URL without secrets.
        problem: what does not work, as a sentence; empty for nothing.
        breaker_open: whether its breaker is open.
        mover_up: whether its helper process runs.
        mover_restarts: helper processes that were started again.
        staging_bytes, staging_free_bytes: size of the staging memory, and what of it is free.
        cache_entries, cache_entries_max: entries of the existence cache.
        asking: bisections under way.
        reading, writing: batches under way.
        round_trip_s, read_bytes_per_s: moving averages.
        counts: the tier's counters since the start, and the mover's as ``mover_NAME``.
        seconds: time of requests by kind.
    """

    name: str
    problem: str
    breaker_open: bool
    mover_up: bool
    mover_restarts: int
    staging_bytes: int
    staging_free_bytes: int
    cache_entries: int
    cache_entries_max: int
    asking: int
    reading: int
    writing: int
    round_trip_s: float
    read_bytes_per_s: float
    counts: Mapping[str, int]
    seconds: Mapping[str, float]

    def count(self, name: str) -> int:
        """Return a counter; 0 where nothing was counted."""
        return self.counts.get(name, 0)

"""The tier in numbers: what metrics, statistics and probes show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DirectoryFigures:
    """One directory.

    Attributes:
        capacity_bytes: most that it may take.
        file_bytes: length of its segment files, which are allocated in whole.
        segments: files by state.
        findings: what is not as it should be: a word of ``health.WORDS``, and a sentence.
    """

    path: str
    capacity_bytes: int
    file_bytes: int
    segments: Mapping[str, int]
    findings: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class SsdFigures:
    """One moment.

    Attributes:
        interface_broken: what is wrong with the driving of the disk, empty for nothing.
        directories: also those that could not be opened, with no files.
        blocks, live_bytes: what can be loaded, and its payload.
        files_found, files_recovered: segment files at the start; those that are read back.
        locked_files: files that requests of a dead daemon may still hold.
        queued_reads, queued_writes: requests that wait or run.
        running_requests: those in the kernel.
        read_latency_s, read_bytes_per_s: moving averages.
        budget_left_bytes: what may be written now; None without a budget.
        counts: the tier's counters since the start, by name.
    """

    interface: str
    interface_broken: str
    directories: list[DirectoryFigures]
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

    @property
    def capacity_bytes(self) -> int:
        """Of all directories together."""
        return sum(each.capacity_bytes for each in self.directories)

    @property
    def file_bytes(self) -> int:
        """Of all directories together."""
        return sum(each.file_bytes for each in self.directories)

    @property
    def reasons(self) -> list[str]:
        """Everything that is not as it should be, for people."""
        told = [sentence for each in self.directories for _, sentence in each.findings]
        return [*told, *filter(None, [self.interface_broken])]

    def count(self, name: str) -> int:
        """A counter of the tier; 0 where nothing was counted."""
        return self.counts.get(name, 0)

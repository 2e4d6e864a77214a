"""Figures of tiers at one moment, for metrics, ``/v1/stats`` and the verbs that read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from pydantic import Field

from kvhearth_server.observability.counters import Histogram

PROBLEMS = (
    *("buffered", "capped", "io", "no_descriptors", "no_space", "not_writable", "passed_over"),
    *("read_only", "short", "slow", "stuck", "unusable"),
)
"""Every problem that a directory can have, as one word each."""


@dataclass(frozen=True)
class DirectoryFigures:
    """One directory of the SSD tier."""

    path: str
    capacity_bytes: Annotated[int, Field(description="Most bytes that it may use.")]
    file_bytes: Annotated[int, Field(description="Size of its segment files.")]
    segments: Annotated[dict[str, int], Field(description="Segment files by state.")]
    problems: Annotated[list[str], Field(description="A word for each of the reasons.")]
    reasons: Annotated[list[str], Field(description="What is not as it should be.")]


@dataclass(frozen=True)
class TenantFigures:
    """A tenant's use of a tier: the bytes of its segment files, and its quota."""

    tenant: str
    used_bytes: int
    quota_bytes: int


@dataclass(frozen=True)
class TierFigures:
    """The SSD tier; counters since the start, by name."""

    interface: Annotated[str, Field(description="Kernel interface that disk I/O goes through.")]
    interface_broken: Annotated[str, Field(description="What is wrong with it; empty for nothing.")]
    directories: Annotated[
        list[DirectoryFigures],
        Field(description="Those that could not be opened have no files."),
    ]
    tenants: Annotated[list[TenantFigures], Field(description="Those that have a quota.")]
    blocks: Annotated[int, Field(description="What can be loaded.")]
    live_bytes: Annotated[int, Field(description="Payload of it.")]
    recovering: Annotated[bool, Field(description="The log of an earlier run is being read back.")]
    files_found: Annotated[int, Field(description="Segment files at the start.")]
    files_recovered: int
    locked_files: Annotated[
        int, Field(description="Files that requests of a dead daemon may still hold.")
    ]
    queued_reads: Annotated[int, Field(description="Requests that wait or run.")]
    queued_writes: int
    running_requests: Annotated[int, Field(description="Requests in the kernel.")]
    read_latency_s: Annotated[float, Field(description="Moving average.")]
    read_bytes_per_s: float
    budget_left_bytes: Annotated[
        int | None, Field(description="Of the daily budget; null without one.")
    ]
    counters: dict[str, int]
    demoting_blocks: Annotated[
        int, Field(description="They wait to be written, or are being written.")
    ] = 0
    promoting_blocks: Annotated[int, Field(description="They are being loaded.")] = 0
    io_seconds: Annotated[dict[str, Histogram], Field(exclude=True)] = field(default_factory=dict)
    """Time of requests in the kernel and on the drives, by direction: read, write."""
    promotion_seconds: Annotated[Histogram | None, Field(exclude=True)] = None
    """Times of batches of promotions, from their begin to their end."""

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
        found = [reason for each in self.directories for reason in each.reasons]
        return [*found, *filter(None, [self.interface_broken])]

    def count(self, name: str) -> int:
        """Return a counter of the tier; 0 where nothing was counted."""
        return self.counters.get(name, 0)


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
        cache_entries: entries of the existence cache.
        asking: bisections under way.
        reading, writing: batches under way.
        counters: the tier's counters since the start, and the mover's as ``mover_NAME``.
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
    asking: int
    reading: int
    writing: int
    counters: Mapping[str, int]
    seconds: Mapping[str, float]

    def count(self, name: str) -> int:
        """Return a counter; 0 where nothing was counted."""
        return self.counters.get(name, 0)

"""The documents that HTTP answers with; OpenAPI describes them."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class Version(BaseModel):
    """What runs here."""

    version: str
    protocol: int
    boot_id: str = Field(description="A new one for each start of the daemon.")


class SegmentStats(BaseModel):
    """The memory of one tenant, in bytes."""

    tenant: str
    page_kind: str
    page_bytes: int
    capacity_bytes: int
    reserved_bytes: int
    committed_bytes: int
    evictable_bytes: int
    quarantined_bytes: int
    free_bytes: int
    unassigned_bytes: int
    largest_free_bytes: int


class SsdDirectory(BaseModel):
    """One directory of the SSD tier."""

    path: str
    capacity_bytes: int
    file_bytes: int = Field(description="Size of its segment files.")
    segments: dict[str, int] = Field(description="Segment files by state.")
    reasons: list[str] = Field(description="What is not as it should be.")


class SsdStats(BaseModel):
    """The SSD tier; counters since the start, by name."""

    interface: str = Field(description="Kernel interface that disk I/O goes through.")
    interface_broken: str = Field(description="What is wrong with it; empty for nothing.")
    directories: list[SsdDirectory]
    blocks: int = Field(description="What can be loaded.")
    live_bytes: int = Field(description="Payload of it.")
    recovering: bool = Field(description="The log of an earlier run is being read back.")
    files_found: int
    files_recovered: int
    demoting_blocks: int = Field(description="They wait to be written, or are being written.")
    promoting_blocks: int = Field(description="They are being loaded.")
    queued_reads: int
    queued_writes: int
    read_latency_s: float
    read_bytes_per_s: float
    budget_left_bytes: int | None = Field(description="Of the daily budget; null without one.")
    counters: dict[str, int]


class Stats(BaseModel):
    """The daemon in numbers; counters since its start, by name."""

    version: str
    boot_id: str
    uptime_s: float
    draining: bool
    blocks: int
    leases: int
    oldest_lease_s: float
    pins: int
    sessions: int
    sessions_leaving: int
    groups: int
    namespaces: int
    adopt_s: float
    segments: list[SegmentStats]
    ssd: SsdStats | None = Field(description="Null without an SSD tier.")
    counters: dict[str, int]
    client_counters: dict[str, int] = Field(description="What clients told, summed.")


class Session(BaseModel):
    """One process that is attached, or left and may still be writing."""

    session: int
    tenant: str
    engine_id: str
    incarnation: int
    scheduler: bool
    rank: int = Field(description="-1 for a process that moves no bytes.")
    world_size: int
    pid: int = Field(description="0 where the kernel does not tell.")
    namespace: str
    state: str


class Sessions(BaseModel):
    """All of them."""

    boot_id: str
    sessions: list[Session]


class Namespace(BaseModel):
    """One tenant's contract, and what is stored under it."""

    namespace: str = Field(description="Digest, 64 hex digits.")
    tenant: str
    contract: dict[str, Any]
    epoch: int
    blocks: int
    used_bytes: int
    quota_bytes: int | None


class Namespaces(BaseModel):
    """All of them."""

    boot_id: str
    namespaces: list[Namespace]


class LeaseHolder(BaseModel):
    """What one group's readers hold; slots and bytes count once for each lease on them."""

    tenant: str
    engine_id: str
    incarnation: int
    namespace: str
    leases: int
    slots: int
    bytes: int
    oldest_s: float


class Leases(BaseModel):
    """Groups that hold leases, the one with the oldest first."""

    boot_id: str
    groups: list[LeaseHolder]


class Config(BaseModel):
    """The settings in effect; secrets are masked."""

    boot_id: str
    settings: dict[str, Any]


class EvictRequest(BaseModel, extra="forbid"):
    """How much to keep."""

    keep_bytes: int = Field(0, ge=0, le=2**63 - 1, description="Keep this many bytes at most.")
    tier: Literal["memory", "ssd", "all"] | None = Field(
        None,
        description="Where; ssd and all need keep_bytes 0. Default: all if that is 0, else memory.",
    )


class Evicted(BaseModel):
    """What was removed."""

    boot_id: str
    evicted_blocks: int = Field(description="From memory.")
    ssd_blocks: int = Field(description="From SSD.")


class BumpRequest(BaseModel, extra="forbid"):
    """Which epoch is meant."""

    expected_epoch: int | None = Field(
        None, ge=1, le=2**63 - 1, description="Refuse unless this is the current one."
    )


class Bumped(BaseModel):
    """The epoch from now on."""

    boot_id: str
    epoch: int


class Drained(BaseModel):
    """No stores and attaches are taken any more."""

    boot_id: str
    draining: bool


class Books(BaseModel):
    """Whether a recount of everything agrees with the books."""

    boot_id: str
    balanced: bool
    error: str = Field(description="What disagrees, with both numbers; empty if nothing does.")

"""Documents of the HTTP answers, as OpenAPI describes them."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import traceback
from asyncio import all_tasks
from typing import Any, Literal

from pydantic import BaseModel, Field

from kvhearth.version import PROTOCOL_VERSION, __version__
from kvhearth_server.config.load import Settings
from kvhearth_server.core.inspection import held_by_groups
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.snapshot import SsdNow, take_snapshot
from kvhearth_server.tiers.ssd.stats import SsdFigures


class Version(BaseModel):
    """Versions of the running daemon."""

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
    """Statistics of the daemon; counters since its start, by name."""

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
    """All sessions."""

    boot_id: str
    sessions: list[Session]


class Namespace(BaseModel):
    """One tenant's contract, and the blocks stored under it."""

    namespace: str = Field(description="Digest, 64 hex digits.")
    tenant: str
    contract: dict[str, Any]
    epoch: int
    blocks: int
    used_bytes: int
    quota_bytes: int | None


class Namespaces(BaseModel):
    """All namespaces."""

    boot_id: str
    namespaces: list[Namespace]


class LeaseHolder(BaseModel):
    """Leases of one group's readers; slots and bytes count once for each lease on them."""

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
    """Size to keep, and where to evict."""

    keep_bytes: int = Field(0, ge=0, le=2**63 - 1, description="Keep this many bytes at most.")
    tier: Literal["memory", "ssd", "all"] | None = Field(
        None,
        description="Where; ssd and all need keep_bytes 0. Default: all if that is 0, else memory.",
    )


class Evicted(BaseModel):
    """Blocks that were removed."""

    boot_id: str
    evicted_blocks: int = Field(description="From memory.")
    ssd_blocks: int = Field(description="From SSD.")


class BumpRequest(BaseModel, extra="forbid"):
    """The weights epoch that is expected."""

    expected_epoch: int | None = Field(
        None, ge=1, le=2**63 - 1, description="Refuse unless this is the current one."
    )


class Bumped(BaseModel):
    """The weights epoch from now on."""

    boot_id: str
    epoch: int


class Drained(BaseModel):
    """The daemon accepts no more stores and attaches."""

    boot_id: str
    draining: bool


class Books(BaseModel):
    """Whether a recount of everything agrees with the books."""

    boot_id: str
    balanced: bool
    error: str = Field(description="What disagrees, with both numbers; empty if nothing does.")


_OF_TIER = {each.name for each in dataclasses.fields(SsdFigures)} - {"directories", "counts"}
_SECRET = re.compile(r"token|secret|password|credential|(^|_)key$")
_MASK = "***"


def version(engine: Engine) -> Version:
    """Return the versions of the running daemon."""
    return Version(version=__version__, protocol=PROTOCOL_VERSION, boot_id=engine.boot_id)


def stats(engine: Engine) -> Stats:
    """Return statistics of the daemon."""
    now = take_snapshot(engine)
    return Stats(
        version=now.version,
        boot_id=now.boot_id,
        uptime_s=now.uptime_s,
        draining=now.draining,
        blocks=now.blocks,
        leases=now.leases,
        oldest_lease_s=now.oldest_lease_s,
        pins=now.pins,
        sessions=now.sessions,
        sessions_leaving=now.sessions_leaving,
        groups=now.groups,
        namespaces=now.namespace_count,
        adopt_s=now.adopt_s,
        segments=[SegmentStats(**dataclasses.asdict(each)) for each in now.segments],
        ssd=_ssd(now.ssd),
        counters=engine.counters.snapshot(),
        client_counters=dict(now.reported),
    )


def _ssd(now: SsdNow | None) -> SsdStats | None:
    if now is None:
        return None
    values = {name: getattr(now.tier, name) for name in _OF_TIER}
    directories = [
        SsdDirectory(
            path=each.path,
            capacity_bytes=each.capacity_bytes,
            file_bytes=each.file_bytes,
            segments=dict(each.segments),
            reasons=[told for _, told in each.findings],
        )
        for each in now.tier.directories
    ]
    return SsdStats(
        **values,
        directories=directories,
        demoting_blocks=now.demoting_blocks,
        promoting_blocks=now.promoting_blocks,
        counters=dict(now.tier.counts),
    )


def sessions(engine: Engine) -> Sessions:
    """Return every member of every group."""
    state = engine.core.state
    digests = _digests(engine)
    found = []
    for group in state.groups:
        for member in group.members.values():
            record = engine.sessions.find(member.session)
            found.append(
                Session(
                    session=member.session,
                    tenant=group.tenant,
                    engine_id=group.engine_id,
                    incarnation=group.incarnation,
                    scheduler=member.scheduler,
                    rank=member.rank,
                    world_size=group.world_size,
                    pid=record.peer.pid if record else 0,
                    namespace=digests.get(group.namespace, ""),
                    state=str(member.state),
                )
            )
    return Sessions(boot_id=engine.boot_id, sessions=found)


def namespaces(engine: Engine) -> Namespaces:
    """Return every namespace with its contract."""
    found = [
        Namespace(
            namespace=space.digest.hex(),
            tenant=space.tenant,
            contract=json.loads(space.contract.to_json()),
            epoch=space.epoch,
            blocks=space.blocks,
            used_bytes=space.used_bytes,
            quota_bytes=space.quota_bytes,
        )
        for space in engine.core.state.namespaces
    ]
    return Namespaces(boot_id=engine.boot_id, namespaces=found)


def leases(engine: Engine) -> Leases:
    """Return the leases that each group's readers hold."""
    digests = _digests(engine)
    found = [
        LeaseHolder(
            tenant=held.group.tenant,
            engine_id=held.group.engine_id,
            incarnation=held.group.incarnation,
            namespace=digests.get(held.group.namespace, ""),
            leases=held.leases,
            slots=held.slots,
            bytes=held.bytes,
            oldest_s=held.oldest_s,
        )
        for held in held_by_groups(engine.core.state, engine.now())
    ]
    return Leases(boot_id=engine.boot_id, groups=found)


def masked(settings: Settings) -> dict[str, Any]:
    """Return the settings as JSON, with values of secret-like names left out."""
    values = settings.model_dump(mode="json")
    return {
        name: _MASK if value and _SECRET.search(name) else value for name, value in values.items()
    }


def stacks() -> str:
    """Return the current stack of every thread and of every task of the loop."""
    parts = []
    for number, frame in sys._current_frames().items():
        parts.append(f"thread {number}\n" + "".join(traceback.format_stack(frame)))
    for task in sorted(all_tasks(), key=lambda task: task.get_name()):
        frames = "".join(
            "".join(traceback.format_stack(frame, limit=1)) for frame in task.get_stack()
        )
        parts.append(f"task {task.get_name()}\n{frames}")
    return "\n".join(parts)


def _digests(engine: Engine) -> dict[int, str]:
    return {space.number: space.digest.hex() for space in engine.core.state.namespaces}

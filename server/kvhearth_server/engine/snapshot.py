"""What the daemon is like now, in numbers; taking it costs the same whatever the cache holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvhearth.version import __version__
from kvhearth_server.engine.engine import Engine
from kvhearth_server.observability.timings import CallTimings, Histogram
from kvhearth_server.tiers.ssd.figures import SsdFigures

NAMESPACES_SHOWN_MAX = 32
"""Most namespaces that are told apart; the others are one together."""

OTHER = "other"


@dataclass(frozen=True)
class SegmentNow:
    """One tenant's memory. ``free_bytes`` of it nobody uses; ``evictable_bytes`` hold blocks that
    nobody leases or pins; no slot size has ``unassigned_bytes`` yet.
    """

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


@dataclass(frozen=True)
class NamespaceNow:
    """One namespace by the first digits of its digest, or all others together."""

    name: str
    blocks: int
    used_bytes: int


@dataclass(frozen=True)
class SsdNow:
    """The SSD tier.

    Attributes:
        tier: what it says of itself.
        demoting_blocks: those that wait to be written, or are being written.
        promoting_blocks: those that are being loaded.
    """

    tier: SsdFigures
    demoting_blocks: int
    promoting_blocks: int


@dataclass(frozen=True)
class Snapshot:
    """One moment. ``ssd`` is None without such a tier. The last five are the daemon's own objects,
    to be read at once.
    """

    version: str
    boot_id: str
    uptime_s: float
    draining: bool
    segments: list[SegmentNow]
    namespaces: list[NamespaceNow]
    namespace_count: int
    blocks: int
    leases: int
    oldest_lease_s: float
    pins: int
    sessions: int
    sessions_leaving: int
    groups: int
    verifying_blocks: int
    adopt_s: float
    ssd: SsdNow | None
    scrub_progress: Mapping[str, float]
    counts: Mapping[tuple[str, str], int]
    reported: Mapping[str, int]
    timings: CallTimings
    eviction_ages: Histogram

    def count(self, name: str) -> int:
        """One counter, all its label values together."""
        return sum(count for (each, _), count in self.counts.items() if each == name)


def take_snapshot(engine: Engine) -> Snapshot:
    """The engine now; call on its loop."""
    state, now = engine.core.state, engine.now()
    groups = list(state.groups)
    # Leases are in the order in which they were granted.
    oldest = [next(iter(group.leased_at.values())) for group in groups if group.leased_at]
    attached = state.groups.sessions
    return Snapshot(
        version=__version__,
        boot_id=engine.boot_id,
        uptime_s=now - engine.started_at,
        draining=engine.draining,
        segments=_segments(engine),
        namespaces=_namespaces(engine),
        namespace_count=len(state.namespaces),
        blocks=len(state.index),
        leases=sum(len(group.leases) for group in groups),
        oldest_lease_s=max(0.0, now - min(oldest)) if oldest else 0.0,
        pins=len(engine.core.pinning),
        sessions=attached,
        sessions_leaving=len(engine.sessions) - attached,
        groups=len(groups),
        verifying_blocks=sum(len(heads) for heads, _ in engine.to_verify),
        adopt_s=engine.adopt_s,
        ssd=take_ssd(engine),
        scrub_progress=engine.scrub_progress,
        counts=engine.counters.values(),
        reported=engine.reported.totals,
        timings=engine.timings,
        eviction_ages=engine.eviction_ages,
    )


def take_ssd(engine: Engine) -> SsdNow | None:
    """The SSD tier now; call on the loop."""
    if engine.tier is None:
        return None
    tiering = engine.tiering
    writing, rising = (tiering.writing, tiering.rising) if tiering is not None else (0, 0)
    return SsdNow(engine.tier.status.figures(), writing, rising)


def _segments(engine: Engine) -> list[SegmentNow]:
    state = engine.core.state
    geometry = state.table.geometry
    return [
        SegmentNow(
            tenant=shape.tenant,
            page_kind=str(mapped.page_kind),
            page_bytes=mapped.page_bytes,
            capacity_bytes=books.capacity,
            reserved_bytes=books.reserved,
            committed_bytes=books.committed,
            evictable_bytes=books.committed - books.held,
            quarantined_bytes=books.quarantined,
            free_bytes=books.free,
            unassigned_bytes=pool.unassigned_count * geometry.slab_bytes,
            largest_free_bytes=pool.largest_free_bytes,
        )
        for shape, books, pool, mapped in zip(
            geometry.segments,
            state.ledger.segments,
            state.pools,
            engine.arena.segments,
            strict=True,
        )
    ]


def _namespaces(engine: Engine) -> list[NamespaceNow]:
    """The oldest ones by name, so that none changes between its own name and the others'."""
    spaces = sorted(engine.core.state.namespaces, key=lambda space: space.number)
    shown, others = spaces[:NAMESPACES_SHOWN_MAX], spaces[NAMESPACES_SHOWN_MAX:]
    found = [NamespaceNow(s.digest.hex()[:12], s.blocks, s.used_bytes) for s in shown]
    if others:
        blocks, used = sum(s.blocks for s in others), sum(s.used_bytes for s in others)
        found.append(NamespaceNow(OTHER, blocks, used))
    return found

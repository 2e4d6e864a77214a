"""What operators read of the daemon at one moment: the object of ``/v1/stats``, of the page and of
the command line, and what only metrics show.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, TypeAdapter

from kvhearth.version import __version__
from kvhearth_server.core.groups import Group
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.miss_ratio import Curve
from kvhearth_server.engine.namespace_series import NAMESPACE_DIGITS, OTHER, NamespaceNow
from kvhearth_server.engine.watch import Event
from kvhearth_server.observability.counters import FALLBACK, CallTimings, Histogram
from kvhearth_server.tiers.figures import RemoteFigures, TierFigures

ENGINES_SHOWN_MAX = 64
"""Upper bound on engines listed separately; the others are summed up as one."""


@dataclass(frozen=True)
class SegmentNow:
    """The memory of one tenant, in bytes."""

    tenant: str
    page_kind: str
    page_bytes: int
    populated_bytes: Annotated[int, Field(description="They have pages.")]
    huge_bytes: Annotated[int, Field(description="In huge pages, once all have pages.")]
    capacity_bytes: Annotated[int, Field(description="Less where memory was given up.")]
    reserved_bytes: int
    committed_bytes: int
    evictable_bytes: Annotated[
        int, Field(description="Blocks without a lease; the pinned ones go last.")
    ]
    pinned_bytes: Annotated[int, Field(description="Blocks that pins keep.")]
    quarantined_bytes: int
    free_bytes: Annotated[int, Field(description="Unused.")]
    unassigned_bytes: Annotated[int, Field(description="They have no slot size yet.")]
    largest_free_bytes: int

    @property
    def held_bytes(self) -> int:
        """Return the bytes of blocks with a lease."""
        return self.committed_bytes - self.evictable_bytes


@dataclass(frozen=True)
class EngineNow:
    """One engine, or all engines beyond ``ENGINES_SHOWN_MAX`` together.

    Attributes:
        namespace: first digits of its namespace's digest.
        ranks, world_size: attached ranks, and those that the contract asks for.
        leases, oldest_lease_s: leases that its readers hold, and the age of the oldest.
        reserved_bytes, quarantined_bytes: memory that it may write, and that it may still write
            although it left.
        heartbeat_age_s: time since the last heartbeat of the process that is silent for longest.
        load_bytes, store_bytes, fallbacks: as its attached processes report them, since they began.
        asked_tokens, hit_tokens: tokens that its lookups named, and that memory could restore.
    """

    engine_id: str
    tenant: str
    namespace: str = ""
    incarnation: int = 0
    ranks: int = 0
    world_size: int = 0
    attached: int = 0
    leases: int = 0
    oldest_lease_s: float = 0.0
    reserved_bytes: int = 0
    quarantined_bytes: int = 0
    heartbeat_age_s: float = 0.0
    load_bytes: int = 0
    store_bytes: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    fallbacks: int = 0


@dataclass(frozen=True)
class Stats:
    """Statistics of the daemon; counters since its start, by name."""

    version: str
    boot_id: str
    uptime_s: float
    draining: bool
    blocks: int
    leases: int
    oldest_lease_s: float
    pins: int
    retained_blocks: Annotated[int, Field(description="Blocks that pins keep from eviction.")]
    sessions: int
    sessions_leaving: int
    groups: int
    namespaces: int
    adopt_s: float
    segments: list[SegmentNow]
    ssd: Annotated[TierFigures | None, Field(description="Null without an SSD tier.")]
    counters: dict[str, int]
    client_counters: Annotated[dict[str, int], Field(description="What clients told, summed.")]
    busiest_namespaces: Annotated[
        list[NamespaceNow], Field(description="At most 32 by name, all others together as other.")
    ]
    engines: Annotated[
        list[EngineNow], Field(description="At most 64 by name, all others together as other.")
    ]
    recent: Annotated[list[Event], Field(description="What happened last, the oldest first.")]
    rates: Annotated[
        dict[str, float], Field(description="Rises of counters per second, in the last second.")
    ]
    curves: Annotated[
        list[Curve], Field(description="Hit ratios that other capacities would have.")
    ]


@dataclass(frozen=True)
class Snapshot(Stats):
    """Statistics, and what only metrics show. ``counts``, ``timings`` and ``eviction_ages`` are the
    daemon's own objects, to be read at once.
    """

    doors_shut: int
    counts: Mapping[str, Mapping[str, int]]
    timings: CallTimings
    eviction_ages: Histogram
    remote: RemoteFigures | None
    publishing_blocks: int

    def count(self, name: str) -> int:
        """Return one counter, summed over its label values."""
        return sum(self.counts[name].values())


_STATS = TypeAdapter(Stats)


def as_json(now: Stats) -> bytes:
    """Return statistics as JSON, without what only metrics show."""
    return _STATS.dump_json(now)


def take_snapshot(engine: Engine) -> Snapshot:
    """Take a snapshot of the engine; call on its loop."""
    state, now = engine.core.state, engine.now()
    groups = list(state.groups)
    attached, tiering = state.groups.sessions, engine.tiering
    return Snapshot(
        version=__version__,
        boot_id=engine.boot_id,
        uptime_s=now - engine.started_at,
        draining=engine.draining,
        doors_shut=len(engine.doors_shut),
        segments=_segments(engine),
        busiest_namespaces=engine.watch.namespaces.look(state.namespaces),
        namespaces=len(state.namespaces),
        blocks=len(state.index),
        leases=sum(len(group.leases) for group in groups),
        oldest_lease_s=_oldest_lease_s(groups, now),
        pins=len(engine.core.pinning),
        retained_blocks=state.retained_blocks,
        sessions=attached,
        sessions_leaving=len(engine.sessions) - attached,
        groups=len(groups),
        adopt_s=engine.adopt_s,
        ssd=None if tiering is None else tiering.figures(),
        counters=engine.counters.snapshot(),
        counts=engine.counters.values(),
        client_counters=dict(engine.reported.totals),
        timings=engine.timings,
        eviction_ages=engine.eviction_ages,
        engines=_engines(engine),
        recent=engine.watch.events(),
        rates=engine.watch.rates(),
        curves=engine.miss_ratios.curves(),
        remote=next(filter(None, (tier.remote_figures() for tier in engine.tiers)), None),
        publishing_blocks=engine.core.publishing.waiting,
    )


def _segments(engine: Engine) -> list[SegmentNow]:
    state = engine.core.state
    geometry = state.table.geometry
    return [
        SegmentNow(
            tenant=shape.tenant,
            page_kind=str(mapped.page_kind),
            page_bytes=mapped.page_bytes,
            populated_bytes=engine.arena.populator.populated_in(segment),
            huge_bytes=mapped.huge_bytes,
            capacity_bytes=books.capacity,
            reserved_bytes=books.reserved,
            committed_bytes=books.committed,
            evictable_bytes=books.committed - books.held,
            pinned_bytes=books.pinned,
            quarantined_bytes=books.quarantined,
            free_bytes=books.free,
            unassigned_bytes=pool.unassigned_count * geometry.slab_bytes,
            largest_free_bytes=pool.largest_free_bytes,
        )
        for segment, shape, books, pool, mapped in zip(
            range(len(geometry.segments)),
            geometry.segments,
            state.books,
            state.pools,
            engine.arena.segments,
            strict=True,
        )
    ]


def _engines(engine: Engine) -> list[EngineNow]:
    """Return the oldest engines by name and the rest as one; incarnations of one engine are one."""
    found = dict[tuple[str, str], list[Group]]()
    for group in sorted(engine.core.state.groups, key=lambda group: group.number):
        place = (group.tenant, group.engine_id)
        if place not in found and len(found) >= ENGINES_SHOWN_MAX:
            place = ("", OTHER)
        found.setdefault(place, []).append(group)
    return [_engine(engine, groups, *place) for place, groups in found.items()]


def _engine(engine: Engine, groups: list[Group], tenant: str, name: str) -> EngineNow:
    """Return groups as one engine: sums of what they hold, the worst of their ages."""
    attached, now, last = [group.attached for group in groups], engine.now(), groups[-1]
    sessions = [member.session for members in attached for member in members]
    records = [engine.sessions.find(session) for session in sessions]
    sums = collections.Counter[str]()
    for session in sessions:
        for counter, value in engine.reported.of(session).items():
            sums["fallbacks" if counter.startswith(FALLBACK) else counter] += value
    space = engine.core.state.namespaces.find_number(last.namespace)
    return EngineNow(
        engine_id=name,
        tenant=tenant,
        namespace="" if space is None else space.digest.hex()[:NAMESPACE_DIGITS],
        incarnation=max(group.incarnation for group in groups),
        ranks=sum(len({m.rank for m in members if m.rank >= 0}) for members in attached),
        world_size=last.world_size,
        attached=len(sessions),
        leases=sum(len(group.leases) for group in groups),
        oldest_lease_s=_oldest_lease_s(groups, now),
        reserved_bytes=sum(group.stock_bytes for group in groups),
        quarantined_bytes=sum(group.quarantined_bytes for group in groups),
        heartbeat_age_s=max((now - each.heard_at for each in records if each), default=0.0),
        load_bytes=sums["load_bytes"],
        store_bytes=sums["store_bytes"],
        asked_tokens=sum(group.asked_tokens for group in groups),
        hit_tokens=sum(group.hit_tokens for group in groups),
        fallbacks=sums["fallbacks"],
    )


def _oldest_lease_s(groups: list[Group], now: float) -> float:
    # A group's leases are in the order in which they were granted.
    oldest = [next(iter(group.leased_at.values())) for group in groups if group.leased_at]
    return max(0.0, now - min(oldest)) if oldest else 0.0

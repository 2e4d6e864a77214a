"""Constant-time snapshot of the daemon's state, for metrics and status pages; and the operators'
long work (evict, forget, check) in portions, so that the loop serves requests in between.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvhearth.errors import KVHearthError, Reason
from kvhearth.version import __version__
from kvhearth_server.core.check_books import BooksError
from kvhearth_server.core.groups import Group
from kvhearth_server.core.shares import Share
from kvhearth_server.core.state import require
from kvhearth_server.engine.engine import Engine
from kvhearth_server.engine.miss_ratio import Curve
from kvhearth_server.engine.namespace_series import OTHER, NamespaceNow
from kvhearth_server.observability.counters import FALLBACK
from kvhearth_server.observability.timings import CallTimings, Histogram
from kvhearth_server.tiers.figures import RemoteFigures, TierFigures

EVICTED_MAX = 128
"""Blocks of one portion; each takes some 10 microseconds."""
COPIES_MAX = 128
"""Copies on SSD of one portion; each costs some microseconds in three indexes."""
WRITTEN_S = 2.0
"""Longest wait for blocks that are being written; they are held, so nothing can evict them."""
_LOOK_S = 0.005

Where = Literal["memory", "ssd", "all"]


@dataclass(frozen=True)
class Removed:
    """Numbers of blocks that an operator's eviction removed, by tier."""

    memory: int = 0
    ssd: int = 0


async def check_books(engine: Engine) -> str:
    """Recount everything; return the disagreement found, or an empty string."""
    try:
        for _ in engine.core.book_portions():
            await asyncio.sleep(0)
    except BooksError as error:
        return str(error)
    return ""


async def evict(
    engine: Engine, digest: bytes, keep_bytes: int, where: Where | None = None
) -> Removed:
    """Remove a namespace's blocks, coldest first, until it uses ``keep_bytes`` at most.

    Leased and pinned blocks stay. Blocks removed from SSD stay removed across restarts.

    Args:
        where: by default everywhere if ``keep_bytes`` is 0, else in memory.

    Raises:
        KVHearthError: ``unknown_namespace``; ``bad_message`` if SSD is to keep some blocks;
            ``ssd_unusable`` if no drive records the removal.
    """
    namespace = engine.core.named(digest)
    where = where or ("memory" if keep_bytes else "all")
    require(
        where == "memory" or not keep_bytes,
        Reason.BAD_MESSAGE,
        "the SSD tier has no order of coldness: keep 0 bytes there, or evict from memory only",
    )
    memory = await _evict_memory(engine, digest, keep_bytes) if where != "ssd" else 0
    if where == "memory" or engine.tiering is None:
        return Removed(memory)
    if where == "all":
        end = engine.now() + WRITTEN_S
        while engine.core.writeback.writes(namespace) and engine.now() < end:
            await asyncio.sleep(_LOOK_S)
            memory += await _evict_memory(engine, digest, keep_bytes)
    return Removed(memory, await _drop_copies(engine, digest))


async def _drop_copies(engine: Engine, digest: bytes) -> int:
    """Drop a namespace's copies on SSD in portions; return how many there were."""
    tiering, namespace = engine.tiering, engine.core.state.namespaces.find(digest)
    if tiering is None or namespace is None:
        return 0  # empty and unused, the namespace made place for another one meanwhile
    name = tiering.name(namespace)
    engine.call(engine.core.drop_copies, digest)
    dropped = 0
    while engine.core.state.namespaces.find(digest) is namespace:
        gone = tiering.forget_copies(namespace, name, COPIES_MAX)
        if not gone:
            break
        dropped += gone
        await asyncio.sleep(0)
    await engine.catalogue.written()
    await engine.ssd_catalogue.confirm()
    return dropped


async def forget(
    engine: Engine, digest: bytes, expected: int | None, label: str | None = None
) -> int:
    """Invalidate all blocks of a namespace at once because its weights have changed; return the new
    weights epoch.

    Args:
        expected: refuse unless this is the current epoch; None accepts any.
        label: as for ``Core.bump_epoch``.

    Raises:
        KVHearthError: ``unknown_namespace``, ``stale_epoch``; ``ssd_unusable`` if no drive records
            the new epoch, which still holds until a restart.
    """
    epoch = engine.call(engine.core.bump_namespace, digest, expected, label)
    await engine.catalogue.written()
    if engine.ssd_catalogue.paths:
        await engine.ssd_catalogue.confirm()
    return epoch


async def _evict_memory(engine: Engine, digest: bytes, keep_bytes: int) -> int:
    """Evict in portions as ``Core.evict`` does, but no more blocks than the namespace had at the
    start: stores that arrive meanwhile do not keep it going.
    """
    namespace = engine.core.state.namespaces.find(digest)
    left = namespace.blocks if namespace else 0
    evicted = 0
    while left > 0:
        portion = min(left, EVICTED_MAX)
        try:
            gone = engine.call(engine.core.evict, digest, keep_bytes, portion)
        except KVHearthError as error:
            # Empty and unused, it may have made place for another one since the last portion.
            if error.reason is Reason.UNKNOWN_NAMESPACE and evicted:
                break
            raise
        evicted += gone
        left -= max(gone, 1)
        if left <= 0 or (gone < portion and not engine.core.evictor.cut_short):
            break  # at once: the rest was held, and a look now shows by which engines
        await asyncio.sleep(0)
    return evicted


ENGINES_SHOWN_MAX = 64
"""Upper bound on engines listed separately; the others are summed up as one."""


@dataclass(frozen=True)
class SegmentNow:
    """One tenant's memory.

    ``populated_bytes`` have pages, ``huge_bytes`` are in huge pages of any kind once all have;
    ``capacity_bytes`` can be used, less where memory was given up; ``free_bytes`` are unused;
    ``evictable_bytes`` hold blocks without lease or pin; ``unassigned_bytes`` have no slot size.
    """

    tenant: str
    page_kind: str
    page_bytes: int
    populated_bytes: int
    huge_bytes: int
    capacity_bytes: int
    reserved_bytes: int
    committed_bytes: int
    evictable_bytes: int
    quarantined_bytes: int
    free_bytes: int
    unassigned_bytes: int
    largest_free_bytes: int


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
class ShareNow:
    """A tenant's part of a resource, in the resource's units.

    ``room`` is what the tenant could still take now, as far as its share is concerned.
    """

    tenant: str
    share: str
    used: int
    floor: int
    cap: int
    room: int
    refused: int


@dataclass(frozen=True)
class SsdNow:
    """The SSD tier.

    Attributes:
        tier: figures that the tier reports.
        demoting_blocks: blocks that are queued or being written.
        promoting_blocks: blocks that are being loaded.
        promotion_seconds: times of batches of promotions, or None.
    """

    tier: TierFigures
    demoting_blocks: int
    promoting_blocks: int
    promotion_seconds: Histogram | None = None


@dataclass(frozen=True)
class Snapshot:
    """State of the daemon at one moment. ``ssd`` is None without such a tier; ``publishing_blocks``
    wait to be published to ``remotes``. The five fields
    before ``shares`` are the daemon's own objects, to be read at once.
    """

    version: str
    boot_id: str
    uptime_s: float
    draining: bool
    doors_shut: int
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
    shares: Sequence[ShareNow] = ()
    engines: Sequence[EngineNow] = ()
    curves: Sequence[Curve] = ()
    remotes: Sequence[RemoteFigures] = ()
    publishing_blocks: int = 0

    def count(self, name: str) -> int:
        """Return one counter, summed over its label values."""
        return sum(self.labelled(name).values())

    def labelled(self, name: str) -> Mapping[str, int]:
        """Return one counter by its label's values, "" for a counter without a label."""
        return self._by_name.get(name, {})

    @functools.cached_property
    def _by_name(self) -> dict[str, dict[str, int]]:
        found: dict[str, dict[str, int]] = {}
        for (name, label), count in self.counts.items():
            found.setdefault(name, {})[label] = count
        return found


def take_snapshot(engine: Engine) -> Snapshot:
    """Take a snapshot of the engine; call on its loop."""
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
        doors_shut=len(engine.doors_shut),
        segments=_segments(engine),
        namespaces=engine.watch.namespaces.look(state.namespaces),
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
        shares=take_shares(engine),
        engines=_engines(engine),
        curves=engine.miss_ratios.curves(),
        remotes=() if engine.tiering is None else engine.tiering.tier.remote_figures(),
        publishing_blocks=engine.core.publishing.waiting,
    )


def take_shares(engine: Engine) -> list[ShareNow]:
    """Return each tenant's part of each resource; call on the loop."""
    state = engine.core.state
    shares, found = state.shares, list[ShareNow]()
    for tenant in shares.tenants:
        books = state.ledger.segments[state.segment_of[tenant]]
        for share, account in shares.accounts.items():
            numbers = account.used(tenant), account.floor(tenant), account.cap(tenant)
            found.append(_share(engine, tenant, share, *numbers, account.room(tenant)))
        most, floor = books.leases_max, shares.leases_floor(tenant)
        found.append(
            _share(engine, tenant, Share.LEASES, books.leases, floor, most, most - books.leases)
        )
        cap = shares.part(tenant, Share.RESERVED).cap * state.limits.held_fraction_max
        most = int(books.capacity * cap)
        room = most - books.reserved - books.quarantined
        found.append(_share(engine, tenant, Share.RESERVED, books.reserved, 0, most, room))
    return found + _ssd_shares(engine)


def _ssd_shares(engine: Engine) -> list[ShareNow]:
    """Return each tenant's part of the SSD tier and, if there is a write budget, of that."""
    if engine.tiering is None:
        return []
    found = list[ShareNow]()
    uses = engine.tiering.tier.tenants_use(engine.core.state.shares.tenants)
    for tenant, use in uses.items():
        room = use.capacity_bytes - use.bytes
        numbers = use.bytes, use.floor_bytes, use.capacity_bytes, room
        found.append(_share(engine, tenant, Share.SSD, *numbers))
        if use.writes_cap_bytes:
            of_writes = use.writes_bytes, use.writes_floor_bytes, use.writes_cap_bytes
            found.append(
                _share(engine, tenant, Share.SSD_WRITES, *of_writes, use.writes_room_bytes)
            )
    return found


def _share(
    engine: Engine, tenant: str, share: Share, used: int, floor: int, cap: int, room: int
) -> ShareNow:
    refused = engine.core.state.shares.refused.get((tenant, share), 0)
    return ShareNow(tenant, str(share), used, floor, cap, max(0, room), refused)


def take_ssd(engine: Engine) -> SsdNow | None:
    """Take a snapshot of the SSD tier; call on the loop."""
    tiering = engine.tiering
    figures = tiering.tier.figures() if tiering is not None else None
    if tiering is None or figures is None:
        return None
    return SsdNow(figures, tiering.writing, tiering.promoting, tiering.promotion_seconds)


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
            quarantined_bytes=books.quarantined,
            free_bytes=books.free,
            unassigned_bytes=pool.unassigned_count * geometry.slab_bytes,
            largest_free_bytes=pool.largest_free_bytes,
        )
        for segment, shape, books, pool, mapped in zip(
            range(len(geometry.segments)),
            geometry.segments,
            state.ledger.segments,
            state.pools,
            engine.arena.segments,
            strict=True,
        )
    ]


def _engines(engine: Engine) -> list[EngineNow]:
    """Return the oldest engines by name and the rest as one; incarnations of one engine are one."""
    found = dict[tuple[str, str], EngineNow]()
    groups = sorted(engine.core.state.groups, key=lambda group: group.number)
    for group in groups:
        place = (group.tenant, group.engine_id)
        if place not in found and len(found) >= ENGINES_SHOWN_MAX:
            place = ("", OTHER)
        now = _engine(engine, group, *place)
        found[place] = _joined(found[place], now) if place in found else now
    return list(found.values())


def _engine(engine: Engine, group: Group, tenant: str, name: str) -> EngineNow:
    attached, now = group.attached, engine.now()
    records = [engine.sessions.find(member.session) for member in attached]
    silent = [now - record.heard_at for record in records if record is not None]
    sums = collections.Counter[str]()
    for member in attached:
        for counter, value in engine.reported.of(member.session).items():
            sums["fallbacks" if counter.startswith(FALLBACK) else counter] += value
    space = engine.core.state.namespaces.find_number(group.namespace)
    return EngineNow(
        engine_id=name,
        tenant=tenant,
        namespace="" if space is None else space.digest.hex()[:12],
        incarnation=group.incarnation,
        ranks=len({member.rank for member in attached if member.rank >= 0}),
        world_size=group.world_size,
        attached=len(attached),
        leases=len(group.leases),
        oldest_lease_s=now - next(iter(group.leased_at.values())) if group.leased_at else 0.0,
        reserved_bytes=group.stock_bytes,
        quarantined_bytes=group.quarantined_bytes,
        heartbeat_age_s=max(silent, default=0.0),
        asked_tokens=group.asked_tokens,
        hit_tokens=group.hit_tokens,
        **{each: sums[each] for each in _REPORTED},
    )


_REPORTED = ("load_bytes", "store_bytes", "fallbacks")
_WORST = ("oldest_lease_s", "heartbeat_age_s", "incarnation")
_SUMS = (
    *_REPORTED,
    "asked_tokens",
    "hit_tokens",
    "ranks",
    "attached",
    "leases",
    "reserved_bytes",
    "quarantined_bytes",
)


def _joined(one: EngineNow, other: EngineNow) -> EngineNow:
    """Return two engines as one: sums of what they hold, the worst of their ages."""
    sums = {name: getattr(one, name) + getattr(other, name) for name in _SUMS}
    worst = {name: max(getattr(one, name), getattr(other, name)) for name in _WORST}
    return dataclasses.replace(other, **sums, **worst)

"""What lookups and stores tell of the hit ratios of other capacities, by tenant and namespace."""

from __future__ import annotations

import asyncio
import functools
from bisect import bisect_right
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING

from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.reuse import Kind, ReuseTimes, Use

if TYPE_CHECKING:
    from kvhearth_server.engine.engine import Engine

FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Capacities whose hit ratios are told, as parts of the present ones."""
ALL = "all"
BUFFER_BYTES, _KINDS_MAX = 1 << 22, 1024
PAUSE_S, _LATE_S = 0.1, 0.1
"""Clients keep lookups that they answered themselves back for ``_LATE_S`` (docs/adr/0027)."""
_time_of = itemgetter(0)
_SPREAD = 0xD1342543DE82EF95


@dataclass(frozen=True)
class HitRatio:
    """The hit ratio that a capacity would have had; ``factor`` times the present one."""

    factor: float
    bytes: int
    hit_ratio: float


@dataclass(frozen=True)
class Curve:
    """Hit ratios of other capacities for the lookups of a namespace, or of all of its tenant.

    Attributes:
        namespace: first digits of its digest; ``all``, or ``other`` for those without a row.
        asked_keys: keys looked up, those of an hour ago counted half.
        sampled_keys: keys tracked now, of all namespaces of the tenant.
        sample_rate: part of all keys that is tracked.
        memory_bytes, ssd_bytes: the present capacities.
        memory: hit ratios of memory alone.
        ssd: hit ratios with the present memory and an SSD tier of these capacities; none without.
    """

    tenant: str
    namespace: str
    asked_keys: int
    sampled_keys: int
    sample_rate: float
    memory_bytes: int
    ssd_bytes: int
    memory: list[HitRatio]
    ssd: list[HitRatio]


class MissRatios:
    """The curves of an engine's tenants. Calls only append; a task counts, in the order of time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._times = {tenant: ReuseTimes() for tenant in engine.core.state.segment_of}
        self._uses: dict[str, list[Use]] = {tenant: [] for tenant in self._times}
        self._bytes, self._arrived = 0, asyncio.Event()
        self._kinds: dict[tuple[bytes, int, int, bool], Kind] = {}

    def used(
        self,
        namespace: Namespace,
        epoch: int,
        kv_group: int,
        keys: bytes,
        *,
        lookup: bool,
        age_us: int = 0,
    ) -> None:
        """Take down keys that were looked up ``age_us`` ago, or else stored."""
        kind = self._kinds.get((namespace.digest, epoch, kv_group, lookup))
        kind = kind or self._kind(namespace, epoch, kv_group, lookup=lookup)
        self._uses[namespace.tenant].append((self._engine.now() - age_us * 1e-6, kind, keys))
        self._bytes += len(keys)
        if self._bytes > BUFFER_BYTES:
            self._count(self._engine.now())
        self._arrived.set()

    def _kind(self, namespace: Namespace, epoch: int, kv_group: int, *, lookup: bool) -> Kind:
        if len(self._kinds) >= _KINDS_MAX:
            self._kinds.clear()
        digest, width = namespace.digest, namespace.contract.hash_bytes
        space = int.from_bytes(digest[:8], "little") ^ (epoch << 8 | kv_group) * _SPREAD
        size = self._engine.core.state.block_bytes(namespace, kv_group)
        kind = Kind(space % 2**64, digest.hex()[:12] if lookup else "", size, width)
        self._kinds[digest, epoch, kv_group, lookup] = kind
        return kind

    def _count(self, until: float) -> None:
        """Count what was used up to a time."""
        self._bytes = 0
        for tenant, uses in self._uses.items():
            uses.sort(key=_time_of)
            end = bisect_right(uses, until, key=_time_of)
            due, uses[:end] = uses[:end], []
            self._bytes += sum(len(keys) for _, _, keys in uses)
            if due:
                self._times[tenant].add(due, until, functools.partial(self._limit, tenant))

    async def run(self) -> None:
        """Count what calls append, for as long as the task lives."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            await asyncio.sleep(PAUSE_S)
            self._count(self._engine.now() - _LATE_S)
            if any(self._uses.values()):
                self._arrived.set()

    def _capacities(self, tenant: str) -> tuple[int, int]:
        """Return a tenant's bytes of memory and of the SSD tier."""
        state = self._engine.core.state
        memory = state.books[state.segment_of[tenant]].capacity
        return memory, sum(tier.quota_bytes(tenant) for tier in self._engine.tiers)

    def _limit(self, tenant: str) -> int:
        return int(FACTORS[-1] * max(self._capacities(tenant)))

    def curves(self) -> list[Curve]:
        """Return each tenant's curve, and its namespaces'."""
        return [curve for tenant in self._times for curve in self._curves(tenant)]

    def _curves(self, tenant: str) -> list[Curve]:
        times, (memory, ssd) = self._times[tenant], self._capacities(tenant)
        # Nearly every block in memory has a copy on SSD, so that their bytes do not add up.
        sizes = [int(factor * memory) for factor in FACTORS]
        sizes += [max(memory, int(factor * ssd)) for factor in FACTORS]
        whole, found = sum(times.rows.values(), 0 * times.used), list[Curve]()
        for name, row in {ALL: whole, **times.rows}.items():
            ratios = [round(ratio, 4) for ratio in times.hit_ratios(row, sizes)]
            told = [HitRatio(*each) for each in zip(FACTORS * 2, sizes, ratios, strict=True)]
            asked, behind = round(float(row[0])), told[len(FACTORS) :] if ssd else []
            about = asked, len(times), times.rate, memory, ssd
            found.append(Curve(tenant, name, *about, told[: len(FACTORS)], behind))
        return found

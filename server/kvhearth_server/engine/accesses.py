"""Lookups and stores as they come, for the hit ratios of other capacities and for traces.

A call only appends its keys to a buffer, which is sampled when it has some hundred kilobytes. A
task takes what was sampled in portions of less than a millisecond, in the order of time. No more is
sampled than a bounded part of a core pays for.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from kvhearth.contract import KEY_BYTES_MIN
from kvhearth.keys import PackedKeys
from kvhearth_server.core.fast_path import SingleLookup
from kvhearth_server.core.lookup import KeysItem
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.reuse import F64, Kind, ReuseSampler, Sampled, Use, chunks

if TYPE_CHECKING:
    from kvhearth_server.engine.engine import Engine

FACTORS = (0.5, 1.0, 2.0, 4.0)
"""Capacities whose hit ratios are told, as parts of the present ones."""
ALL, OTHER = "all", "other"
NAMED_MAX = 16
"""Upper bound on namespaces with a curve of their own; the others share one."""
SAMPLE_LEAST = 512
"""Sampled keys below which the rate is not lowered to save time."""
_BUFFER_BYTES_MAX = 16 << 20
_PAUSE_S = 0.1
_LATE_S = 0.1
"""Time for which clients may keep lookups back that they answered themselves (docs/adr/0027)."""
_PORTION_BYTES = 512 << 10
_PORTION_USES = 512
_PORTION_S = 0.0005
_REFERENCES_PER_S = 2000
"""Sampled references that are worked on: at a microsecond each, a fifth of a percent of a core."""
_REFERENCES_BURST = 20_000
_HALF_LIFE_S = 3600.0
_DECAY_EVERY_S = 60.0
_WAITING_MAX = 4096
_POINTS_PER_OCTAVE = 4
_SEED = 0x5851F42D4C957F2D
_SPREAD = 0xD1342543DE82EF95


class Access(NamedTuple):
    """Keys of one KV group that were looked up or stored, in chain order.

    Attributes:
        at: monotonic time in seconds.
        epoch: of the namespace at that time.
        blob: keys side by side.
        counted: whether it is a lookup.
    """

    at: float
    namespace: Namespace
    epoch: int
    kv_group: int
    blob: bytes
    counted: bool


Listener = Callable[[Sequence[Access]], None]


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
        points: (bytes, hit ratio) of more capacities; for ``all`` only.
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
    points: list[HitRatio]


class _Tenant:
    """Sampler of one tenant's memory, and the rows of its namespaces."""

    def __init__(self, tenant: str, sample_max: int, seed: int) -> None:
        self.tenant = tenant
        self.sampler = ReuseSampler(sample_max, NAMED_MAX + 1, seed=seed)
        self.names = [""] * NAMED_MAX
        self.memory_bytes = self.ssd_bytes = 0

    def row(self, name: str) -> int:
        """Return the row of a namespace: its own, a free one, or the others'."""
        if name in self.names:
            return self.names.index(name)
        if "" in self.names:
            row = self.names.index("")
            self.names[row] = name
            return row
        return NAMED_MAX

    def fade(self, factor: float) -> None:
        """Count older lookups less, and free the rows of namespaces without any."""
        self.sampler.decay(factor)
        for row in range(NAMED_MAX):
            if self.sampler.asked[row] < 1:
                self.sampler.clear(row)
                self.names[row] = ""

    def curves(self) -> list[Curve]:
        """Return the curve of all lookups, and of each namespace with some."""
        named = [(name, row) for row, name in enumerate(self.names) if name]
        rows = [(name, row) for name, row in [*named, (OTHER, NAMED_MAX)] if self.asked([row])]
        whole = self._curve(ALL, [*range(NAMED_MAX + 1)])
        return [whole, *(self._curve(name, [row]) for name, row in rows)]

    def asked(self, rows: list[int]) -> int:
        """Return how many keys were looked up."""
        return round(float(self.sampler.asked[rows].sum()))

    def _curve(self, name: str, rows: list[int]) -> Curve:
        memory = [int(factor * self.memory_bytes) for factor in FACTORS]
        # Nearly every block in memory has a copy on SSD, so that their bytes do not add up.
        ssd = [max(self.memory_bytes, int(factor * self.ssd_bytes)) for factor in FACTORS]
        more = self._more() if name == ALL else []
        ratios = self.sampler.hit_ratios(rows, [*memory, *ssd, *more]).tolist()
        found = [round(ratio, 4) for ratio in ratios]
        count = len(FACTORS)
        return Curve(
            self.tenant,
            name,
            self.asked(rows),
            len(self.sampler),
            self.sampler.rate,
            self.memory_bytes,
            self.ssd_bytes,
            [HitRatio(*each) for each in zip(FACTORS, memory, found, strict=False)],
            [HitRatio(*each) for each in zip(FACTORS, ssd, found[count:], strict=False)]
            if self.ssd_bytes
            else [],
            [
                HitRatio(round(size / max(1, self.memory_bytes), 4), size, ratio)
                for size, ratio in zip(more, found[2 * count :], strict=True)
            ],
        )

    def _more(self) -> list[int]:
        """Return capacities from a sixteenth of memory to four times the largest tier."""
        sizes, top = list[int](), 4 * max(self.memory_bytes, self.ssd_bytes)
        step = 0
        while (size := int(self.memory_bytes / 16 * 2 ** (step / _POINTS_PER_OCTAVE))) < top:
            sizes.append(size)
            step += 1
        return [*sizes, top]


@dataclass(slots=True)
class _Stream:
    """Uses of one tenant's keys of one length that wait to be worked on."""

    tenant: _Tenant
    key_bytes: int
    uses: list[Use] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """When each of ``uses`` came."""
    size: int = 0
    """Bytes of their keys."""
    waiting: list[tuple[F64, Sampled]] = field(default_factory=list)
    """References in the order in which they arrived, with the time of each."""

    def take(self, until: float) -> Sampled | None:
        """Remove and return the references up to a time, in its order; None if there are none."""
        if not self.waiting:
            return None
        times = np.concatenate([times for times, _ in self.waiting])
        found = Sampled.of([part for _, part in self.waiting])
        order = np.argsort(times, kind="stable")
        end = int(np.searchsorted(times[order], until, side="right"))
        left = order[end:]
        self.waiting = [(times[left], found.at(left))] if len(left) else []
        return found.at(order[:end]) if end else None


@dataclass(slots=True)
class _Place:
    """A KV group of a namespace in one epoch: where its uses go, and their kinds."""

    namespace: Namespace
    epoch: int
    stream: _Stream
    lookup: Kind
    store: Kind


class Accesses:
    """Accesses as they arrive, and the curves that they are counted in.

    Args:
        engine: its namespaces, capacities and clock.
        sample_max: most keys tracked for each tenant; 0: no curves.
    """

    def __init__(self, engine: Engine, sample_max: int = 0) -> None:
        self._engine, self._now = engine, engine.now
        self._tenants = [
            _Tenant(segment.tenant, sample_max, _SEED)
            for segment in engine.core.state.table.geometry.segments
            if sample_max
        ]
        self._streams: dict[tuple[str, int], _Stream] = {}
        self._places: dict[tuple[int, int], _Place] = {}
        self._buffered = 0
        self._awake = False
        self._heard: list[Access] = []
        self._listeners: list[Listener] = []
        self._arrived = asyncio.Event()
        self._waiting: OrderedDict[tuple[int, int, int, bytes], None] = OrderedDict()
        self._tokens = float(_REFERENCES_BURST)
        self._filled_at = self._decayed_at = engine.now()
        self._curves: tuple[float, list[Curve]] = (float("-inf"), [])
        self.on = bool(self._tenants)
        """Whether accesses are taken down."""

    # -- what calls report -------------------------------------------------------------------------

    def looked_up_one(self, namespace: Namespace, one: SingleLookup, age_us: int = 0) -> None:
        """Take down a lookup of one key that is in memory; see ``looked_up``."""
        self._add(self._now() - age_us * 1e-6, namespace, one.kv_group, one.key, True)

    def looked_up(
        self,
        namespace: Namespace,
        items: Iterable[KeysItem],
        session: int,
        *,
        again: bool = False,
        age_us: int = 0,
    ) -> None:
        """Take down a lookup, once: while its blocks are promoted, the caller asks again.

        Only while ``on``, which callers look at.

        Args:
            again: whether the caller was told to ask again.
            age_us: time for which the caller has had its answer from the shared index.
        """
        at = self._now() - age_us * 1e-6
        asks_again = again or self._waiting
        for kv_group, keys in items:
            blob = keys.blob if type(keys) is PackedKeys else b"".join(keys)
            if asks_again and self._counted_before(session, kv_group, blob, again=again):
                continue
            if blob:
                self._add(at, namespace, kv_group, blob, True)

    def stored(self, namespace: Namespace, kv_group: int, blob: bytes) -> None:
        """Take down a commit."""
        if self.on and blob:
            self._add(self._now(), namespace, kv_group, blob, False)

    def _counted_before(self, session: int, kv_group: int, blob: bytes, *, again: bool) -> bool:
        """Whether the lookup was counted while it waited for promotions."""
        # The last key of a chain stands for all of it.
        asked = (session, kv_group, len(blob), blob[-KEY_BYTES_MIN:])
        known = asked in self._waiting
        if again:
            self._waiting[asked] = None
            self._waiting.move_to_end(asked)
            while len(self._waiting) > _WAITING_MAX:
                self._waiting.popitem(last=False)
        elif known:
            del self._waiting[asked]
        return known

    def _add(
        self, at: float, namespace: Namespace, kv_group: int, blob: bytes, counted: bool
    ) -> None:
        if not self._awake:
            self._awake = True
            self._arrived.set()
        if self._listeners:
            self._hear(Access(at, namespace, namespace.epoch, kv_group, blob, counted))
        if not self._tenants:
            return
        place = self._places.get((namespace.number, kv_group))
        if place is None or place.epoch != namespace.epoch or place.namespace is not namespace:
            place = self._place(namespace, kv_group)
        stream = place.stream
        stream.uses.append((place.lookup if counted else place.store, blob))
        stream.times.append(at)
        stream.size += len(blob)
        # Before the keys leave the processor's cache: to fetch them again takes longer.
        if stream.size >= _PORTION_BYTES or len(stream.uses) >= _PORTION_USES:
            self._sample(stream)

    def _hear(self, access: Access) -> None:
        """Keep an access for the listeners."""
        if self._buffered > _BUFFER_BYTES_MAX:
            self._lose(len(access.blob) // access.namespace.contract.hash_bytes)
            return
        self._buffered += len(access.blob)
        self._heard.append(access)

    def _sample(self, stream: _Stream) -> None:
        """Sample the uses that have arrived, as far as there is time for the references."""
        uses, times, stream.uses, stream.times = stream.uses, stream.times, [], []
        size, stream.size = stream.size, 0
        if not uses:
            return
        if self._tokens <= 0:
            self._lose(size // stream.key_bytes)
            return
        sampler = stream.tenant.sampler
        found, owners = sampler.sample_owned(uses, stream.key_bytes)
        if not len(found):
            return
        self._tokens -= len(found)
        stream.waiting.append((np.array(times)[owners], found))
        self._slow_down(sampler)

    def _slow_down(self, sampler: ReuseSampler) -> None:
        """Lower the sample rate if there are more references than there is time for."""
        while self._tokens <= 0 and len(sampler) > SAMPLE_LEAST:
            sampler.lower_rate(max(SAMPLE_LEAST, len(sampler) // 2))
            self._tokens += _REFERENCES_BURST // 4

    def _lose(self, keys: int) -> None:
        self._engine.counters.add("untraced_keys", keys)

    def _place(self, namespace: Namespace, kv_group: int) -> _Place:
        state, epoch = self._engine.core.state, namespace.epoch
        tenant = self._tenants[state.segment_of[namespace.tenant]]
        key_bytes = namespace.contract.hash_bytes
        stream = self._streams.setdefault((namespace.tenant, key_bytes), _Stream(tenant, key_bytes))
        space = int.from_bytes(namespace.digest[:8], "little")
        space ^= (epoch << 8 | kv_group) * _SPREAD
        size = state.block_bytes(namespace, kv_group)
        row = tenant.row(namespace.digest.hex()[:12])
        lookup, store = Kind(space, row, size), Kind(space, -1, size)
        if len(self._places) > _WAITING_MAX:
            self._places.clear()
        place = _Place(namespace, epoch, stream, lookup, store)
        self._places[namespace.number, kv_group] = place
        return place

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Pass all accesses from now on to ``listener``; returns the function that ends this."""
        self._listeners.append(listener)
        self.on = True

        def end() -> None:
            if listener in self._listeners:
                self._listeners.remove(listener)
            self.on = bool(self._tenants or self._listeners)

        return end

    # -- the task ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work on what arrives, for as long as the task lives."""
        while True:
            await self._arrived.wait()
            await asyncio.sleep(_PAUSE_S)
            await self.drain()

    async def drain(self, *, everything: bool = False) -> None:
        """Work on what has arrived, in the order of time.

        Args:
            everything: also on the last moment, of which some lookups are still on their way.
        """
        self._arrived.clear()
        self._awake = False
        until = self._now() - (0.0 if everything else _LATE_S)
        heard, self._heard = _split(self._heard, until)
        for listener in list(self._listeners):
            listener(heard)
        self._buffered = sum(len(access.blob) for access in self._heard)
        self._refill()
        turn = _Turn(self._now)
        for stream in list(self._streams.values()):
            self._sample(stream)
            due = stream.take(until)
            for some in chunks([] if due is None else [due]):
                stream.tenant.sampler.add(some)
                await turn.over()
            self._slow_down(stream.tenant.sampler)
        if self._heard or any(stream.waiting for stream in self._streams.values()):
            self._awake = True
            self._arrived.set()

    def _refill(self) -> None:
        if not self._tenants:
            return
        now = self._now()
        self._tokens += (now - self._filled_at) * _REFERENCES_PER_S
        self._tokens = min(self._tokens, _REFERENCES_BURST)
        self._filled_at = now
        if now - self._decayed_at >= _DECAY_EVERY_S:
            factor = 0.5 ** ((now - self._decayed_at) / _HALF_LIFE_S)
            self._decayed_at = now
            for tenant in self._tenants:
                tenant.fade(factor)
            self._places.clear()  # the rows of namespaces may change
            self._look_at_capacities()

    def capacities(self) -> dict[str, tuple[int, int]]:
        """Return the present bytes of memory and of the SSD tier by tenant."""
        engine = self._engine
        segments = engine.core.state.segment_of
        tier = engine.tiering.tier if engine.tiering is not None else None
        on_ssd = {} if tier is None else tier.tenants_use(list(segments))
        return {
            tenant: (
                engine.core.state.ledger.segments[segment].capacity,
                on_ssd[tenant].capacity_bytes if tenant in on_ssd else 0,
            )
            for tenant, segment in segments.items()
        }

    def _look_at_capacities(self) -> None:
        capacities = self.capacities()
        for tenant in self._tenants:
            tenant.memory_bytes, tenant.ssd_bytes = capacities[tenant.tenant]
            largest = max(tenant.memory_bytes, tenant.ssd_bytes)
            tenant.sampler.limit_bytes = FACTORS[-1] * largest

    # -- the result --------------------------------------------------------------------------------

    def curves(self) -> list[Curve]:
        """Return each tenant's curve and its namespaces', not older than a second."""
        now = self._now()
        if now - self._curves[0] >= 1.0:
            self._look_at_capacities()
            self._curves = (now, [each for tenant in self._tenants for each in tenant.curves()])
        return self._curves[1]


_time_of = itemgetter(0)


def _split(arrived: list[Access], until: float) -> tuple[list[Access], list[Access]]:
    """Sort by time; return what came up to ``until``, and the rest."""
    arrived.sort(key=_time_of)
    end = bisect_right(arrived, until, key=_time_of)
    return arrived[:end], arrived[end:]


class _Turn:
    """Time that the task works before others have their turn."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now, self._began = now, now()

    async def over(self) -> None:
        """Give others a turn if it is time."""
        if self._now() - self._began > _PORTION_S:
            await asyncio.sleep(0)
            self._began = self._now()

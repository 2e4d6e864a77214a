"""Simulation of a trace: the core's own index, chains and eviction policies, without any bytes.

A lookup's missing blocks are stored, as an engine computes them. Long traces are simulated in
miniature: a part of the keys, chosen by their hashes, in as small a part of the memory (Waldspurger
et al., "Cache Modeling and Optimization using Miniature Simulations", ATC 2017).
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.errors import KVHearthError, Reason
from kvhearth.keys import split_keys
from kvhearth.model import CHECKSUM_BYTES, I64
from kvhearth_server.core.core import Core
from kvhearth_server.core.eviction import POLICY_NAMES
from kvhearth_server.core.fast_path import SingleCommit, SingleFastPath
from kvhearth_server.core.membership import Joining
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.reuse import CHUNK, Kind, ReuseSampler, Use
from kvhearth_server.core.slot_table import Geometry
from kvhearth_server.core.state import Limits
from kvhearth_server.traces.format import Trace, key_blob

LRU = "lru"
POLICIES = (*POLICY_NAMES, LRU)
REFERENCES = 250_000
"""Keys of lookups and stores that a miniature works on, unless the rest asks for more."""
KEYS_LEAST = 8192
"""Different keys of a miniature, if the trace has them."""
BLOCKS_LEAST = 256
"""Blocks that fit into a miniature's memory, at least."""
_KEY_BYTES = 16
_SUM = bytes([1]) * CHECKSUM_BYTES
_STOCK = 64
_FEW = 8
"""Keys up to which handling them one by one is cheaper."""
_SLABS = 256
_PROGRESS_EVERY = 4096
_TENANT = "trace"

Note = Callable[[float], None]
"""Is told which part of a simulation is done, 0 to 1."""


@dataclass(frozen=True)
class Simulated:
    """Hit ratios of one simulation: parts of the keys of all lookups.

    Attributes:
        hit_ratio: of both tiers together.
        memory_hit_ratio: found in memory.
        sample_rate: part of the keys that was simulated.
    """

    policy: str
    memory_bytes: int
    ssd_bytes: int
    hit_ratio: float
    memory_hit_ratio: float
    evicted_blocks: int
    sample_rate: float


def sample_rate(trace: Trace, memory_bytes: int) -> float:
    """Return the part of the keys to simulate with a size of memory, to end within seconds."""
    references, distinct = int(trace.key_counts.sum()), len(trace.hashes)
    if references <= REFERENCES or distinct <= KEYS_LEAST:
        return 1.0
    block = max(space.block_bytes for space in trace.spaces.values())
    blocks = memory_bytes / block
    return min(1.0, max(REFERENCES / references, KEYS_LEAST / distinct, BLOCKS_LEAST / blocks))


class Miniature:
    """A part of a trace: its sampled keys, by numbers of their own.

    Args:
        rate: part of the keys, above 0, at most 1.
    """

    def __init__(self, trace: Trace, rate: float) -> None:
        self.trace, self.rate = trace, rate
        self.reuse: ReuseSampler | None = None
        """Reuse distances, once they are known."""
        if rate < 1:
            kept = trace.hashes < np.uint64(int(rate * 2.0**64))
        else:
            kept = np.ones(len(trace.hashes), np.bool_)
        self.hashes = trace.hashes[kept]
        rank = np.concatenate(([0], np.cumsum(kept)))
        begins, ends = rank[trace.starts], rank[trace.starts + trace.lengths]
        full = ends > begins
        self.begins: list[int] = begins[full].tolist()
        self.ends: list[int] = ends[full].tolist()
        runs = np.concatenate(([0], np.cumsum(full)))
        firsts = runs[trace.first_runs]
        self.uses: I64 = np.flatnonzero(firsts[1:] > firsts[:-1])
        """Uses with a sampled key."""
        self.first_runs = firsts
        self.asked_keys = trace.asked_keys * rate
        """Keys of lookups that the sample stands for."""

    def each(self, note: Note) -> Iterator[tuple[bool, int, list[int]]]:
        """Yield for each use with sampled keys: whether it is a store, its space, its keys."""
        trace, firsts = self.trace, self.first_runs
        count = max(1, len(self.uses))
        columns = (
            trace.stores[self.uses].tolist(),
            trace.use_spaces[self.uses].tolist(),
            firsts[self.uses].tolist(),
            firsts[self.uses + 1].tolist(),
        )
        for number, (store, space, first, last) in enumerate(zip(*columns, strict=True)):
            keys = list[int]()
            for run in range(first, last):
                keys += range(self.begins[run], self.ends[run])
            yield store, space, keys
            if not number % _PROGRESS_EVERY:
                note(number / count)
        note(1.0)


def simulate(
    part: Miniature, policy: str, memory_bytes: int, ssd_bytes: int = 0, note: Note = lambda _: None
) -> Simulated:
    """Simulate one policy and one size of each tier.

    Raises:
        KVHearthError: ``config_invalid`` for a policy that does not exist, or memory for less than
            a few blocks.
    """
    if policy not in POLICIES:
        known = ", ".join(POLICIES)
        raise KVHearthError(Reason.CONFIG_INVALID, f"no policy {policy!r}; there are: {known}")
    if policy == LRU:
        return _simulate_lru(part, memory_bytes, ssd_bytes, note)
    cache = _Cache(part, policy, memory_bytes * part.rate)
    ssd = _Ssd(ssd_bytes * part.rate)
    misses = below = 0
    for store, space, keys in part.each(note):
        absent = cache.use(space, keys)
        if not store:
            below += sum(map(ssd.has, absent)) if ssd_bytes else 0
            misses += len(absent)
        if absent:
            cache.store(space, keys, set(absent))
        if ssd_bytes:
            size = part.trace.spaces[space].block_bytes
            for key in absent:
                ssd.put(key, size)
    asked = max(part.asked_keys, 1.0)
    return Simulated(
        policy,
        memory_bytes,
        ssd_bytes,
        _part(1 - (misses - below) / asked),
        _part(1 - misses / asked),
        round(cache.evicted / part.rate),
        part.rate,
    )


def _part(value: float) -> float:
    return round(min(1.0, max(0.0, value)), 4)


def _simulate_lru(part: Miniature, memory_bytes: int, ssd_bytes: int, note: Note) -> Simulated:
    """The hit ratios of LRU, from the exact reuse distances of the sample."""
    if part.reuse is None:
        part.reuse = _reuse_of(part, note)
    note(1.0)
    sizes = [memory_bytes * part.rate, max(memory_bytes, ssd_bytes) * part.rate]
    memory, both = part.reuse.hit_ratios(0, sizes).tolist()
    return Simulated(LRU, memory_bytes, ssd_bytes, _part(both), _part(memory), 0, part.rate)


def _reuse_of(part: Miniature, note: Note) -> ReuseSampler:
    sampler = ReuseSampler(len(part.hashes) + 1, 1)
    names = split_keys(key_blob(part.hashes, _KEY_BYTES), _KEY_BYTES)
    uses, count = list[Use](), 0

    def add() -> None:
        for some in sampler.sample(uses, _KEY_BYTES) if uses else ():
            sampler.add(some)

    for store, space, keys in part.each(note):
        kind = Kind(space, -1 if store else 0, part.trace.spaces[space].block_bytes)
        uses.append((kind, b"".join([names[key] for key in keys])))
        count += len(keys)
        if count >= CHUNK:
            add()
            uses, count = [], 0
    add()
    sampler.asked[0] = part.asked_keys
    return sampler


class _Ssd:
    """The SSD tier, roughly: a log whose oldest blocks go, but for those that were read."""

    def __init__(self, capacity_bytes: float) -> None:
        self._capacity = capacity_bytes
        self._used = 0
        self._blocks: OrderedDict[int, tuple[int, bool]] = OrderedDict()

    def has(self, key: int) -> bool:
        """Whether a block is there; it counts as read."""
        found = self._blocks.get(key)
        if found is not None:
            self._blocks[key] = found[0], True
        return found is not None

    def put(self, key: int, size: int) -> None:
        """Write a block unless it is there."""
        if key in self._blocks:
            return
        self._blocks[key] = size, False
        self._used += size
        while self._used > self._capacity:
            oldest, (freed, read) = self._blocks.popitem(last=False)
            if read:
                self._blocks[oldest] = freed, False
            else:
                self._used -= freed


class _Cache:
    """A core with one attached engine for each space of a trace."""

    def __init__(self, part: Miniature, policy: str, capacity_bytes: float) -> None:
        spaces = part.trace.spaces
        sizes = [space.block_bytes for space in spaces.values()] or [4096]
        self._core = Core(_geometry(sizes, capacity_bytes), _limits(policy, len(sizes)))
        self._state = self._core.state
        self._path = SingleFastPath(self._state)
        self._keys = split_keys(key_blob(part.hashes, _KEY_BYTES), _KEY_BYTES)
        self._numbers = itertools.count(1)
        self._sessions: dict[int, int] = {}
        self._namespaces: dict[int, Namespace] = {}
        self._stock: dict[int, list[tuple[int, int]]] = {}
        for number, space in spaces.items():
            self._attach(number, space.block_bytes)
        blocks = int(capacity_bytes // max(sizes))
        self._portion = max(1, min(_STOCK, blocks // 32))
        self.evicted = 0
        """Blocks that were evicted."""

    def _attach(self, space: int, block_bytes: int) -> None:
        group = GroupSpec(GroupKind.FULL, 16, block_bytes)
        contract = Contract(f"space {space}", "r", "uint8", (group,), hash_bytes=_KEY_BYTES)
        session = next(self._numbers)
        joining = Joining(session, _TENANT, f"e{space}", contract, True, 0, 0, True)
        joined = self._core.membership.join(joining)
        self._sessions[space] = session
        self._namespaces[space] = joined.namespace
        self._stock[space] = []

    def use(self, space: int, keys: list[int]) -> list[int]:
        """Mark present blocks as used, and return the absent ones."""
        number, find, names = self._namespaces[space].number, self._state.index.find_one, self._keys
        if len(keys) > _FEW:
            return self._use_many(number, keys)
        absent, mark = list[int](), self._path.mark_used
        for key in keys:
            head = find(number, 0, names[key])
            if head < 0:
                absent.append(key)
            else:
                mark(head)
        return absent

    def _use_many(self, namespace: int, keys: list[int]) -> list[int]:
        state, names = self._state, self._keys
        heads = state.index.find(namespace, 0, [names[key] for key in keys])
        found = heads[heads >= 0]
        if len(found):
            state.policies.touch(found)
            state.table.used_at[found] = state.tick()
        if len(found) == len(keys):
            return []
        return [keys[at] for at in np.flatnonzero(heads < 0).tolist()]

    def store(self, space: int, keys: list[int], absent: set[int]) -> None:
        """Store the absent ones of a chain's blocks."""
        namespace, group = self._namespaces[space], self._state.group_of(self._sessions[space])
        parent = b""
        for key in keys:
            name = self._keys[key]
            if key in absent:
                slot = self._slot(space)
                if slot is None:
                    return
                one = SingleCommit(0, name, *slot, _SUM, parent)
                if not self._core.writing.commit_one(group, namespace, namespace.epoch, one):
                    self._stock[space].append(slot)  # twice in one use
            parent = name

    def _slot(self, space: int) -> tuple[int, int] | None:
        """Return an empty slot and its generation; None if there is no room."""
        stock = self._stock[space]
        if not stock:
            state, epoch = self._state, self._namespaces[space].epoch
            number = next(self._numbers)
            try:
                wants = [(0, self._portion)]
                given = self._core.writing.reserve(self._sessions[space], number, epoch, wants)
            except KVHearthError:
                return None
            finally:
                state.take_actions()
                counts = state.take_counts()
                self.evicted += sum(
                    count for (name, _), count in counts.items() if name == "evicted_blocks"
                )
                state.take_evicted()
            for grant in given.handed:
                slots, generations = grant.slots[:, 0].tolist(), grant.generations[:, 0].tolist()
                stock += zip(slots, generations, strict=True)
            stock.reverse()
        return stock.pop() if stock else None


def _limits(policy: str, spaces: int) -> Limits:
    return Limits(
        held_fraction_max=1.0,
        stock_fraction_max=1.0,
        sessions_max=spaces + 1,
        namespaces_max=spaces + 1,
        eviction=policy,
    )


def _geometry(sizes: list[int], capacity_bytes: float) -> Geometry:
    """Return a small arena's geometry: slabs of several blocks, many slabs."""
    unit = math.gcd(*sizes)
    least = max(sizes)
    slab = max(least, int(capacity_bytes / _SLABS))
    slab = -(-slab // unit) * unit
    if len(set(sizes)) == 1:
        slab = slab // least * least  # no slab has slack
    count = int(capacity_bytes // slab)
    if count < 4:
        raise KVHearthError(
            Reason.CONFIG_INVALID,
            f"memory for {capacity_bytes / least:.0f} blocks of the sample is too little to "
            "simulate; simulate more memory, or more keys with --sample",
        )
    return Geometry.of([(_TENANT, count * slab)], slab, unit)

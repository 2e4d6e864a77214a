"""A tier of plain memory that a test controls, which keeps the contract of tiers."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from kvhearth.model import CHECKSUM_BYTES, U8
from kvhearth_server.tiers.base import (
    BlockSpec,
    Completion,
    Corrupt,
    Counts,
    Done,
    Evicted,
    Facts,
    Failed,
    LoadBatch,
    Missing,
    Offer,
    Outcome,
    StoreBatch,
    Throttled,
    Tier,
    check_places,
    gather,
)
from kvhearth_server.tiers.ssd.disk.queues import make_event, reset_event, signal_event
from kvhearth_server.tiers.ssd.format import PAGE_BYTES

SCRIBBLE = 0xEE


@dataclass(frozen=True)
class Batch:
    """One batch that the tier has: ``load`` or store."""

    ticket: int
    load: bool
    batch: LoadBatch


@dataclass
class _Block:
    """One stored block: ``content`` is (shards, length)."""

    family: BlockSpec
    content: U8
    checksums: bytes
    sequence: int
    parent: int


_Name = tuple[bytes, int, bytes]


class FakeTier(Tier):
    """A tier of plain memory, least recently used first out; it copies only when a test permits it.

    Attributes:
        held: no batch ends until ``lose_blocks``.
        refuse_stores, refuse_loads: refusals that batches get.
        spoil: an outcome for one block of a store (false) or a load, None for the true one.
        under_way: batches that have not ended, oldest first.
        submitted: blocks of all batches that were taken, by ``store`` and ``load``.
        offers: blocks to offer to shared tiers.
        progress, recovering, loads_of_the_dead: as of any tier, set by tests.
    """

    name = "dram"
    queue_reads = 4096
    queue_writes = 1024
    progress = (0,)
    recovering = False
    loads_of_the_dead = False

    def __init__(
        self, regions: Sequence[U8], capacity_bytes: int, *, batch_blocks_max: int = 256
    ) -> None:
        """``regions``: the bytes of each arena segment."""
        self.counts = Counts()
        self.event_fd = make_event()
        self.held = False
        self.refuse_stores: Throttled | None = None
        self.refuse_loads: Throttled | None = None
        self.spoil: Callable[[bool, bytes], Outcome | None] = lambda load, key: None
        self.under_way: list[Batch] = []
        self.submitted: Counter[str] = Counter()
        self.offers: list[Offer] = []
        self._regions = list(regions)
        self._capacity_bytes = capacity_bytes
        self._batch_blocks_max = batch_blocks_max
        self._blocks: OrderedDict[_Name, _Block] = OrderedDict()
        self._used_bytes = 0
        self._next = 1
        self._done: list[Completion] = []
        self._evicted: list[Evicted] = []
        self._cancelled: set[int] = set()
        self._lose_blocks = 0

    @property
    def batch_blocks_max(self) -> int:
        return self._batch_blocks_max

    def estimate_s(self, loads: Sequence[tuple[BlockSpec, int]], waiting: int = 0) -> float:
        """Estimate a millisecond for each block, and for each one that waits."""
        own = sum(blocks for _, blocks in loads)
        return (own + max(0, waiting - own)) / 1000

    def submit_store(self, batch: StoreBatch) -> int | Throttled:
        return self.refuse_stores or self._take(batch, load=False)

    def submit_load(self, batch: LoadBatch) -> int | Throttled:
        return self.refuse_loads or self._take(batch, load=True)

    def cancel(self, ticket: int) -> None:
        self._cancelled.add(ticket)

    def take_offers(self) -> list[Offer]:
        offers, self.offers = self.offers, []
        return offers

    def look_up(self, family: BlockSpec, keys: Sequence[bytes]) -> Facts:
        facts = Facts.none(family, len(keys))
        for row, key in enumerate(keys):
            block = self._blocks.get((family.namespace, family.group, key))
            if block is not None and block.family == family:
                facts.present[row] = True
                facts.checksums[row] = np.frombuffer(block.checksums, f"V{CHECKSUM_BYTES}")
                facts.sequences[row], facts.parents[row] = block.sequence, block.parent
        return facts

    def list_keys(
        self, namespace: bytes, group: int, place: int, count: int
    ) -> tuple[list[bytes], int]:
        """List the keys of one of four parts."""
        mine = [key for *where, key in self._blocks if where == [namespace, group]]
        return [key for key in mine if key[-1] % 4 == place], place + 1 if place < 3 else -1

    def forget(self, namespace: bytes, group: int, keys: Sequence[bytes]) -> int:
        return sum(self._drop((namespace, group, key)) for key in keys)

    def forget_namespace(self, namespace: bytes, count: int) -> Evicted | None:
        names = [name for name in self._blocks if name[0] == namespace]
        chosen = [name for name in names if name[1] == names[0][1]][:count]
        for name in chosen:
            self._drop(name)
        keys = [name[2] for name in chosen]
        return Evicted(namespace, chosen[0][1], keys, "asked") if chosen else None

    def take_evicted(self) -> list[Evicted]:
        evicted, self._evicted = self._evicted, []
        return evicted

    @property
    def blocks(self) -> int:
        return len(self._blocks)

    def drain(self, deadline_s: float) -> bool:
        self.refuse_stores = self.refuse_loads = Throttled("draining")
        return not self.under_way or not self.held

    def close(self) -> None:
        if self.event_fd >= 0:
            os.close(self.event_fd)
            self.event_fd = -1

    # -- what a test does with it ------------------------------------------------------------------

    def lose_blocks(self, count: int = 1) -> None:
        """Let ``count`` batches end at the next ``poll``, although the tier is held."""
        self._lose_blocks += count

    def stuck(self) -> None:
        """Report all batches in progress as stuck in the device."""
        for each in self.under_way:
            rows = np.arange(len(each.batch.keys))
            self._done.append(Completion(each.ticket, [(Failed("stuck"), rows)], final=False))

    def evict(self, keys: Sequence[bytes], cause: str = "space") -> None:
        """Evict blocks of these keys, as to make room."""
        for name in [name for name in self._blocks if name[2] in keys]:
            self._drop(name)
            self._evicted.append(Evicted(name[0], name[1], [name[2]], cause))

    def lose(self, keys: Sequence[bytes]) -> None:
        """Drop blocks of these keys without reporting it."""
        for name in [name for name in self._blocks if name[2] in keys]:
            self._drop(name)

    def keys(self) -> set[bytes]:
        """Return the keys of all blocks."""
        return {name[2] for name in self._blocks}

    def damage(self, key: bytes) -> None:
        """Flip a byte of a block."""
        for name, block in self._blocks.items():
            if name[2] == key:
                block.content[0, 0] ^= 0xFF

    # -- batches -----------------------------------------------------------------------------------

    def poll(self) -> list[Completion]:
        reset_event(self.event_fd)
        count = self._lose_blocks if self.held else len(self.under_way)
        self._lose_blocks = 0
        ending, self.under_way = self.under_way[:count], self.under_way[count:]
        for each in ending:
            rows = range(len(each.batch.keys))
            self._done.append(Completion(each.ticket, gather([self._end(each, r) for r in rows])))
        self._scribble()
        done, self._done = self._done, []
        return done

    def _take(self, batch: LoadBatch, *, load: bool) -> int | Throttled:
        self._check(batch)
        requests = len(batch.keys) * batch.family.shards
        busy = sum(e.batch.places.size for e in self.under_way if e.load == load)
        if busy + requests > (self.queue_reads if load else self.queue_writes):
            return Throttled("queue")
        ticket, self._next = self._next, self._next + 1
        self.under_way.append(Batch(ticket, load, batch))
        self.submitted["load" if load else "store"] += len(batch.keys)
        self._scribble()
        signal_event(self.event_fd)
        return ticket

    def _scribble(self) -> None:
        """Overwrite the targets of loads, as the device may at any time."""
        for each in self.under_way:
            for row in range(len(each.batch.keys) if each.load else 0):
                for view in self._views(each.batch, row):
                    view[:] = SCRIBBLE

    def _end(self, each: Batch, row: int) -> Outcome:
        if each.ticket in self._cancelled:
            return Failed("cancelled")
        bad = self.spoil(each.load, each.batch.keys[row])
        if bad is not None:
            return bad
        if isinstance(each.batch, StoreBatch):
            return self._store(each.batch, row)
        return self._load(each.batch, row)

    def _check(self, batch: LoadBatch) -> None:
        if len(batch.keys) > self._batch_blocks_max:
            raise ValueError(f"{len(batch.keys)} blocks, at most {self._batch_blocks_max} a batch")
        check_places(batch.places, batch.family.length, self._regions, PAGE_BYTES)

    # -- one block ---------------------------------------------------------------------------------

    def _store(self, batch: StoreBatch, row: int) -> Outcome:
        family = batch.family
        name = (family.namespace, family.group, batch.keys[row])
        old = self._blocks.get(name)
        if old is not None and old.family == family:
            self.counts.add("stores_present")
            return Done()
        size = family.length * family.shards
        if size > self._capacity_bytes:
            return Throttled("full")
        content = np.empty((family.shards, family.length), np.uint8)
        for shard, view in enumerate(self._views(batch, row)):
            if xxhash.xxh3_128_digest(view.data) != batch.checksums[row, shard].tobytes():
                return Corrupt("source")
            np.copyto(content[shard], view)
        self._drop(name)
        while self._used_bytes + size > self._capacity_bytes:
            namespace, group, key = next(iter(self._blocks))
            self._drop((namespace, group, key))
            self._evicted.append(Evicted(namespace, group, [key]))
        self._blocks[name] = _Block(
            family,
            content,
            batch.checksums[row].tobytes(),
            int(batch.sequences[row]),
            int(batch.parents[row]),
        )
        self._used_bytes += size
        return Done()

    def _load(self, batch: LoadBatch, row: int) -> Outcome:
        name = (batch.family.namespace, batch.family.group, batch.keys[row])
        block = self._blocks.get(name)
        if block is None or block.family != batch.family:
            return Missing()
        for shard, view in enumerate(self._views(batch, row)):
            np.copyto(view, block.content[shard])
            start = shard * CHECKSUM_BYTES
            wanted = block.checksums[start : start + CHECKSUM_BYTES]
            if xxhash.xxh3_128_digest(view.data) != wanted:
                self._drop(name)
                return Corrupt("tier")
        self._blocks.move_to_end(name)
        return Done()

    def _views(self, batch: LoadBatch, row: int) -> list[U8]:
        places, length = batch.places[row], batch.family.length
        pairs = zip(places["region"].tolist(), places["offset"].tolist(), strict=True)
        return [self._regions[region][offset : offset + length] for region, offset in pairs]

    def _drop(self, name: _Name) -> bool:
        block = self._blocks.pop(name, None)
        if block is None:
            return False
        self._used_bytes -= block.content.nbytes
        return True

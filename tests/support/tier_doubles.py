"""A tier of plain memory, the simplest implementation of the contract, and wrappers around tiers.

It copies at once and reports at the next ``poll``. Tests run engines on it, and it stands in for
far memory (CXL, another NUMA node).
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

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
    LoadBatch,
    Missing,
    Outcome,
    StoreBatch,
    Throttled,
    Tier,
    check_places,
    gather,
)

_PAGE_BYTES = 4096


@dataclass
class _Block:
    """One stored block: ``content`` is (shards, length)."""

    family: BlockSpec
    content: U8
    checksums: bytes
    sequence: int
    parent: int


_Name = tuple[bytes, int, bytes]


class DramTier(Tier):
    """Blocks in ordinary memory, least recently used first out."""

    name = "dram"

    def __init__(
        self, regions: Sequence[U8], capacity_bytes: int, *, batch_blocks_max: int = 1024
    ) -> None:
        """``regions``: the bytes of each arena segment."""
        self.counts = Counts()
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._regions = list(regions)
        self._capacity_bytes = capacity_bytes
        self._batch_blocks_max = batch_blocks_max
        self._blocks: OrderedDict[_Name, _Block] = OrderedDict()
        self._used_bytes = 0
        self._next = 1
        self._done: list[Completion] = []
        self._evicted: list[Evicted] = []
        self._draining = False

    @property
    def batch_blocks_max(self) -> int:
        return self._batch_blocks_max

    def submit_store(self, batch: StoreBatch) -> int | Throttled:
        self._check(batch)
        if self._draining:
            return Throttled("draining")
        outcomes = [self._store(batch, row) for row in range(len(batch.keys))]
        return self._report(outcomes)

    def submit_load(self, batch: LoadBatch) -> int | Throttled:
        self._check(batch)
        if self._draining:
            return Throttled("draining")
        outcomes = [self._load(batch, row) for row in range(len(batch.keys))]
        return self._report(outcomes)

    def cancel(self, ticket: int) -> None:
        """Do nothing: no batch is ever in progress."""

    def poll(self) -> list[Completion]:
        if self._done:
            os.eventfd_read(self.event_fd)
        done, self._done = self._done, []
        return done

    def look_up(self, family: BlockSpec, keys: Sequence[bytes]) -> Facts:
        facts = Facts.none(family, len(keys))
        for row, key in enumerate(keys):
            block = self._blocks.get((family.namespace, family.group, key))
            if block is not None and block.family == family:
                facts.present[row] = True
                facts.checksums[row] = np.frombuffer(block.checksums, f"V{CHECKSUM_BYTES}")
                facts.sequences[row], facts.parents[row] = block.sequence, block.parent
        return facts

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
        self._draining = True
        return True

    def close(self) -> None:
        if self.event_fd >= 0:
            os.close(self.event_fd)
            self.event_fd = -1

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

    # -- batches -----------------------------------------------------------------------------------

    def _check(self, batch: LoadBatch) -> None:
        if len(batch.keys) > self._batch_blocks_max:
            raise ValueError(f"{len(batch.keys)} blocks, at most {self._batch_blocks_max} a batch")
        check_places(batch.places, batch.family.length, self._regions, _PAGE_BYTES)

    def _report(self, outcomes: list[Outcome]) -> int:
        ticket, self._next = self._next, self._next + 1
        self._done.append(Completion(ticket, gather(outcomes)))
        os.eventfd_write(self.event_fd, 1)
        return ticket


class Wrapper:
    """Passes everything on to ``inner``."""

    def __init__(self, inner: Tier) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Counting(Wrapper):
    """Counts batches, blocks and outcomes: ``store_batches``, ``load_blocks``, ``load_missing``."""

    def __init__(self, inner: Tier) -> None:
        super().__init__(inner)
        self.seen = Counts()
        self._kinds: dict[int, str] = {}

    def submit_store(self, batch: StoreBatch) -> int | Throttled:
        return self._note("store", batch, self.inner.submit_store(batch))

    def submit_load(self, batch: LoadBatch) -> int | Throttled:
        return self._note("load", batch, self.inner.submit_load(batch))

    def poll(self) -> list[Completion]:
        completions = self.inner.poll()
        for each in completions:
            if not each.final:
                continue
            kind = self._kinds.pop(each.ticket)
            for outcome, rows in each.parts:
                self.seen.add(f"{kind}_{type(outcome).__name__.lower()}", len(rows))
        return completions

    @property
    def in_flight(self) -> int:
        """Number of batches without their final completion."""
        return len(self._kinds)

    def _note(self, kind: str, batch: LoadBatch, answer: int | Throttled) -> int | Throttled:
        if isinstance(answer, Throttled):
            self.seen.add(f"{kind}_refused")
            return answer
        self.seen.add(f"{kind}_batches")
        self.seen.add(f"{kind}_blocks", len(batch.keys))
        self._kinds[answer] = kind
        return answer


class Throttling(Wrapper):
    """Passes at most ``bytes_per_s`` through, stores and loads together, and at most ``batches``
    batches at once. Zero stands for no bound.
    """

    def __init__(
        self, inner: Tier, *, clock: Callable[[], float], bytes_per_s: float = 0, batches: int = 0
    ) -> None:
        super().__init__(inner)
        self._clock = clock
        self._bytes_per_s, self._batches = bytes_per_s, batches
        self._free_at = 0.0
        self._open: set[int] = set()

    def submit_store(self, batch: StoreBatch) -> int | Throttled:
        return self._refusal() or self._note(batch, self.inner.submit_store(batch))

    def submit_load(self, batch: LoadBatch) -> int | Throttled:
        return self._refusal() or self._note(batch, self.inner.submit_load(batch))

    def poll(self) -> list[Completion]:
        completions = self.inner.poll()
        self._open -= {each.ticket for each in completions if each.final}
        return completions

    def _refusal(self) -> Throttled | None:
        if self._batches and len(self._open) >= self._batches:
            return Throttled("queue")
        wait = self._free_at - self._clock()
        return Throttled("rate", wait) if self._bytes_per_s and wait > 0 else None

    def _note(self, batch: LoadBatch, answer: int | Throttled) -> int | Throttled:
        if not isinstance(answer, Throttled):
            self._open.add(answer)
            if self._bytes_per_s:
                size = len(batch.keys) * batch.family.shards * batch.family.length
                start = max(self._clock(), self._free_at)
                self._free_at = start + size / self._bytes_per_s
        return answer

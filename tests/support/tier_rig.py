"""A core over memory with real bytes, a lower tier controlled by the test, and the tiering between
them.

After each call the rig checks the books and every servable byte, and that no slot which the tier
reads or writes is in use elsewhere.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import xxhash

from kvhearth.model import I64, U8, U32
from kvhearth_server.core.actions import Sum
from kvhearth_server.core.publishing import PublishPolicy
from kvhearth_server.core.removal import remove_blocks
from kvhearth_server.core.reservations import CommitItem
from kvhearth_server.core.slot_table import CopyState, State
from kvhearth_server.engine.tiering.manager import Tiering
from kvhearth_server.tiers.base import Tier
from kvhearth_server.tiers.remote.mover import Get
from kvhearth_server.tiers.remote.tier import RemoteTier
from support.core_kit import Rig
from support.fake_tier import Batch, FakeTier
from support.mover_double import ScriptedMover

LINEAGE = "a lineage"


@lru_cache(4096)
def content_of(namespace: bytes, epoch: int, key: bytes, shard: int, length: int) -> bytes:
    """Return the bytes of a block's shard, which depend on everything that names it."""
    seed = hashlib.sha256(b"%b %d %b %d" % (namespace, epoch, key, shard)).digest()
    return (seed * (length // len(seed) + 1))[:length]


class TierRig(Rig):
    """A core with a tier below it, and if a test wants it a remote."""

    def __init__(
        self,
        slabs: int = 4,
        *,
        capacity_bytes: int = 1 << 30,
        queue_reads: int = 4096,
        queue_writes: int = 1024,
        local: bool = True,
        remote: bool = False,
        policy: PublishPolicy = PublishPolicy.REUSE,
        buffer_bytes: int = 0,
        life_s: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(slabs, **options)
        count = len(self.geometry.segments)
        self.regions = [
            np.zeros(self.geometry.segment_bytes(index), np.uint8) for index in range(count)
        ]
        if buffer_bytes:
            self.regions.append(np.zeros(buffer_bytes, np.uint8))
        self.tier = FakeTier(self.regions, capacity_bytes)
        self.tier.queue_reads, self.tier.queue_writes = queue_reads, queue_writes
        self.now = 0.0
        self.counted: Counter[tuple[str, str]] = Counter()
        self.spoilt: set[int] = set()
        """Heads of blocks that a test has damaged."""
        self.to_sum: list[Sum] = []
        tiers: list[Tier] = [self.tier] if local else []
        self.mover = ScriptedMover(self.regions)
        self.remote = RemoteTier(self.mover, self.regions, "r", bytes(16), clock=lambda: self.now)
        self.remote.life_s, self.remote.buffer_bytes = life_s, buffer_bytes
        tiers += [self.remote] if remote else []
        self.tiering = Tiering(self.core, tiers, LINEAGE, self.call, lambda: self.now, policy)

    def close(self) -> None:
        """Close all tiers."""
        for each in (self.tiering.tier, self.tier, self.remote):
            each.close()

    def call(self, function: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call the core as the engine does."""
        try:
            return function(*args, **options)
        finally:
            self._apply()

    def _apply(self) -> None:
        for each in self.state.take_actions():
            if isinstance(each, Sum):
                self.to_sum.append(each)
        self.counted.update(self.state.take_counts())

    def check(self) -> None:
        """Check that the books balance, servable blocks are right, and no one else uses the tier's
        slots.
        """
        super().check()
        self.check_bytes()
        self.check_slots()

    def check_bytes(self) -> None:
        """Check that every servable block holds its own bytes."""
        table = self.state.table
        summed = set(np.flatnonzero(table.state == State.SUMMED).tolist()) - self.spoilt
        for number, kv_group, heads in self.state.index.items():
            space = self.state.namespaces.get(number)
            length = space.contract.groups[kv_group].page_bytes
            named = {head: key for key, head in heads.items() if head in summed}
            for blocks in table.blocks_of(np.fromiter(named, np.int64)):
                extents = table.extents(blocks, length).reshape(blocks.shape)
                for row, head in zip(extents, blocks[:, 0].tolist(), strict=True):
                    epoch = int(table.epoch[head])
                    for shard, (slot, segment, offset) in enumerate(
                        row[["slot", "segment", "offset"]].tolist()
                    ):
                        wanted = content_of(space.digest, epoch, named[head], shard, length)
                        here = self.regions[segment][offset : offset + length]
                        assert here.tobytes() == wanted, f"slot {slot}: {named[head]!r}"

    def check_slots(self) -> None:
        """Check that slots the tier reads are held, slots it writes to are LOADING, and no slot is
        both.
        """
        table, seen = self.state.table, set[tuple[int, int]]()
        at = {}
        for state in (State.SUMMED, State.QUARANTINED, State.LOADING):
            slots = np.flatnonzero(table.state == state).astype(np.int64)
            extents = table.extents(slots, 1)
            places = zip(extents["segment"].tolist(), extents["offset"].tolist(), strict=True)
            at.update(zip(places, slots.tolist(), strict=True))
        puts = [
            Batch(0, type(each) is Get, each)  # type: ignore[arg-type]
            for each in self.mover.using_slots()
        ]
        for each in (*self.tier.under_way, *puts):
            places = each.batch.places.reshape(-1)
            places = places[places["region"] < len(self.geometry.segments)]
            for place in zip(places["region"].tolist(), places["offset"].tolist(), strict=True):
                assert place in at, f"{place} is free or reserved while the tier has it"
                assert place not in seen or not each.load, "a slot is loaded to twice"
                slot = at[place]
                if each.load:
                    assert table.state[slot] == State.LOADING
                    seen.add(place)
                else:
                    assert table.state[slot] != State.LOADING
                    assert table.refs[slot] > 0, "a slot is written out, but nobody holds it"

    def view(self, slot: int, length: int) -> U8:
        """Return the bytes of a slot."""
        (extent,) = self.state.table.extents(np.array([slot]), length)
        return self.regions[extent["segment"]][int(extent["offset"]) :][:length]

    def item(
        self,
        named: list[bytes],
        slots: I64,
        generations: U32,
        *,
        kv_group: int = 0,
        parent: bytes = b"",
        summed: bool = True,
    ) -> CommitItem:
        """Return one item of a commit, with its bytes written."""
        owner = self.state.table.owner[slots.reshape(-1)[0]]
        group = next(group for group in self.state.groups if group.number == owner)
        space = self.state.namespaces.get(group.namespace)
        length = space.contract.groups[kv_group].page_bytes
        for key, row in zip(named, slots.tolist(), strict=True):
            for shard, slot in enumerate(row):
                content = content_of(space.digest, space.epoch, key, shard, length)
                self.view(slot, length)[:] = np.frombuffer(content, np.uint8)
        sums = self.sums(slots, length) if summed else None
        return CommitItem(kv_group, named, slots, generations, sums, parent)

    def sums(self, slots: I64, length: int) -> U8:
        """Return checksums of the slots' current bytes, (n, shards, 16)."""
        data = b"".join(
            xxhash.xxh3_128_digest(self.view(slot, length).data)
            for slot in slots.reshape(-1).tolist()
        )
        return np.frombuffer(data, np.uint8).reshape(*slots.shape, 16)

    # -- the tier ----------------------------------------------------------------------------------

    def turn(self, count: int = 1) -> None:
        """Run turns of the loop, with all checks after each."""
        for _ in range(count):
            self.tiering.turn()
            self._apply()
            self.check()

    def settle(self, turns: int = 200) -> None:
        """Run turns until nothing waits and nothing is in progress."""
        for _ in range(turns):
            if self.tiering.idle:
                return
            self.now += 0.01
            self.turn()
        writeback_queue, promotions = self.state.writeback_queue, self.core.promotions
        raise AssertionError(
            f"the tier does not come to rest: {writeback_queue.waiting} blocks wait, "
            f"{len(promotions)} are promoted, "
            f"{self.tiering.promoter.queue.blocks} are wished, {len(self.tier.under_way)} batches, "
            f"{self.counted}"
        )

    def save(self, session: int, named: list[bytes], **options: Any) -> None:
        """Store blocks and let them be written back."""
        self.put(session, named, **options)
        self.settle()

    def copy_state(self, session: int, named: bytes, kv_group: int = 0) -> CopyState | None:
        """Return the state of a block's copy in the tier; None if the block is not in memory."""
        head = self.head(session, named, kv_group)
        return None if head < 0 else CopyState(int(self.state.table.copy_state[head]))

    def drop(self, session: int, named: list[bytes], kv_group: int = 0) -> None:
        """Evict blocks from memory."""
        heads = np.array([self.head(session, each, kv_group) for each in named], np.int64)
        self.call(remove_blocks, self.state, heads, "space")
        self.check()

    def want(
        self, session: int, named: list[bytes], *, kv_group: int = 0, lease_id: int = 0
    ) -> None:
        """Look blocks up, and promote those that only the tier has."""
        found = self.lookup_all(session, {kv_group: named}, lease_id=lease_id)
        self.tiering.promote(found.promotion_queue, self.group(session).number, lease_id)
        self.check()

    def in_memory(self, session: int, named: list[bytes], kv_group: int = 0) -> list[bool]:
        """Return which keys are in memory."""
        return [self.head(session, each, kv_group) >= 0 for each in named]

    def count_of(self, name: str, label: str = "") -> int:
        """Return a counter."""
        self.counted.update(self.state.take_counts())
        return self.counted[name, label]


MakeRig = Callable[..., TierRig]

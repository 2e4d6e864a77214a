"""Promotion of blocks from a slower tier: their slots, their requesters and their outcome."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from kvhearth.model import CHECKSUM_BYTES, I64, Bools, Records
from kvhearth_server.core.actions import Mark
from kvhearth_server.core.commit import Binder, CommitItem
from kvhearth_server.core.evictor import Evictor
from kvhearth_server.core.holds import hold_room
from kvhearth_server.core.lower_tier import PromotionRequest
from kvhearth_server.core.removal import Cause
from kvhearth_server.core.slot_table import KERNEL, State
from kvhearth_server.core.state import CoreState

LOADING_FRACTION_MAX = 0.25
"""Upper bound on bytes being promoted at once, as a fraction of a segment."""

Requester = tuple[int, int]
"""(group number, lease id); lease id 0 stands for the group."""

ANONYMOUS: Requester = (0, 0)
"""Requester of promotions that cannot be cancelled."""
REQUESTERS_MAX = 256
"""Upper bound on the requesters of one promotion; with more it can no longer be cancelled."""


@dataclass(eq=False)
class Promotion:
    """Blocks of one promotion request that are being loaded.

    ``slots`` (n, shards) belong to the tier until ``finish``.
    """

    number: int
    request: PromotionRequest
    segment: int
    epoch: int
    tier_epoch: int
    slots: I64
    requesters: set[Requester] = field(default_factory=set)


class Promotions:
    """All promotions in progress."""

    def __init__(self, state: CoreState, evictor: Evictor) -> None:
        self._state = state
        self._evictor = evictor
        self._binder = Binder(state)
        self._promotions: dict[int, Promotion] = {}
        self._by_key: dict[tuple[int, int, bytes], int] = {}
        self._by_requester: dict[Requester, set[int]] = {}
        self._next = 1
        self.orphaned_loads = np.zeros(0, np.int64)
        """Quarantined slots that a dead daemon's disk requests may still write to."""
        self.short = False
        """Whether the last ``begin`` found less room than it wanted."""

    def __len__(self) -> int:
        """Number of blocks being promoted."""
        return len(self._by_key)

    def begin(
        self,
        request: PromotionRequest,
        requester: Requester,
        blocks_max: int,
    ) -> Promotion | None:
        """Take slots for the first requested blocks that are not being promoted yet.

        Returns None if there is nothing to do, or no room.
        """
        self.short = False
        number, kv_group = request.namespace.number, request.kv_group
        if self._state.namespaces.find(request.namespace.digest) is not request.namespace:
            return None  # forgotten meanwhile
        heads = self._state.index.find(number, kv_group, request.keys)
        here = heads >= 0
        here &= self._state.table.epoch[heads] == request.namespace.epoch
        fresh, named = [], set[bytes]()
        for row, key in enumerate(request.keys):
            if here[row] or key in named:
                continue
            named.add(key)  # a request may name a block twice
            under_way = self._by_key.get((number, kv_group, key))
            if under_way is None:
                fresh.append(row)
            else:
                self._ask(self._promotions[under_way], requester)
        fresh = fresh[:blocks_max]
        if not fresh:
            return None
        slots = self._slots(request, len(fresh))
        self.short = len(slots) < len(fresh)
        if not len(slots):
            return None
        fresh = fresh[: len(slots)]
        taken = request.some(fresh)
        segment = self._state.segment_of[request.namespace.tenant]
        epochs = (request.namespace.epoch, request.namespace.tier_epoch)
        promotion = Promotion(self._next, taken, segment, *epochs, slots)
        self._next += 1
        self._promotions[promotion.number] = promotion
        for key in taken.keys:
            self._by_key[number, kv_group, key] = promotion.number
        self._ask(promotion, requester)
        return promotion

    def _slots(self, request: PromotionRequest, count: int) -> I64:
        """Take and book LOADING slots of shape (n <= count, shards)."""
        state, shards = self._state, request.spec.shards
        segment = state.segment_of[request.namespace.tenant]
        size = state.slot_bytes(request.spec)
        books = state.books[segment]
        # One block may always be promoted alone, however large; otherwise none of its kind ever
        # would.
        most = max(int(books.capacity * LOADING_FRACTION_MAX), size * shards)
        room = min(most - books.loading, hold_room(state, segment))
        quota = request.namespace.quota_bytes
        count = max(0, min(count, room // (size * shards)))
        if quota is not None and count:
            self._evictor.shrink(
                request.namespace, max(0, quota - count * size * shards), Cause.QUOTA
            )
            count = max(0, min(count, (quota - request.namespace.used_bytes) // (size * shards)))
        count = self._evictor.make_room(segment, size, count * shards) // shards if count else 0
        slots = self._populated(segment, state.pools[segment].take(size, count * shards), shards)
        if len(slots):
            state.table.state[slots] = State.LOADING
            state.table.owner[slots] = KERNEL
            request.namespace.used_bytes += state.book(segment, "loading", slots, +1)
            state.actions.append(Mark(slots, State.LOADING, KERNEL))
        return slots.reshape(-1, shards)

    def _populated(self, segment: int, slots: I64, shards: int) -> I64:
        """Give back slots of blocks whose memory may lack pages: tiers do not ask the kernel."""
        there = self._state.table.slab_populated
        if there.all():
            return slots
        good = there[self._state.table.slabs_of(slots)].reshape(-1, shards).all(axis=1)
        good = np.repeat(good, shards)
        self._state.pools[segment].give(slots[~good])
        return slots[good]

    def _ask(self, promotion: Promotion, requester: Requester) -> None:
        if len(promotion.requesters) >= REQUESTERS_MAX:
            requester = ANONYMOUS
        promotion.requesters.add(requester)
        self._by_requester.setdefault(requester, set()).add(promotion.number)

    def drop_requester(self, requester: Requester) -> list[Promotion]:
        """Remove a requester; returns the promotions that have no requester left."""
        alone = []
        for number in self._by_requester.pop(requester, set()):
            promotion = self._promotions[number]
            promotion.requesters.discard(requester)
            if not promotion.requesters:
                alone.append(promotion)
        return alone

    def forget_group(self, group: int) -> list[Promotion]:
        """Remove all requesters of a group; see ``drop_requester``."""
        requesters = [requester for requester in self._by_requester if requester[0] == group]
        return [
            promotion for requester in requesters for promotion in self.drop_requester(requester)
        ]

    def finish(self, promotion: Promotion, good: Bools, checksums: Records) -> int:
        """Take the slots back from the tier and bind the good blocks.

        ``good`` (n,) marks the blocks whose bytes were loaded and verified; ``checksums`` (n,
        shards). Returns the number of blocks that became servable.
        """
        state, request = self._state, promotion.request
        del self._promotions[promotion.number]
        for key in request.keys:
            del self._by_key[request.namespace.number, request.kv_group, key]
        for requester in promotion.requesters:
            waiting = self._by_requester[requester]
            waiting.discard(promotion.number)
            if not waiting:
                del self._by_requester[requester]
        request.namespace.used_bytes -= state.book(
            promotion.segment, "loading", promotion.slots.reshape(-1), -1
        )
        if (promotion.epoch, promotion.tier_epoch) != (
            request.namespace.epoch,
            request.namespace.tier_epoch,
        ):
            good = np.zeros(len(good), np.bool_)
        self._free(promotion, promotion.slots[~good])
        placed = 0
        for first, end in _runs(good):
            keys = request.keys[first:end]
            slots = promotion.slots[first:end]
            sums = np.ascontiguousarray(checksums[first:end]).view(np.uint8)
            item = CommitItem(
                request.kv_group,
                keys,
                slots,
                state.table.generation[slots],
                sums.reshape(*slots.shape, CHECKSUM_BYTES),
                request.parents[first],
            )
            request.namespace.used_bytes += state.table.total_bytes(slots.reshape(-1))
            placed += int(
                self._binder.place(promotion.segment, request.namespace, item, promoted=True).sum()
            )
        return placed

    def _free(self, promotion: Promotion, slots: I64) -> None:
        if slots.size:
            self._state.table.bump(slots.reshape(-1))
            self._state.free_slots(promotion.segment, np.sort(slots.reshape(-1)))

    def free_orphaned_loads(self) -> int:
        """Free the orphaned loads when a dead daemon has no disk request left; returns how many."""
        orphaned_loads, self.orphaned_loads = self.orphaned_loads, self.orphaned_loads[:0]
        state = self._state
        if len(orphaned_loads):
            for segment, slots in state.table.by_segment(np.sort(orphaned_loads)):
                state.book(segment, "quarantined", slots, -1)
                state.free_slots(segment, slots)
            state.count("released_quarantine_slots", len(orphaned_loads))
        return len(orphaned_loads)

    def adopt(self, slots: I64) -> None:
        """Quarantine LOADING slots of an earlier run."""
        state = self._state
        state.table.state[slots] = State.QUARANTINED
        state.table.owner[slots] = KERNEL
        for segment, inside in state.table.by_segment(slots):
            state.book(segment, "quarantined", inside, +1)
        state.count("quarantined_slots", len(slots))
        state.actions.append(Mark(slots, State.QUARANTINED, KERNEL))
        self.orphaned_loads = np.concatenate([self.orphaned_loads, slots])

    def billed(self) -> dict[int, int]:
        """Recount the bytes of LOADING slots by namespace number."""
        found: dict[int, int] = {}
        for promotion in self._promotions.values():
            number = promotion.request.namespace.number
            size = self._state.table.total_bytes(promotion.slots.reshape(-1))
            found[number] = found.get(number, 0) + size
        return found

    def slots(self) -> I64:
        """All LOADING slots, flat."""
        parts = [promotion.slots.reshape(-1) for promotion in self._promotions.values()]
        return np.concatenate([np.zeros(0, np.int64), *parts])


def _runs(good: Bools) -> list[tuple[int, int]]:
    """(first, end) of the runs of true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], good, [False]))))
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]

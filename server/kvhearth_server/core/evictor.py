"""Making room: whom to evict when a store needs a slot, and when a slab changes its slot size.

Eviction happens at allocation, so a store is refused only when nothing evictable is left. Victims
are proposed by the policies; of a proposed block's chain the leaf goes first.
"""

from __future__ import annotations

import numpy as np

from kvhearth.model import I64
from kvhearth_server.core.eviction import EvictionPolicy
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.removal import forget_blocks, remove_blocks
from kvhearth_server.core.state import CoreState
from kvhearth_server.core.table import State, Sunk

_CONSIDER_SLABS_EVERY = 64
"""Between two looks at whether another size's coldest slab is colder than our own next victim."""
_PASSED_MAX = 1024
"""Blocks that wait to be saved and are passed over in one call: a call must stay short."""
_AHEAD_MIN, _AHEAD_MAX = 8, 64
"""Passed-over blocks without a copy below that are saved at once. More of them would drive each
other out of a tier that is smaller than memory, before they can be evicted here: it would write
without end.
"""


class _PassedEnough(Exception):
    """Too many blocks were passed over; a policy that is left in between goes on from there."""


class Evictor:
    """Finds victims; the only caller of the policies' ``victim``."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._refs = state.table.refs.data
        self._pins = state.table.pins.data
        self._countdown = 0
        self._stuck: dict[tuple[int, int], int] = {}
        self._line: tuple[int, int, int] = (-1, -1, -1)
        self._offers = state.offers
        self._unsaved: list[int] = []
        self._passed = 0
        self._under_way = 0
        self._at_any_cost = False

    def make_room(self, segment: int, slot_bytes: int, count: int) -> int:
        """Evict until ``count`` slots of a size can be taken, or nothing more helps; returns how
        many can.
        """
        self._passed = self._under_way = 0
        pool = self._state.pools[segment]
        while (have := pool.can_take(slot_bytes)) < count:
            if (slab := pool.empty_of_others(slot_bytes)) is not None:
                self._take_back(segment, slab)
                continue
            if self._prefer_slab(segment, slot_bytes) and self._steal_slab(segment, slot_bytes):
                continue
            if self._evict_of_size(segment, slot_bytes, count - have):
                continue
            if not self._steal_slab(segment, slot_bytes):
                break
        self._offer_unsaved(count)
        return min(count, have)

    def shrink(
        self, namespace: Namespace, used_bytes_max: int, cause: str, blocks_max: int | None = None
    ) -> int:
        """Evict a namespace's own blocks until it uses at most so many bytes, or ``blocks_max`` are
        evicted; returns how many were. If it was asked for, blocks without a copy below go too.
        """
        evicted = self._passed = self._under_way = 0
        self._at_any_cost = cause == "asked"
        state = self._state
        largest = max(state.slot_bytes(g) * g.shards for g in namespace.contract.groups)
        most = namespace.blocks if blocks_max is None else blocks_max
        while (excess := namespace.used_bytes - used_bytes_max) > 0 and evicted < most:
            # As many as are certainly needed: in batches, but not one block too many.
            policies = list(state.policies.of_namespace(namespace.number))
            count = min(32, most - evicted, -(-excess // max(largest, 1)))
            heads = self._pick(policies, count)
            if not len(heads):
                break
            forget_blocks(state, heads, cause)
            evicted += len(heads)
        self._at_any_cost = False
        self._offer_unsaved(_AHEAD_MAX)
        return evicted

    def evictable(self, head: int) -> bool:
        """Nobody leases or pins the block, and it is not to be saved first."""
        if self._refs[head] or self._pins[head]:
            return False
        return self._offers.evictable(head) or self._at_any_cost or self._pass(head)

    def _pass(self, head: int) -> bool:
        """A block that is to be saved first: false, or so many that it is enough for one call."""
        self._offers.pressed = True
        if self._state.table.sunk.item(head) == Sunk.NOT:
            self._unsaved.append(head)
        else:
            self._under_way += 1
        self._passed += 1
        if self._passed > _PASSED_MAX:
            raise _PassedEnough
        return False

    def _offer_unsaved(self, wanted: int) -> None:
        """Blocks that would have been evicted, but have no copy below any more: the coldest first,
        and no more of them than are wanted soon.
        """
        if self._unsaved:
            heads, self._unsaved = np.array([*dict.fromkeys(self._unsaved)], np.int64), []
            heads = heads[self._state.table.sunk[heads] == Sunk.NOT]
            room = min(max(wanted, _AHEAD_MIN), _AHEAD_MAX) - self._under_way
            self._offers.offer(heads[: max(0, room)])

    def _policies(self, segment: int, slot_bytes: int) -> dict[int, EvictionPolicy]:
        """By namespace, those of one tenant that hold slots of a size: its neighbours' blocks are
        none of its business.
        """
        state = self._state
        return {
            number: policy
            for number, policy in state.policies.of_size(slot_bytes)
            if state.segment_of[state.namespaces.get(number).tenant] == segment
        }

    def _evict_of_size(self, segment: int, slot_bytes: int, count: int) -> bool:
        policies = self._policies(segment, slot_bytes)
        contracts = [self._state.namespaces.get(number).contract for number in policies]
        shards = max((spec.shards for made in contracts for spec in made.groups), default=1)
        # As many as are certainly needed; a block of several shards gives several slots.
        heads = self._pick(list(policies.values()), min(-(-count // shards), 256))
        if not len(heads):
            return False
        forget_blocks(self._state, heads, "space")
        return True

    def _pick(self, policies: list[EvictionPolicy], count: int) -> I64:
        """Up to ``count`` victims, already out of policies and chains, the coldest namespace's
        first.
        """
        heads: list[int] = []
        while len(heads) < count and policies:
            if len(policies) > 1:
                policies.sort(key=_coldness)
            try:
                victim = self._victim(policies[0])
            except _PassedEnough:
                break
            if victim is None:
                policies.pop(0)
                continue
            heads.append(victim)
        return np.array(heads, np.int64)

    def _victim(self, policy: EvictionPolicy) -> int | None:
        """The policy's next victim, or rather the end of its chain; let go by policy and chains."""
        proposed = policy.victim(self.evictable)
        if proposed is None:
            return None
        chains = self._state.chains
        start, end, cuts = self._line
        known = (start, cuts) == (proposed, chains.cuts) and end >= 0
        if not known or not self.evictable(end) or not chains.is_leaf(end):
            # Walking down a long chain for each of its blocks would cost its length squared, so the
            # last victim's parent is where the next search starts, while the same root is proposed
            # and no block was taken out since but by us (its slot may hold another block by now).
            end = chains.leaf(proposed)
        victim = end
        while victim != proposed and not self.evictable(victim):
            # A held tail (a window's lease, a pin) stays; what is in front of it goes from there.
            victim = chains.parent_of(victim)
        parent = chains.parent_of(victim) if victim != proposed else -1
        chains.unlink(victim)
        self._line = (proposed, parent, chains.cuts)
        policy.evict(victim)
        return victim

    def _prefer_slab(self, segment: int, slot_bytes: int) -> bool:
        """Now and then: does another size hold a slab that is colder than our own next victim?"""
        self._countdown -= 1
        if self._countdown > 0:
            return False
        self._countdown = _CONSIDER_SLABS_EVERY
        policies = self._policies(segment, slot_bytes).values()
        try:
            victims = [policy.victim(self.evictable) for policy in policies]
        except _PassedEnough:
            return False
        used_at = self._state.table.used_at
        ages = [int(used_at[head]) for head in victims if head is not None]
        best = self._coldest_slab(segment, slot_bytes)
        return best is not None and (not ages or best[1] < min(ages))

    def _steal_slab(self, segment: int, slot_bytes: int) -> bool:
        """Empty the coldest slab of another size and take it back."""
        place = (segment, slot_bytes)
        if self._stuck.get(place) == self._state.loosened:
            return False
        best = self._coldest_slab(segment, slot_bytes)
        if best is None:
            # Looking through all slabs costs milliseconds; nothing changes until something is let
            # go.
            self._stuck[place] = self._state.loosened
            return False
        slab = best[0]
        heads = self._heads_in(segment, slab)
        if len(heads):
            remove_blocks(self._state, heads, "slab")
        self._take_back(segment, slab)
        return True

    def _take_back(self, segment: int, slab: int) -> None:
        self._state.pools[segment].take_back(slab)

    def _coldest_slab(self, segment: int, slot_bytes: int) -> tuple[int, int] | None:
        """(slab, last use) of the slab of another size that was used longest ago and can be
        emptied.
        """
        table, pool = self._state.table, self._state.pools[segment]
        best: tuple[int, int] | None = None
        waits: tuple[int, int, I64] | None = None
        for slab in pool.slabs_of_others(slot_bytes):
            rows = pool.slots_in(slab)
            states = table.state[rows]
            busy = (states == State.RESERVED) | (states == State.QUARANTINED)
            busy |= (table.refs[rows] > 0) | (table.pins[rows] > 0)
            busy |= states == State.LOADING
            if busy.any():
                continue
            used = int(table.used_at[rows].max(initial=0, where=states != State.FREE))
            unsaved = self._unsaved_in(rows)
            if len(unsaved):
                if waits is None or used < waits[1]:
                    waits = (slab, used, unsaved)
            elif best is None or used < best[1]:
                best = (slab, used)
        if best is None and waits is not None:
            self._offers.pressed = True
            unsaved = waits[2]
            self._unsaved += unsaved[table.sunk[unsaved] == Sunk.NOT][:_PASSED_MAX].tolist()
        return best

    def _unsaved_in(self, rows: slice) -> I64:
        """Heads of blocks with a shard in these slots that are to be saved before they go."""
        table = self._state.table
        if not self._offers.on:
            return np.zeros(0, np.int64)
        links = table.head[rows].astype(np.int64)
        heads = np.where(links > 0, links - 1, np.arange(rows.start, rows.stop))
        unsaved = (table.state[rows] != State.FREE) & (table.sunk[heads] < Sunk.SAVED)
        return np.asarray(heads[unsaved])

    def _heads_in(self, segment: int, slab: int) -> I64:
        """Heads of all blocks that have a shard in a slab."""
        table = self._state.table
        rows = self._state.pools[segment].slots_in(slab)
        slots = np.flatnonzero(table.state[rows] != State.FREE).astype(np.int64) + rows.start
        links = table.head[slots].astype(np.int64)
        return np.unique(np.where(links > 0, links - 1, slots))


def _coldness(policy: EvictionPolicy) -> int:
    rank = policy.age_rank()
    return rank if rank is not None else 1 << 62

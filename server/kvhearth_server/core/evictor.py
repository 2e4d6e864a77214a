"""Eviction of blocks when a store needs slots, and reassignment of slabs to other slot sizes.

Eviction happens at allocation, so a store is refused only when nothing evictable is left. The
policies propose victims; of a proposed block's chain the leaf goes first.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvhearth.model import I64, Bools
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.policies import Coldest
from kvhearth_server.core.removal import Cause, forget_blocks, remove_blocks
from kvhearth_server.core.s3fifo import S3FifoPolicy
from kvhearth_server.core.slot_table import CopyState, State
from kvhearth_server.core.state import CoreState

_CONSIDER_SLABS_EVERY = 64
"""Calls between two checks whether another size's coldest slab is colder than the next victim."""
_BATCH_MAX = 256
"""Upper bound on victims taken from policies and chains before their removal from the index."""
_PASSED_MAX = 1024
"""Upper bound on unsaved blocks that are passed over in one call, which keeps the call short."""
_USED_MAX = 512
"""Used blocks passed over in a call with a bound; each costs as much as half a victim."""
_LINES_MAX = 4096
_AHEAD_MIN, _AHEAD_MAX = 8, 64
"""Passed-over blocks without a copy in a lower tier that are saved at once. Larger batches would
drive each other out of a tier that is smaller than memory before the blocks can be evicted here,
and writing would never end.
"""


class _Line(NamedTuple):
    """Start of the next search for the end of a chain, and its generation at that time."""

    end: int
    generation: int


class Evictor:
    """Finds victims; the only caller of the policies' ``victim``."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        self._refs = state.table.refs.data
        self._pins = state.table.pins.data
        self._groups = state.table.group.data
        self._space_of = state.table.namespace.data
        self._ended = state.namespaces.ended
        state.namespaces.evict = self._evict_ended
        self._evicted = 0
        self._cold: dict[tuple[int, int], Coldest] = {}
        self._countdown = 0
        self._stuck: dict[tuple[int, int, bool], int] = {}
        self._lines: dict[int, _Line] = {}
        self._cuts = 0
        self._used_left: int | None = None
        self._writeback_queue = state.writeback_queue
        self._unsaved: list[int] = []
        self._passed = 0
        self._under_way = 0
        self._at_any_cost = False
        self._pins_too = False
        """Whether pinned blocks go, too: they are the last ones."""
        self._only_pins: dict[tuple[int, int], int] = {}
        """By segment and slot size the time (``release_epoch``) when they were the only ones."""
        self._enough = False
        """Whether the last search for a victim ended because too many blocks were passed over."""
        self.cut_short = False
        """Whether the last call stopped at its bound, so that another one may do more."""

    def make_room(
        self, segment: int, slot_bytes: int, count: int, blocks_max: int | None = None
    ) -> int:
        """Evict until ``count`` slots of a size can be taken; returns the number that can be taken.

        Pinned blocks go last: a hint never makes a store fail. Stops earlier if nothing more helps,
        or ``blocks_max`` blocks are evicted (more only to empty a slab).
        """
        self._passed = self._under_way = 0
        self._bound(blocks_max)
        self._evicted, place = 0, (segment, slot_bytes)
        self._pins_too = self._only_pins.get(place) == self._state.release_epoch
        pool = self._state.pools[segment]
        self._coldest(segment, slot_bytes)  # with each call, so that no call finds a thousand new
        while (have := pool.can_take(slot_bytes)) < count:
            if self.cut_short or (blocks_max is not None and self._evicted >= blocks_max):
                self.cut_short = True
                break
            most = _BATCH_MAX if blocks_max is None else blocks_max - self._evicted
            if (slab := pool.empty_of_others(slot_bytes)) is not None:
                self._take_back(segment, slab)
                continue
            if self._prefer_slab(segment, slot_bytes) and self._steal_slab(segment, slot_bytes):
                continue
            if self._evict_of_size(segment, slot_bytes, count - have, min(most, _BATCH_MAX)):
                continue
            if self.cut_short or self._steal_slab(segment, slot_bytes):
                continue
            if self._pins_too or not self._state.books[segment].pinned:
                break
            self._pins_too, self._passed = True, 0
        if self._pins_too:
            self._only_pins[place], self._pins_too = self._state.release_epoch, False
        self._offer_unsaved(count)
        if self._ended and self._evicted:
            self._state.namespaces.forget_ended()
        return min(count, have)

    def _evict_ended(self, namespace: Namespace) -> None:
        """Evict the blocks of a namespace that makes place for another one."""
        self.shrink(namespace, 0, Cause.SPACE)

    def shrink(
        self, namespace: Namespace, used_bytes_max: int, cause: Cause, blocks_max: int | None = None
    ) -> int:
        """Evict a namespace's own blocks until it uses at most ``used_bytes_max``.

        Pinned ones go last. Stops earlier after ``blocks_max`` blocks. Returns the number of
        evicted blocks. With the cause ``ASKED``, blocks without a copy in a lower tier go too.
        """
        evicted = self._passed = self._under_way = 0
        self._bound(blocks_max)
        self._at_any_cost = cause is Cause.ASKED
        state = self._state
        largest = max(state.slot_bytes(g) * g.shards for g in namespace.contract.groups)
        cold = Coldest()
        for name, policy in enumerate(state.policies.of_namespace(namespace.number)):
            cold.note(name, policy)
        while (excess := namespace.used_bytes - used_bytes_max) > 0:
            if blocks_max is not None and evicted >= blocks_max:
                self.cut_short = True
                break
            # Never more than certainly needed: in batches, but not one block too many.
            most = min(_BATCH_MAX, -(-excess // max(largest, 1)))
            if blocks_max is not None:
                most = min(most, blocks_max - evicted)
            heads = self._pick(cold, most)
            if not len(heads):
                if self._pins_too or self.cut_short:
                    break
                self._pins_too, self._passed = True, 0
                continue
            forget_blocks(state, heads, cause)
            evicted += len(heads)
        self._at_any_cost = self._pins_too = False
        self._offer_unsaved(_AHEAD_MAX)
        return evicted

    def _bound(self, blocks_max: int | None) -> None:
        """Start a call that may stop early."""
        self.cut_short = False
        self._used_left = None if blocks_max is None else _USED_MAX

    def evictable(self, head: int) -> bool:
        """Whether the block is not leased, not pinned unless all that are not are gone, and need
        not be saved first.
        """
        if self._refs[head] or (self._pins[head] and not self._pins_too):
            return False
        if self._writeback_queue.evictable(head) or self._at_any_cost:
            return True
        return self._space_of[head] in self._ended

    def _pass_over(self, head: int, used: bool) -> bool:
        """Note a block that was passed over, as it was used or is not evictable; return whether
        enough were. Many used ones cost as much as victims.
        """
        if used:
            if self._used_left is not None:
                self._used_left -= 1
                self.cut_short = self._enough = self._used_left < 0
        elif not (self._refs[head] or (self._pins[head] and not self._pins_too)):
            self._writeback_queue.under_pressure = True
            if self._state.table.copy_state.item(head) == CopyState.NOT:
                self._unsaved.append(head)
            else:
                self._under_way += 1
            self._passed += 1
            self._enough = self._passed > _PASSED_MAX
        return self._enough

    def _offer_unsaved(self, wanted: int) -> None:
        """Queue blocks for write-back that would have been evicted, but have no copy any more.

        The coldest come first, and no more of them than will be wanted soon.
        """
        if self._unsaved:
            heads, self._unsaved = np.array([*dict.fromkeys(self._unsaved)], np.int64), []
            heads = heads[self._state.table.copy_state[heads] == CopyState.NOT]
            room = min(max(wanted, _AHEAD_MIN), _AHEAD_MAX) - self._under_way
            self._writeback_queue.offer(heads[: max(0, room)])

    def _coldest(self, segment: int, slot_bytes: int) -> Coldest:
        """Policies of one tenant that hold slots of a size; other tenants are excluded."""
        state = self._state
        for number, size in state.policies.take_changed():
            policy = state.policies.get(number, size)
            if number in self._ended:
                self._countdown = 0  # a slab of its size may be the first to go
            if policy is not None:
                place = (state.segment_of[state.namespaces.get(number).tenant], size)
                self._cold.setdefault(place, Coldest(self._ended)).note(number, policy)
        return self._cold.setdefault((segment, slot_bytes), Coldest(self._ended))

    def _evict_of_size(self, segment: int, slot_bytes: int, count: int, most: int) -> bool:
        """Evict up to ``most`` blocks of one tenant that have ``count`` slots, or just more."""
        heads = self._pick(self._coldest(segment, slot_bytes), most, slots=count)
        if not len(heads):
            return False
        forget_blocks(self._state, heads, Cause.SPACE)
        self._evicted += len(heads)
        return True

    def _pick(self, cold: Coldest, most: int, slots: int | None = None) -> I64:
        """Pick up to ``most`` victims with ``slots`` slots together, the coldest policy's first.

        They are already out of policies and chains.
        """
        heads: list[int] = []
        freed, namespaces = 0, self._state.namespaces
        while len(heads) < most and (slots is None or freed < slots):
            if (found := cold.first()) is None:
                break
            name, policy = found
            victim = self._victim(policy)
            if victim is None and not self._enough:
                cold.skip(name)
                continue
            cold.note(name, policy)
            if victim is None:
                break
            heads.append(victim)
            if slots is not None:
                groups = namespaces.get(name).contract.groups
                freed += groups[self._groups[victim]].shards
        cold.restore()
        return np.array(heads, np.int64)

    def _proposed(self, policy: S3FifoPolicy) -> int | None:
        """The policy's next victim; None for none, or if enough blocks were passed over."""
        self._enough = False
        return policy.victim(self.evictable, self._pass_over)

    def _victim(self, policy: S3FifoPolicy) -> int | None:
        """Remove the policy's next victim, or the end of its chain, from policy and chains."""
        proposed = self._proposed(policy)
        if proposed is None:
            return None
        end = self._end_of(proposed)
        chains, victim = self._state.chains, end
        while victim != proposed and not self.evictable(victim):
            # A kept tail (a window's lease, a pin) stays; eviction proceeds in front of it.
            if self._pass_over(victim, used=False):
                return None
            victim = chains.parent_of(victim)
        parent = chains.parent_of(victim) if victim != proposed else -1
        chains.unlink(victim)
        self._cuts = chains.cuts
        if parent >= 0:
            self._lines[proposed] = _Line(parent, self._state.table.generation.item(parent))
        else:
            self._lines.pop(proposed, None)
        policy.evict(victim)
        return victim

    def _end_of(self, proposed: int) -> int:
        """The end of the chain of a proposed block.

        Walking down a long chain for each of its blocks would cost its length squared. Therefore
        the next search starts at the last victim's parent, one for each root because namespaces
        take turns. The start is valid while it is the same block and only this evictor has unlinked
        blocks since.
        """
        state = self._state
        if state.chains.cuts != self._cuts or len(self._lines) > _LINES_MAX:
            self._lines.clear()
        line = self._lines.get(proposed)
        if line is not None:
            same = state.table.generation.item(line.end) == line.generation
            # A block that was taken out may still have its old generation; no policy tracks it.
            same = same and state.policies.tracks(line.end)
            if same and self.evictable(line.end) and state.chains.is_leaf(line.end):
                return line.end
        return state.chains.leaf(proposed)

    def _prefer_slab(self, segment: int, slot_bytes: int) -> bool:
        """Check now and then whether another size holds a slab colder than the next victim."""
        self._countdown -= 1
        if self._countdown > 0:
            return False
        self._countdown = _CONSIDER_SLABS_EVERY
        age = self._next_age(self._coldest(segment, slot_bytes))
        if age is None and self._enough:
            return False
        best = self._coldest_slab(segment, slot_bytes)
        found = best is not None and (age is None or best[1] < age)
        if found:
            self._countdown = 0  # there may be more like it
        return found

    def _next_age(self, cold: Coldest) -> int | None:
        """Time of the last use of the next victim; None if there is none, or ``_enough`` was seen
        before it.
        """
        victim, self._enough = None, False
        while victim is None and not self._enough and (found := cold.first()) is not None:
            name, policy = found
            victim = self._proposed(policy)
            cold.note(name, policy)
            if victim is None and not self._enough:
                cold.skip(name)
        cold.restore()
        return None if victim is None else self._state.table.used_at.item(victim)

    def _steal_slab(self, segment: int, slot_bytes: int) -> bool:
        """Empty the coldest slab of another size and take it back."""
        place = (segment, slot_bytes, self._pins_too)
        if self._stuck.get(place) == self._state.release_epoch:
            return False
        best = self._coldest_slab(segment, slot_bytes)
        if best is None:
            # Scanning all slabs costs milliseconds, and nothing changes until something is
            # released.
            self._stuck[place] = self._state.release_epoch
            return False
        slab = best[0]
        heads = self._heads_in(segment, slab)
        if len(heads):
            remove_blocks(self._state, heads, Cause.SLAB)
            self._evicted += len(heads)
        self._take_back(segment, slab)
        return True

    def _take_back(self, segment: int, slab: int) -> None:
        self._state.pools[segment].take_back(slab)

    def _coldest_slab(self, segment: int, slot_bytes: int) -> tuple[int, int] | None:
        """(slab, last use) of the least recently used slab of another size that can be emptied."""
        table, pool = self._state.table, self._state.pools[segment]
        best: tuple[int, int] | None = None
        waits: tuple[int, int, I64] | None = None
        for slab in pool.slabs_of_others(slot_bytes):
            rows = pool.slots_in(slab)
            states = table.state[rows]
            busy = (states == State.RESERVED) | (states == State.QUARANTINED)
            busy |= (table.refs[rows] > 0) | (states == State.LOADING)
            if not self._pins_too:
                busy |= table.pins[rows] > 0
            if busy.any():
                continue
            counted = states != State.FREE
            if self._ended:
                counted &= ~self._of_ended(rows)
            used = int(table.used_at[rows].max(initial=0, where=counted))
            unsaved = self._unsaved_in(rows)
            if len(unsaved):
                if waits is None or used < waits[1]:
                    waits = (slab, used, unsaved)
            elif best is None or used < best[1]:
                best = (slab, used)
        if best is None and waits is not None:
            self._writeback_queue.under_pressure = True
            unsaved = waits[2]
            self._unsaved += unsaved[table.copy_state[unsaved] == CopyState.NOT][
                :_PASSED_MAX
            ].tolist()
        return best

    def _unsaved_in(self, rows: slice) -> I64:
        """Heads of blocks with a shard in these slots that must be saved before eviction."""
        table = self._state.table
        if not self._writeback_queue.on:
            return np.zeros(0, np.int64)
        links = table.head[rows].astype(np.int64)
        heads = np.where(links > 0, links - 1, np.arange(rows.start, rows.stop))
        unsaved = (table.state[rows] != State.FREE) & (table.copy_state[heads] < CopyState.SAVED)
        if self._ended:
            unsaved &= ~self._of_ended(rows)
        return np.asarray(heads[unsaved])

    def _of_ended(self, rows: slice) -> Bools:
        """Which slots have blocks of ended namespaces."""
        return np.isin(self._state.table.namespace[rows], list(self._ended))

    def _heads_in(self, segment: int, slab: int) -> I64:
        table = self._state.table
        rows = self._state.pools[segment].slots_in(slab)
        slots = np.flatnonzero(table.state[rows] != State.FREE).astype(np.int64) + rows.start
        links = table.head[slots].astype(np.int64)
        return np.unique(np.where(links > 0, links - 1, slots))

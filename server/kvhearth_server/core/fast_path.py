"""Fast paths of commit and lookup: one key in one slot, and lookups of whole prefixes.

``SingleCommit`` and ``SingleFastPath`` serve engines that decode, a block at a time. They replace
``reservations``, ``commit`` and ``lookup`` with a few plain numbers instead of some hundred calls
of numpy. Only plain requests that succeed are handled here. For everything else the answer is "no"
with nothing changed, and the general path decides, refuses and words the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvhearth.contract import GroupKind, GroupSpec
from kvhearth.model import CHECKSUM_BYTES, EXTENT_RECORD, FLAG_SUMMED, FLAG_VERIFY, I64, Records
from kvhearth_server.core.actions import BindOne, EventKind, SumOne
from kvhearth_server.core.groups import Group
from kvhearth_server.core.holds import hold_room
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.slot_table import Pick, State, all_zero, ascending, numbers
from kvhearth_server.core.state import CoreState

# Each access to an enumeration member by name costs a search.
_RESERVED, _COMMITTED, _SUMMED = int(State.RESERVED), int(State.COMMITTED), int(State.SUMMED)
_BOUND = (State.COMMITTED, State.SUMMED)
"""States of a bound slot, by whether the checksum is known."""
_FULL, _STORED = GroupKind.FULL, EventKind.STORED


class SingleCommit(NamedTuple):
    """One key of a KV group to bind to one slot; ``checksum`` and ``parent`` may be empty."""

    kv_group: int
    key: bytes
    slot: int
    generation: int
    checksum: bytes
    parent: bytes


class SingleLookup(NamedTuple):
    """One key of a KV group to be leased."""

    kv_group: int
    key: bytes
    lease_id: int


class SingleFastPath:
    """Fast path for single blocks of attached schedulers."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        table = state.table
        self._stride = table.geometry.stride
        self._slab_bytes = table.geometry.slab_bytes
        self._slot_count = table.geometry.slot_count
        self._slab_slot_bytes = table.slab_slot_bytes.data
        self._slab_segment = table.slab_segment.data
        self._slab_first = table.slab_first.data
        self._slot_state = table.state.data
        self._owner = table.owner.data
        self._generation = table.generation
        self._namespace = table.namespace.data
        self._group = table.group.data
        self._epoch = table.epoch.data
        self._flags = table.flags.data
        self._used_at = table.used_at.data
        self._copy_state = table.copy_state.data
        self._sequence = table.sequence.data
        self._parent = table.parent.data
        self._refs = table.refs.data
        self._pins = table.pins.data
        self._checksum = table.checksum.view(np.uint8).data

    def commit(self, group: Group, namespace: Namespace, one: SingleCommit) -> bool:
        """Bind one new key to its slot; False, with nothing changed, if the general path must
        decide. The checksum has its full length or is empty.
        """
        state = self._state
        kv_group, key, slot, generation, checksum, parent = one
        spec = self._spec(namespace, kv_group)
        if spec is None or len(parent) not in (0, len(key)):
            return False
        size = state.slot_bytes(spec)
        if not self._is_reserved(group, slot, generation, size):
            return False
        if not state.index.bind_new(namespace.number, kv_group, key, slot):
            return False
        books = state.ledger.segments[group.segment]
        books.reserved -= size
        books.committed += size
        group.stock_bytes -= size
        namespace.blocks += 1
        state.release_epoch += 1
        self._fill(namespace, one)
        if parent:
            before = state.index.find_one(namespace.number, kv_group, parent)
            if before not in (-1, slot):
                state.chains.link(before, slot)
        state.policies.insert_one(namespace.number, size, slot, key)
        self._announce(namespace, one, spec.page_bytes)
        if checksum and state.writeback_queue.follows:
            state.writeback_queue.offer(np.array([slot], np.int64))
        return True

    def are_reserved(
        self, group: Group, namespace: Namespace, ones: Sequence[SingleCommit]
    ) -> bool:
        """Whether the group holds each block's slot, none of them twice, for blocks of its size."""
        sizes: dict[int, int] = {}
        for kv_group, key, slot, generation, _, parent in ones:
            size = sizes.get(kv_group)
            if size is None:
                spec = self._spec(namespace, kv_group)
                if spec is None:
                    return False
                size = sizes[kv_group] = self._state.slot_bytes(spec)
            if len(parent) not in (0, len(key)):
                return False
            if not self._is_reserved(group, slot, generation, size):
                return False
        return len({one.slot for one in ones}) == len(ones)

    def lookup(self, group: Group, namespace: Namespace, asked: SingleLookup) -> int:
        """Lease one key's block and count the lookup; returns its head, or -1.

        -1 means that the general path must decide. The caller enters the lease and marks the block
          as used.
        """
        state = self._state
        kv_group, key, lease_id = asked
        spec = self._spec(namespace, kv_group)
        if spec is None or spec.kind is not _FULL:
            return -1
        head = state.index.find_one(namespace.number, kv_group, key)
        if head < 0 or self._epoch[head] != namespace.epoch or self._slot_state[head] != _SUMMED:
            return -1
        if lease_id in group.leases or lease_id in group.released_early:
            return -1
        books, limits = state.ledger.segments[group.segment], state.limits
        if len(group.leases) >= limits.leases_max or books.leased_slots >= limits.leased_slots_max:
            return -1
        if not self._refs[head] and not self._pins[head]:
            size = self._slab_slot_bytes[head // self._stride]
            if size > hold_room(state, group.segment):
                return -1
            books.held += size
        books.leased_slots += 1
        self._refs[head] += 1
        state.count_all(
            {
                ("leased_keys", ""): 1,
                ("leased_bytes", ""): spec.page_bytes,
                ("lookups", ""): 1,
                ("lookup_keys", ""): 1,
                ("hit_keys", ""): 1,
                ("asked_tokens", ""): spec.block_tokens,
                ("hit_tokens", ""): spec.block_tokens,
            }
        )
        namespace.traffic.hit_keys += 1
        count_tokens(group, namespace, spec.block_tokens, spec.block_tokens)
        return head

    def mark_used(self, head: int) -> None:
        """Mark a bound head as used."""
        state = self._state
        state.policies.touch_one(head)
        self._used_at[head] = state.tick()
        if state.writeback_queue.follows:
            state.writeback_queue.used(np.array([head], np.int64))

    def extent(self, slot: int, length: int) -> bytes:
        """The extent record of one SUMMED slot; see ``SlotTable.extents``."""
        slab, row = divmod(slot, self._stride)
        offset = (slab - self._slab_first[slab]) * self._slab_bytes
        start = slot * CHECKSUM_BYTES
        return EXTENT_RECORD.pack(
            slot,
            self._slab_segment[slab],
            self._flags[slot] & FLAG_VERIFY | FLAG_SUMMED,
            offset + row * self._slab_slot_bytes[slab],
            length,
            self._generation.item(slot),
            self._checksum[start : start + CHECKSUM_BYTES].tobytes(),
        )

    def _spec(self, namespace: Namespace, kv_group: int) -> GroupSpec | None:
        groups = namespace.contract.groups
        spec = groups[kv_group] if 0 <= kv_group < len(groups) else None
        return spec if spec is not None and spec.shards == 1 else None

    def _is_reserved(self, group: Group, slot: int, generation: int, size: int) -> bool:
        return (
            0 <= slot < self._slot_count
            and self._slot_state[slot] == _RESERVED
            and self._owner[slot] == group.number
            and self._generation.item(slot) == generation
            and self._slab_slot_bytes[slot // self._stride] == size
        )

    def _fill(self, namespace: Namespace, one: SingleCommit) -> None:
        slot, checksum = one.slot, one.checksum
        self._namespace[slot] = namespace.number
        self._group[slot] = one.kv_group
        self._epoch[slot] = namespace.epoch
        self._owner[slot] = self._flags[slot] = self._copy_state[slot] = 0
        self._used_at[slot] = self._state.tick()
        if not checksum:
            self._slot_state[slot] = _COMMITTED
            return
        start = slot * CHECKSUM_BYTES
        self._checksum[start : start + CHECKSUM_BYTES] = checksum
        self._slot_state[slot] = _SUMMED

    def _announce(self, namespace: Namespace, one: SingleCommit, page_bytes: int) -> None:
        state, slot, summed = self._state, one.slot, bool(one.checksum)
        state.sequence += 1
        self._sequence[slot] = state.sequence
        state.actions.append(
            BindOne(
                slot,
                one.generation,
                state.sequence,
                self._parent[slot] - 1,
                page_bytes,
                one.key,
                namespace.number,
                one.kv_group,
                namespace.epoch,
                _BOUND[summed],
            )
        )
        state.count_all({("stored_blocks", ""): 1, ("stored_bytes", ""): page_bytes})
        namespace.traffic.stored_blocks += 1
        if not summed:
            state.actions.append(SumOne(slot, one.generation))
            return
        state.count("summed_blocks")
        state.events.append(_STORED, namespace.number, one.kv_group, [one.key], tier="dram")


# Each access to an enumeration member by name costs a search.
_FULL_WHOLE = GroupKind.FULL
_SUMMED_WHOLE = bytes([State.SUMMED])
"""A SUMMED state as the table's column holds it."""
_ONE = np.uint32(1)


class PrefixHit(NamedTuple):
    """A leased result: its slots, ascending, and the extents in the order of the keys."""

    slots: I64
    extents: Records


class PrefixFastPath:
    """Fast path for lookups of attached schedulers that find all keys."""

    def __init__(self, state: CoreState) -> None:
        self._state = state

    def lookup(
        self,
        group: Group,
        namespace: Namespace,
        kv_group: int,
        keys: Sequence[bytes],
        lease_id: int,
    ) -> PrefixHit | None:
        """Lease the blocks of all keys, mark them as used and count the lookup.

        The caller enters the lease. Returns None, with nothing changed, if the general path must
        decide.
        """
        state, table = self._state, self._state.table
        groups, count = namespace.contract.groups, len(keys)
        if not count or not 0 <= kv_group < len(groups):
            return None
        spec = groups[kv_group]
        if (
            spec.kind is not _FULL_WHOLE
            or spec.shards > 1
            or not self._may_lease(group, lease_id, count)
        ):
            return None
        found = state.index.find_rows(namespace.number, kv_group, keys)
        if found is None:
            return None
        rows = found if isinstance(found, slice) else _each_once(found)
        if rows is None or not self._are_served(rows, count, namespace, kv_group):
            return None
        if not self._hold(group, rows, count, state.slot_bytes(spec)):
            return None
        self._mark_used(rows)
        tokens = count * spec.block_tokens
        self._count(count, spec.page_bytes, tokens)
        namespace.traffic.hit_keys += count
        count_tokens(group, namespace, tokens, tokens)
        if isinstance(found, slice):
            extents = table.extents_beside(found, spec.page_bytes)
        else:
            extents = table.extents(found, spec.page_bytes, summed=True)
        return PrefixHit(numbers(rows), extents)

    def _may_lease(self, group: Group, lease_id: int, count: int) -> bool:
        if lease_id in group.leases or lease_id in group.released_early:
            return False
        limits, books = self._state.limits, self._state.ledger.segments[group.segment]
        if count > limits.keys_max or len(group.leases) >= limits.leases_max:
            return False
        return books.leased_slots + count <= limits.leased_slots_max

    def _are_served(self, rows: Pick, count: int, namespace: Namespace, kv_group: int) -> bool:
        # Bytes are compared at once; numbers cost several times as much, mostly numpy's own
        # overhead.
        table = self._state.table
        for column, word in (
            (table.state, _SUMMED_WHOLE),
            (table.group, bytes([kv_group])),
            (table.namespace, namespace.number.to_bytes(2, "little")),
            (table.epoch, namespace.epoch.to_bytes(4, "little")),
        ):
            if column[rows].tobytes() != word * count:
                return False
        return True

    def _hold(self, group: Group, rows: Pick, count: int, slot_bytes: int) -> bool:
        """Count one more lease on each; False if that would exceed the cap on held bytes."""
        state, table = self._state, self._state.table
        refs, pins = table.refs[rows], table.pins[rows]
        loose = all_zero(refs) and all_zero(pins)
        free = count if loose else count - int(np.count_nonzero(refs | pins))
        if free * slot_bytes > hold_room(state, group.segment):
            return False
        books = state.ledger.segments[group.segment]
        books.held += free * slot_bytes
        books.leased_slots += count
        table.refs[rows] = 1 if loose else refs + _ONE
        return True

    def _mark_used(self, rows: Pick) -> None:
        state = self._state
        state.policies.touch(rows)
        state.table.used_at[rows] = state.tick()
        if state.writeback_queue.follows:
            state.writeback_queue.used(numbers(rows))

    def _count(self, count: int, page_bytes: int, tokens: int) -> None:
        self._state.count_all(
            {
                ("leased_keys", ""): count,
                ("leased_bytes", ""): count * page_bytes,
                ("lookups", ""): 1,
                ("lookup_keys", ""): count,
                ("hit_keys", ""): count,
                ("asked_tokens", ""): tokens,
                ("hit_tokens", ""): tokens,
            }
        )


def _each_once(heads: I64) -> Pick | None:
    """Heads in ascending order; None if one is missing (-1) or occurs twice."""
    if np.count_nonzero(heads[1:] > heads[:-1]) < len(heads) - 1:
        heads = np.sort(heads)
        if np.count_nonzero(heads[1:] == heads[:-1]):
            return None
    return ascending(heads) if heads.item(0) >= 0 else None


def count_tokens(group: Group, namespace: Namespace, asked: int, hit: int) -> None:
    """Count the tokens of a lookup for its engine and for its namespace."""
    group.asked_tokens += asked
    group.hit_tokens += hit
    traffic = namespace.traffic
    traffic.asked_tokens += asked
    traffic.hit_tokens += hit

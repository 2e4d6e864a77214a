"""One key, one slot: the commits and lookups of an engine that decodes, a block at a time.

They do what ``writing``, ``binding`` and ``reading`` do, in a few plain numbers instead of some
hundred calls of numpy. Only what is plain and goes well is done here; for everything else the
answer is "no" with nothing changed, and the general way decides, refuses and finds the words.
"""

from __future__ import annotations

import numpy as np

from kvhearth.contract import GroupKind, GroupSpec
from kvhearth.model import CHECKSUM_BYTES, U8
from kvhearth_server.core.actions import Bind, Sum
from kvhearth_server.core.binding import CommitItem
from kvhearth_server.core.events import EventKind
from kvhearth_server.core.groups import Group
from kvhearth_server.core.holding import hold_room
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.state import CoreState
from kvhearth_server.core.table import State

# A member of an enumeration costs a search each time it is named.
_RESERVED, _SUMMED = int(State.RESERVED), int(State.SUMMED)
_BOUND = (State.COMMITTED, State.SUMMED)
"""By whether the checksum is known."""
_FULL, _STORED = GroupKind.FULL, EventKind.STORED
_ONE_SUM = (1, 1, CHECKSUM_BYTES)


class Singles:
    """Single blocks of attached schedulers."""

    def __init__(self, state: CoreState) -> None:
        self._state = state
        table = state.table
        self._stride = table.geometry.stride
        self._slot_count = table.geometry.slot_count
        self._slab_slot_bytes = table.slab_slot_bytes.data
        self._slot_state = table.state.data
        self._owner = table.owner.data
        self._generation = table.generation
        self._namespace = table.namespace.data
        self._group = table.group.data
        self._epoch = table.epoch.data
        self._flags = table.flags.data
        self._used_at = table.used_at.data
        self._sunk = table.sunk.data
        self._sequence = table.sequence.data
        self._parent = table.parent.data
        self._refs = table.refs.data
        self._pins = table.pins.data
        self._checksum: U8 = table.checksum.view(np.uint8)

    def commit(self, group: Group, namespace: Namespace, item: CommitItem) -> bool:
        """Bind one new key to its slot; False: see the module."""
        state = self._state
        spec = self._spec(namespace, item.kv_group)
        if spec is None or len(item.keys) != 1 or item.slots.shape != (1, 1):
            return False
        if item.generations.shape != (1, 1) or len(item.parent) not in (0, len(item.keys[0])):
            return False
        if item.checksums is not None and item.checksums.shape != _ONE_SUM:
            return False
        slot, (key,) = int(item.slots[0, 0]), item.keys
        size = state.slot_bytes(spec)
        if not self._is_reserved(group, slot, int(item.generations[0, 0]), size):
            return False
        if not state.index.bind_new(namespace.number, item.kv_group, key, slot):
            return False
        books = state.ledger.segments[group.segment]
        books.reserved -= size
        books.committed += size
        group.stock_bytes -= size
        namespace.blocks += 1
        state.loosened += 1
        self._fill(namespace, item, slot)
        if item.parent:
            before = state.index.find_one(namespace.number, item.kv_group, item.parent)
            if before not in (-1, slot):
                state.chains.link(before, slot)
        state.policies.insert(namespace.number, size, item.slots[0], [key])
        self._announce(namespace, item, slot, spec.page_bytes)
        if item.checksums is not None:
            state.offers.offer(item.slots[:, 0])
        return True

    def lookup(
        self, group: Group, namespace: Namespace, kv_group: int, key: bytes, lease_id: int
    ) -> int:
        """Hold one key's block and count that; its head, or -1: see the module.

        The caller enters the lease and marks the block as used.
        """
        state = self._state
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
        state.count("leased_keys")
        state.count("leased_bytes", spec.page_bytes)
        state.count("lookups")
        state.count("lookup_keys")
        state.count("hit_keys")
        return head

    def _spec(self, namespace: Namespace, kv_group: int) -> GroupSpec | None:
        groups = namespace.contract.groups
        spec = groups[kv_group] if 0 <= kv_group < len(groups) else None
        return spec if spec is not None and spec.shards == 1 else None

    def _is_reserved(self, group: Group, slot: int, generation: int, size: int) -> bool:
        """By this group, at this generation, in a slab of this slot size."""
        return (
            0 <= slot < self._slot_count
            and self._slot_state[slot] == _RESERVED
            and self._owner[slot] == group.number
            and self._generation.item(slot) == generation
            and self._slab_slot_bytes[slot // self._stride] == size
        )

    def _fill(self, namespace: Namespace, item: CommitItem, slot: int) -> None:
        self._namespace[slot] = namespace.number
        self._group[slot] = item.kv_group
        self._epoch[slot] = namespace.epoch
        self._owner[slot] = self._flags[slot] = self._sunk[slot] = 0
        self._used_at[slot] = self._state.tick()
        if item.checksums is None:
            self._slot_state[slot] = int(_BOUND[False])
            return
        start = slot * CHECKSUM_BYTES
        self._checksum[start : start + CHECKSUM_BYTES] = item.checksums[0, 0]
        self._slot_state[slot] = _SUMMED

    def _announce(self, namespace: Namespace, item: CommitItem, slot: int, page_bytes: int) -> None:
        state, keys = self._state, [item.keys[0]]
        state.sequence += 1
        self._sequence[slot] = state.sequence
        state.actions.append(
            Bind(
                item.slots,
                np.array([state.sequence], np.int64),
                np.array([self._parent[slot] - 1], np.int64),
                page_bytes,
                keys,
                namespace.number,
                item.kv_group,
                namespace.epoch,
                _BOUND[item.checksums is not None],
            )
        )
        state.count("stored_blocks")
        state.count("stored_bytes", page_bytes)
        if item.checksums is None:
            state.actions.append(Sum(item.slots, item.generations))
            return
        state.count("summed_blocks")
        state.events.append(_STORED, namespace.number, item.kv_group, keys, tier="dram")

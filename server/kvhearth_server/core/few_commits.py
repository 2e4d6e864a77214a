"""Fast path of commits of a few blocks, each of one shard: engines that decode commit so.

Plain numbers replace some hundred calls of numpy. Only commits whose slots are in order are handled
here. For all others the answer is "no" with nothing changed, and the general path decides, refuses
and words the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvhearth.contract import GroupSpec
from kvhearth.model import CHECKSUM_BYTES, Tier
from kvhearth_server.core.actions import BindOne, Sum
from kvhearth_server.core.commit import Binder, CommitItem
from kvhearth_server.core.events import EventKind
from kvhearth_server.core.groups import Group
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.slot_table import State
from kvhearth_server.core.state import CoreState

# Each access to an enumeration member by name costs a search.
_RESERVED, _COMMITTED, _SUMMED = int(State.RESERVED), int(State.COMMITTED), int(State.SUMMED)
_BOUND = (State.COMMITTED, State.SUMMED)
"""States of a bound slot, by whether the checksum is known."""
_STORED, _DRAM = EventKind.STORED, Tier.DRAM


class SingleCommit(NamedTuple):
    """One key of a KV group to bind to one slot; ``checksum`` and ``parent`` may be empty."""

    kv_group: int
    key: bytes
    slot: int
    generation: int
    checksum: bytes
    parent: bytes

    def whole(self) -> CommitItem:
        """Convert to the general form."""
        sums = np.frombuffer(self.checksum, np.uint8).reshape(1, 1, -1) if self.checksum else None
        slots, generations = np.array([[self.slot]]), np.array([[self.generation]], np.uint32)
        return CommitItem(self.kv_group, [self.key], slots, generations, sums, self.parent)


class FewCommits:
    """Binds a few blocks one by one.

    Args:
        state: the core's state.
        binder: binds the blocks whose keys are known already.
    """

    def __init__(self, state: CoreState, binder: Binder) -> None:
        self._state = state
        self._binder = binder
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
        self._copy_state = table.copy_state.data
        self._sequence = table.sequence.data
        self._parent = table.parent.data
        self._checksum = table.checksum.view(np.uint8).data

    def commit(
        self, group: Group, namespace: Namespace, ones: Sequence[SingleCommit]
    ) -> list[bool] | None:
        """Return for each block, all of one KV group, whether it was bound now; None, with nothing
        changed, if the general path must decide. Checksums have their full length or are empty.
        """
        kv_group, specs = ones[0].kv_group, namespace.contract.groups
        spec = specs[kv_group] if 0 <= kv_group < len(specs) else None
        if spec is None or spec.shards > 1 or not self._are_reserved(group, spec, ones):
            return None
        stored, to_sum = list[bool](), list[SingleCommit]()
        for one in ones:
            if self._bind_new(group, namespace, spec, one):
                stored.append(True)
                if not one.checksum:
                    to_sum.append(one)
            else:  # known, perhaps of an older epoch: it goes the general way
                stored.append(bool(self._binder.bind(group, namespace, one.whole()).all()))
        if to_sum:
            slots = np.array([[one.slot] for one in to_sum], np.int64)
            generations = np.array([[one.generation] for one in to_sum], np.uint32)
            self._state.actions.append(Sum(slots, generations))
        return stored

    def _are_reserved(self, group: Group, spec: GroupSpec, ones: Sequence[SingleCommit]) -> bool:
        """Whether the group holds each block's slot, none of them twice, for blocks of its size."""
        size = self._state.slot_bytes(spec)
        for _, key, slot, generation, _, parent in ones:
            if (
                len(parent) not in (0, len(key))
                or not 0 <= slot < self._slot_count
                or self._slot_state[slot] != _RESERVED
                or self._owner[slot] != group.number
                or self._generation.item(slot) != generation
                or self._slab_slot_bytes[slot // self._stride] != size
            ):
                return False
        return len(ones) == 1 or len({one.slot for one in ones}) == len(ones)

    def _bind_new(
        self, group: Group, namespace: Namespace, spec: GroupSpec, one: SingleCommit
    ) -> bool:
        """Bind a key to its slot; False, with nothing changed, if the key is known."""
        state = self._state
        kv_group, key, slot, _, checksum, parent = one
        size = state.slot_bytes(spec)
        if not state.index.bind_new(namespace.number, kv_group, key, slot):
            return False
        books = state.books[group.segment]
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
        if summed:
            state.count("summed_blocks")
            state.events.append(_STORED, namespace.number, one.kv_group, [one.key], tier=_DRAM)

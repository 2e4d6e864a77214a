"""Lookups that find all they ask for: keys of one full-attention group whose blocks have one shard.

They do what ``reading`` does, without what only holes, windows, states and several groups need, and
on slices where the blocks lie side by side. As in ``single``, only what is plain and goes well is
done here; for everything else the answer is None with nothing changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from kvhearth.contract import GroupKind
from kvhearth.model import I64, Records
from kvhearth_server.core.groups import Group
from kvhearth_server.core.holding import hold_room
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.state import CoreState
from kvhearth_server.core.table import Pick, State, all_zero, numbers, rising

# A member of an enumeration costs a search each time it is named.
_FULL = GroupKind.FULL
_SUMMED = bytes([State.SUMMED])
"""As the table's column has it."""
_ONE = np.uint32(1)


class Whole(NamedTuple):
    """What was found and is held now: its slots, rising, and over the keys their extents."""

    slots: I64
    extents: Records


class Wholes:
    """Whole lookups of attached schedulers."""

    def __init__(self, state: CoreState) -> None:
        self._state = state

    def lookup(
        self,
        group: Group,
        namespace: Namespace,
        kv_group: int,
        keys: Sequence[bytes],
        lease_id: int,
    ) -> Whole | None:
        """Hold the blocks of all keys, mark them as used and count that; see the module.

        The caller enters the lease.
        """
        state, table = self._state, self._state.table
        groups, count = namespace.contract.groups, len(keys)
        if not count or not 0 <= kv_group < len(groups):
            return None
        spec = groups[kv_group]
        if spec.kind is not _FULL or spec.shards > 1 or not self._may_lease(group, lease_id, count):
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
        self._count(count, spec.page_bytes)
        if isinstance(found, slice):
            extents = table.extents_beside(found, spec.page_bytes)
        else:
            extents = table.extents(found, spec.page_bytes, summed=True)
        return Whole(numbers(rows), extents)

    def _may_lease(self, group: Group, lease_id: int, count: int) -> bool:
        if lease_id in group.leases or lease_id in group.released_early:
            return False
        limits, books = self._state.limits, self._state.ledger.segments[group.segment]
        if count > limits.keys_max or len(group.leases) >= limits.leases_max:
            return False
        return books.leased_slots + count <= limits.leased_slots_max

    def _are_served(self, rows: Pick, count: int, namespace: Namespace, kv_group: int) -> bool:
        """Whether all are blocks of this namespace and group that may be served."""
        # Bytes are compared at once, numbers at several times the cost, most of it numpy's own.
        table = self._state.table
        for column, word in (
            (table.state, _SUMMED),
            (table.group, bytes([kv_group])),
            (table.namespace, namespace.number.to_bytes(2, "little")),
            (table.epoch, namespace.epoch.to_bytes(4, "little")),
        ):
            if column[rows].tobytes() != word * count:
                return False
        return True

    def _hold(self, group: Group, rows: Pick, count: int, slot_bytes: int) -> bool:
        """Count one more lease on each; False if that would hold more than may be."""
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
        if state.offers.on:
            state.offers.used(numbers(rows))

    def _count(self, count: int, page_bytes: int) -> None:
        self._state.count_all(
            {
                ("leased_keys", ""): count,
                ("leased_bytes", ""): count * page_bytes,
                ("lookups", ""): 1,
                ("lookup_keys", ""): count,
                ("hit_keys", ""): count,
            }
        )


def _each_once(heads: I64) -> Pick | None:
    """Heads in rising order; None if one is missing (-1) or there twice."""
    if np.count_nonzero(heads[1:] > heads[:-1]) < len(heads) - 1:
        heads = np.sort(heads)
        if np.count_nonzero(heads[1:] == heads[:-1]):
            return None
    return rising(heads) if heads.item(0) >= 0 else None

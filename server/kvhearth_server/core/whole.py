"""Lookups that find all they ask for: keys of one full-attention group whose blocks have one shard.

They do what ``reading`` does, without what only holes, windows, states and several groups need, and
on slices where the blocks lie side by side. As in ``single``, only what is plain and goes well is
done here; for everything else the answer is None with nothing changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvhearth.contract import GroupKind
from kvhearth.model import I64, U8, Bools, Records, Tier
from kvhearth_server.core.groups import Group
from kvhearth_server.core.holding import hold_room
from kvhearth_server.core.namespaces import Namespace
from kvhearth_server.core.state import CoreState
from kvhearth_server.core.table import Pick, State, rising

# A member of an enumeration costs a search each time it is named.
_SUMMED, _FULL, _DRAM = int(State.SUMMED), GroupKind.FULL, int(Tier.DRAM)


@dataclass(frozen=True)
class Whole:
    """What was found and is held now: its slots, rising, and over the keys the same True for each,
    the same tier for each, and the extents.
    """

    slots: I64
    yes: Bools
    tiers: U8
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
        heads = state.index.find(namespace.number, kv_group, keys)
        slots = _each_once(heads)
        if slots is None:
            return None
        rows = rising(slots)
        if np.count_nonzero(table.epoch[rows] == namespace.epoch) < count:
            return None
        if np.count_nonzero(table.state[rows] == _SUMMED) < count:
            return None
        held = int(np.count_nonzero(table.refs[rows] | table.pins[rows]))
        size = (count - held) * state.slot_bytes(spec)
        if size > hold_room(state, group.segment):
            return None
        books = state.ledger.segments[group.segment]
        books.held += size
        books.leased_slots += count
        table.refs[rows] += 1
        self._mark_used(slots, rows)
        self._count(count, spec.page_bytes)
        if isinstance(rows, slice) and slots is heads:  # in the order of the keys, too
            extents = table.extents_beside(rows, spec.page_bytes)
        else:
            extents = table.extents(heads, spec.page_bytes, summed=True)
        return Whole(slots, np.ones(count, np.bool_), np.full(count, _DRAM, np.uint8), extents)

    def _may_lease(self, group: Group, lease_id: int, count: int) -> bool:
        if lease_id in group.leases or lease_id in group.released_early:
            return False
        limits, books = self._state.limits, self._state.ledger.segments[group.segment]
        if count > limits.keys_max or len(group.leases) >= limits.leases_max:
            return False
        return books.leased_slots + count <= limits.leased_slots_max

    def _mark_used(self, slots: I64, rows: Pick) -> None:
        state = self._state
        state.policies.touch(rows)
        state.table.used_at[rows] = state.tick()
        state.offers.used(slots)

    def _count(self, count: int, page_bytes: int) -> None:
        tell = self._state.count
        tell("leased_keys", count)
        tell("leased_bytes", count * page_bytes)
        tell("lookups")
        tell("lookup_keys", count)
        tell("hit_keys", count)


def _each_once(heads: I64) -> I64 | None:
    """Heads in rising order; None if one is missing (-1) or there twice."""
    if np.count_nonzero(heads[1:] > heads[:-1]) < len(heads) - 1:
        heads = np.sort(heads)
        if np.count_nonzero(heads[1:] == heads[:-1]):
            return None
    return heads if heads.item(0) >= 0 else None

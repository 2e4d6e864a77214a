"""Leases and pins, counted per slot, which keep a block from eviction."""

from __future__ import annotations

import numpy as np

from kvhearth.errors import Reason
from kvhearth.model import I64
from kvhearth_server.core.groups import Group
from kvhearth_server.core.slot_table import Pick, State, all_zero, ascending, numbers
from kvhearth_server.core.state import CoreState, require

_QUARANTINED = int(State.QUARANTINED)
_SUMMED, _ONE_LEASE = bytes([State.SUMMED]), (1).to_bytes(4, "little")
"""Values as the table's columns hold them."""


def not_held(state: CoreState, slots: Pick) -> Pick:
    """Slots among these with neither a lease nor a pin."""
    counts = state.table.refs[slots] | state.table.pins[slots]
    return numbers(slots)[counts == 0] if np.count_nonzero(counts) else slots


def newly_held_bytes(state: CoreState, slots: Pick) -> int:
    """Bytes that holding these committed slots would add to the books."""
    return state.table.total_bytes(not_held(state, slots))


def hold_room(state: CoreState, segment: int) -> int:
    """Bytes that may still be held (leased, pinned, reserved) under the global cap."""
    books = state.books[segment]
    return int(books.capacity * state.limits.held_fraction_max) - books.bound


def hold(state: CoreState, segment: int, slots: I64, *, pin: bool = False) -> None:
    """Count one more lease (or pin) on each slot; slots are distinct and committed.

    Raises:
        KVHearthError: ``too_many_leases`` if leases would name more slots than allowed; nothing has
            changed.
    """
    table, books = state.table, state.books[segment]
    if not pin:
        most = state.limits.leased_slots_max
        require(
            books.leased_slots + len(slots) <= most,
            Reason.TOO_MANY_LEASES,
            lambda: f"leases name {books.leased_slots} slots, at most {most}; release some",
        )
        books.leased_slots += len(slots)
    state.book(segment, "held", not_held(state, slots), +1)
    if pin:
        table.pins[slots] += 1
    else:
        table.refs[slots] += 1


def unhold(state: CoreState, segment: int, slots: Pick, *, pin: bool = False) -> None:
    """Remove one lease (or pin) from each slot.

    Slots that were quarantined only for their readers become free.
    """
    table = state.table
    if not pin and _unhold_plain(state, segment, slots):
        return
    if pin:
        table.pins[slots] -= 1
    else:
        counts = table.refs[slots] - np.uint32(1)
        table.refs[slots] = counts
        state.books[segment].leased_slots -= len(counts)
    loose = not_held(state, slots)
    states = table.state[loose]
    if not len(states):
        return
    quarantined = states == _QUARANTINED
    state.release_epoch += 1
    if not np.count_nonzero(quarantined):
        state.book(segment, "held", loose, -1)
        return
    loose = numbers(loose)
    done = loose[quarantined]
    state.book(segment, "held", loose[~quarantined], -1)
    state.book(segment, "quarantined", done, -1)
    state.count("released_quarantine_slots", len(done))
    state.free_slots(segment, np.sort(done))


def _unhold_plain(state: CoreState, segment: int, slots: Pick) -> bool:
    """Fast path of ``unhold`` for a lease on served blocks that have no other holders.

    Returns False, with nothing changed, if ``unhold`` must decide.
    """
    table = state.table
    refs = table.refs[slots]
    count = len(refs)
    if refs.tobytes() != _ONE_LEASE * count or table.state[slots].tobytes() != _SUMMED * count:
        return False
    if not count or not all_zero(table.pins[slots]):
        return False
    table.refs[slots] = 0
    books = state.books[segment]
    books.leased_slots -= count
    books.held -= table.total_bytes(slots)
    state.release_epoch += 1
    return True


def drop_lease(state: CoreState, group: Group, lease_id: int) -> bool:
    """End a lease; False if the group has none of that id."""
    if lease_id not in group.leases:
        return False
    portions = group.leases.portions(lease_id)
    del group.leases[lease_id]
    del group.leased_at[lease_id]
    for slots in portions:
        unhold(state, group.segment, ascending(slots))
    return True

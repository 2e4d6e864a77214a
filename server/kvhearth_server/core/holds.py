"""Leases and pins, counted per slot: eviction may not take a leased block, and takes a pinned one
last.
"""

from __future__ import annotations

import numpy as np

from kvhearth.errors import Reason
from kvhearth.model import I64
from kvhearth_server.core.groups import Group
from kvhearth_server.core.slot_table import Pick, State, ascending, numbers
from kvhearth_server.core.state import CoreState, require

_QUARANTINED = int(State.QUARANTINED)
_SUMMED, _ONE_LEASE = bytes([State.SUMMED]), (1).to_bytes(4, "little")
"""Values as the table's columns hold them."""


def not_held(state: CoreState, slots: Pick) -> Pick:
    """Slots among these without a lease."""
    counts = state.table.refs[slots]
    return numbers(slots)[counts == 0] if np.count_nonzero(counts) else slots


def newly_held_bytes(state: CoreState, slots: Pick) -> int:
    """Bytes that holding these committed slots would add to the books."""
    return state.table.total_bytes(not_held(state, slots))


def hold_room(state: CoreState, segment: int) -> int:
    """Bytes that may still be held (leased, reserved) under the global cap."""
    books = state.books[segment]
    return int(books.capacity * state.limits.held_fraction_max) - books.bound


def hold(state: CoreState, segment: int, slots: I64) -> None:
    """Count one more lease on each slot; slots are distinct and committed.

    Raises:
        KVHearthError: ``too_many_leases`` if leases would name more slots than allowed; nothing has
            changed.
    """
    table, books = state.table, state.books[segment]
    most = state.limits.leased_slots_max
    require(
        books.leased_slots + len(slots) <= most,
        Reason.TOO_MANY_LEASES,
        lambda: f"leases name {books.leased_slots} slots, at most {most}; release some",
    )
    books.leased_slots += len(slots)
    state.book(segment, "held", not_held(state, slots), +1)
    table.refs[slots] += 1


def unhold(state: CoreState, segment: int, slots: Pick) -> None:
    """Remove one lease from each slot.

    Slots that were quarantined only for their readers become free.
    """
    table = state.table
    if _unhold_plain(state, segment, slots):
        return
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
    if not count:
        return False
    table.refs[slots] = 0
    books = state.books[segment]
    books.leased_slots -= count
    books.held -= table.total_bytes(slots)
    state.release_epoch += 1
    return True


def keep(state: CoreState, segment: int, slots: I64) -> None:
    """Count one more pin on each slot; slots are distinct, committed, and whole blocks."""
    pins = state.table.pins
    fresh = slots[pins[slots] == 0]
    pins[slots] += 1
    _count_kept(state, segment, fresh, +1)
    state.count("retained", _blocks_of(state, fresh))


def unkeep(state: CoreState, segment: int, slots: I64, how: str) -> None:
    """Remove one pin from each slot; ``how`` labels the blocks that have none any more."""
    pins = state.table.pins
    pins[slots] -= 1
    _end_kept(state, segment, slots[pins[slots] == 0], how)


def lose_pins(state: CoreState, segment: int, slots: I64, how: str) -> None:
    """Remove all pins of slots whose blocks are being removed."""
    kept = slots[state.table.pins[slots] > 0]
    state.table.pins[kept] = 0
    _end_kept(state, segment, kept, how)


def _end_kept(state: CoreState, segment: int, slots: I64, how: str) -> None:
    _count_kept(state, segment, slots, -1)
    state.count("retained_ended", _blocks_of(state, slots), how)
    state.release_epoch += bool(len(slots))


def _count_kept(state: CoreState, segment: int, slots: I64, sign: int) -> None:
    state.book(segment, "pinned", slots, sign)
    state.retained_blocks += sign * _blocks_of(state, slots)


def _blocks_of(state: CoreState, slots: I64) -> int:
    """Number of blocks whose first shards are among these slots."""
    return len(slots) - int(np.count_nonzero(state.table.head[slots]))


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

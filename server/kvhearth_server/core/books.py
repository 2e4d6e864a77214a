"""The books must balance: recompute every total from scratch and compare."""

from __future__ import annotations

import numpy as np

from kvhearth.model import I64
from kvhearth_server.core.groups import Group
from kvhearth_server.core.pinning import Pinning
from kvhearth_server.core.state import CoreState, flat
from kvhearth_server.core.table import State

_BOUND = (State.COMMITTED, State.SUMMED)


class BooksError(ValueError):
    """Two accounts of the same thing disagree; the message has both numbers."""


def check_books(state: CoreState, pinning: Pinning) -> None:
    """Recount slots, bytes, leases, reservations, chains and policies.

    Raises:
        BooksError: the first disagreement, with its numbers.
    """
    try:
        for pool in state.pools:
            pool.check()
        state.index.check()
        state.policies.check()
    except ValueError as error:
        raise BooksError(str(error)) from None
    heads = _check_index(state)
    _check_refs(state, pinning)
    _check_groups(state)
    _check_bytes(state)
    try:
        state.chains.check(heads)
    except ValueError as error:
        raise BooksError(str(error)) from None
    members = np.sort(state.policies.members())
    if not np.array_equal(members, np.sort(heads)):
        raise BooksError(f"{len(members)} heads in the policies, {len(heads)} in the index")


def _equal(what: str, counted: int, booked: int) -> None:
    if counted != booked:
        raise BooksError(f"{what}: counted {counted}, booked {booked}")


def _used_rows(state: CoreState, segment: int) -> I64:
    """Slots of a segment that are not free."""
    pool = state.pools[segment]
    parts = [np.zeros(0, np.int64)]
    for slab in range(pool.first_slab, pool.end_slab):
        rows = pool.slots_in(slab)
        parts.append(np.flatnonzero(state.table.state[rows] != State.FREE) + rows.start)
    return np.concatenate(parts)


def _check_index(state: CoreState) -> I64:
    """Every bound head has its shards in a bound state; no bound slot is unknown to the index."""
    table = state.table
    every: list[I64] = [np.zeros(0, np.int64)]
    slots_total = 0
    used: dict[int, int] = {}
    blocks: dict[int, int] = {}
    for number, kv_group, found in state.index.items():
        spec = state.namespaces.get(number).contract.groups[kv_group]
        heads = np.fromiter(found.values(), np.int64, len(found))
        slots = flat(table.all_shards(heads, spec.shards))
        if not np.isin(table.state[slots], _BOUND).all():
            raise BooksError(f"namespace {number}: a slot in the index is in no bound state")
        if (table.namespace[slots] != number).any() or (table.group[slots] != kv_group).any():
            raise BooksError(f"namespace {number}: a slot says it is another's")
        every.append(heads)
        slots_total += len(slots)
        used[number] = used.get(number, 0) + table.total_bytes(slots)
        blocks[number] = blocks.get(number, 0) + len(heads)
    bound = 0
    for segment in range(len(state.pools)):
        rows = _used_rows(state, segment)
        bound += int(np.isin(table.state[rows], _BOUND).sum())
    _equal("slots of indexed blocks", bound, slots_total)
    for group in state.groups:
        used[group.namespace] = used.get(group.namespace, 0) + group.stock_bytes + group.aside_bytes
    for namespace in state.namespaces:
        what = f"namespace {namespace.number}"
        _equal(f"{what} blocks", blocks.get(namespace.number, 0), namespace.blocks)
        _equal(f"{what} bytes", used.get(namespace.number, 0), namespace.used_bytes)
        alive = sum(g.namespace == namespace.number and not g.ended for g in state.groups)
        _equal(f"{what} groups", alive, namespace.groups)
    return np.concatenate(every)


def _check_refs(state: CoreState, pinning: Pinning) -> None:
    """Leases and pins, slot by slot."""
    table = state.table
    for column, holders, what in (
        (table.refs, [s for g in state.groups for s in g.leases.values()], "leases"),
        (table.pins, pinning.held(), "pins"),
    ):
        held = np.concatenate([*holders, np.zeros(0, np.int64)])
        slots, counts = np.unique(held, return_counts=True)
        if (column[slots] != counts).any():
            raise BooksError(f"{what}: a slot's count is not the number of its holders")
        counted = sum(int(column[_used_rows(state, i)].sum()) for i in range(len(state.pools)))
        _equal(f"slots held by {what}", len(held), counted)


def _check_groups(state: CoreState) -> None:
    """What each group holds in stock and aside."""
    table = state.table
    owned = 0
    for group in state.groups:
        held = group.held_slots(table)
        stock = held[table.state[held] == State.RESERVED]
        aside = held[table.state[held] == State.QUARANTINED]
        what = f"group {group.number}"
        _equal(f"{what} stock bytes", table.total_bytes(stock), group.stock_bytes)
        _equal(f"{what} aside bytes", table.total_bytes(aside), group.aside_bytes)
        owned += len(held)
        _check_ended(group)
    reserved = unowned = 0
    for segment in range(len(state.pools)):
        rows = _used_rows(state, segment)
        states, owners = table.state[rows], table.owner[rows]
        reserved += int((states == State.RESERVED).sum())
        aside_mask = states == State.QUARANTINED
        reserved += int((aside_mask & (owners > 0)).sum())
        unowned += int((aside_mask & (owners == 0) & (table.refs[rows] == 0)).sum())
    _equal("slots that groups hold", owned, reserved)
    _equal("quarantined slots without a reason", unowned, 0)


def _check_ended(group: Group) -> None:
    if group.ended and (group.leases or group.stock_bytes or group.drained):
        raise BooksError(f"group {group.number} has ended but still holds leases or stock")


def _check_bytes(state: CoreState) -> None:
    """The ledger of each segment."""
    table = state.table
    for segment, books in enumerate(state.ledger.segments):
        rows = _used_rows(state, segment)
        states = table.state[rows]
        bound = np.isin(states, _BOUND)
        busy = bound & ((table.refs[rows] > 0) | (table.pins[rows] > 0))
        for what, mask, booked in (
            ("reserved", states == State.RESERVED, books.reserved),
            ("committed", bound, books.committed),
            ("quarantined", states == State.QUARANTINED, books.quarantined),
            ("held", busy, books.held),
        ):
            _equal(f"segment {segment} {what} bytes", table.total_bytes(rows[mask]), booked)

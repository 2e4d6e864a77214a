"""Self-check of the core's books: recomputes every total from scratch and compares.

The work is cut into portions, so that a serving daemon can do other work in between. Each portion
compares only accounts of one moment: a change of state between two portions is no disagreement.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvhearth.model import I64, Bools
from kvhearth_server.core.groups import Group
from kvhearth_server.core.pins import Pinning
from kvhearth_server.core.promotion import Promotions
from kvhearth_server.core.publishing import Publishing
from kvhearth_server.core.slot_table import KERNEL, State
from kvhearth_server.core.state import CoreState
from kvhearth_server.core.writeback import Writeback

PORTION_SLOTS = 2000
"""Number of slots that a portion examines one by one; work on all slots at once is array work."""

_TALLY_DENSE_MAX = 1 << 20
"""Largest value up to which counting takes a third of the time of sorting."""

_RESERVED, _QUARANTINED = int(State.RESERVED), int(State.QUARANTINED)
_LOADING = int(State.LOADING)
_COMMITTED, _SUMMED = int(State.COMMITTED), int(State.SUMMED)


class BooksError(ValueError):
    """Disagreement of two accounts of the same quantity; the message has both numbers."""


@dataclass(frozen=True)
class Holders:
    """Holders of slots other than groups."""

    pinning: Pinning
    writeback: Writeback
    publishing: Publishing
    promotions: Promotions


def check_books(state: CoreState, holders: Holders) -> None:
    """Recount slots, bytes, leases, reservations, chains and policies, all at one moment.

    Raises:
        BooksError: the first disagreement, with its numbers.
    """
    for _ in _portions(state, holders, None):
        pass


def book_portions(state: CoreState, holders: Holders) -> Iterator[None]:
    """Do the work of ``check_books`` in portions, one for each ``next``.

    The core may be called between portions.

    Raises:
        BooksError: the first disagreement, with its numbers.
    """
    return _portions(state, holders, PORTION_SLOTS)


def _portions(state: CoreState, holders: Holders, slots_max: int | None) -> Iterator[None]:
    """Check portions of ``slots_max`` slots where each slot is examined; None: all at once."""
    try:
        for segment, pool in enumerate(state.pools):
            pool.check()
            yield
            used = _Used.now(state, segment)
            for check in (_check_ledger, _check_namespaces, _check_owners):
                check(state, holders, used)
                yield
                used = _Used.now(state, segment) if slots_max else used
            _check_holders(state, holders, used)
            yield
            for parts in _row_portions(state, segment, slots_max):
                _check_blocks(state, segment, parts)
                yield
            used = _Used.now(state, segment) if slots_max else used
            state.chains.check_siblings(used.heads(state))
            yield
        if slots_max is None:
            state.index.check()
        blocks = sum(space.blocks for space in state.namespaces)
        _equal("blocks in the index", len(state.index), blocks)
        _equal("heads in the policies", state.policies.member_count, len(state.index))
        holders.pinning.check()
        for place in state.policies.places():
            state.policies.check(*place)
            yield
            _check_members(state, *place)
            yield
    except BooksError:
        raise
    except (ValueError, IndexError) as error:
        raise BooksError(str(error)) from None


def _equal(what: str, counted: int, booked: int) -> None:
    if counted != booked:
        raise BooksError(f"{what}: counted {counted}, booked {booked}")


def _row_portions(state: CoreState, segment: int, slots_max: int | None) -> Iterator[list[slice]]:
    """Yield all rows of a segment in portions, by its slab layout at the time of each."""
    pool = state.pools[segment]
    most = slots_max or state.table.geometry.slot_count
    parts, room = list[slice](), most
    for slab in range(pool.first_slab, pool.end_slab):
        start = pool.slots_in(slab).start
        while start < (end := pool.slots_in(slab).stop):
            parts.append(slice(start, min(end, start + room)))
            room -= parts[-1].stop - start
            start = parts[-1].stop
            if not room:
                yield parts
                parts, room = [], most
    yield parts


def _rows_of(state: CoreState, parts: Iterable[slice]) -> I64:
    """Slots that are not free, in ascending order."""
    states = state.table.state
    found = [np.flatnonzero(states[part]) + part.start for part in parts]
    return np.concatenate([np.zeros(0, np.int64), *found])


def _is_head(state: CoreState, slots: I64) -> Bools:
    """Which slots are the first shard of a bound block."""
    table = state.table
    states = table.state[slots]
    heads: Bools = ((states == _COMMITTED) | (states == _SUMMED)) & (table.head[slots] == 0)
    return heads


# -- totals of one moment --------------------------------------------------------------------------


@dataclass(frozen=True)
class _Used:
    """The slots of a segment that are not free: numbers in ascending order, states, bytes."""

    segment: int
    rows: I64
    states: npt.NDArray[np.uint8]
    sizes: I64
    bound: Bools

    @classmethod
    def now(cls, state: CoreState, segment: int) -> _Used:
        """Take the current values from the table."""
        pool, table = state.pools[segment], state.table
        rows = _rows_of(state, map(pool.slots_in, range(pool.first_slab, pool.end_slab)))
        states = table.state[rows]
        bound = (states == _COMMITTED) | (states == _SUMMED)
        return cls(segment, rows, states, table.slot_bytes_of(rows), bound)

    def heads(self, state: CoreState) -> I64:
        """First shards of bound blocks."""
        heads: I64 = self.rows[self.bound & (state.table.head[self.rows] == 0)]
        return heads


def _check_holders(state: CoreState, holders: Holders, used: _Used) -> None:
    """Compare leases, writes to slower tiers and pins, slot by slot."""
    table, segment = state.table, used.segment
    groups = [group for group in state.groups if group.segment == segment]
    leased = [group.leases.all_slots().astype(np.int64) for group in groups]
    leased += holders.writeback.held(segment) + holders.publishing.held(segment)
    booked = state.books[segment].leased_slots
    _equal(f"segment {segment} leased slots", sum(map(len, leased)), booked)
    for column, known, what in (
        (table.refs, leased, "leases"),
        (table.pins, holders.pinning.held(segment), "pins"),
    ):
        held = np.concatenate([*known, np.zeros(0, np.int64)])
        place = np.minimum(np.searchsorted(used.rows, held), max(len(used.rows) - 1, 0))
        if len(held) and not (len(used.rows) and (used.rows[place] == held).all()):
            raise BooksError(f"{what}: a slot that somebody holds is free")
        counts = np.bincount(place, minlength=len(used.rows))
        wrong = np.flatnonzero(counts != column[used.rows])
        if len(wrong):
            first = wrong[0]
            slot = used.rows[first]
            text = f"{len(wrong)} slots have not as many {what} as holders; the first is {slot}"
            raise BooksError(f"{text}: counted {counts[first]}, booked {column[slot]}")


def _check_ledger(state: CoreState, holders: Holders, used: _Used) -> None:
    table, segment = state.table, used.segment
    books = state.books[segment]
    busy = used.bound & (table.refs[used.rows] > 0)
    pinned = used.bound & (table.pins[used.rows] > 0)
    for what, mask, booked in (
        ("reserved", used.states == _RESERVED, books.reserved),
        ("committed", used.bound, books.committed),
        ("quarantined", used.states == _QUARANTINED, books.quarantined),
        ("loading", used.states == _LOADING, books.loading),
        ("held", busy, books.held),
        ("pinned", pinned, books.pinned),
    ):
        _equal(f"segment {segment} {what} bytes", int(used.sizes[mask].sum()), booked)


def _check_namespaces(state: CoreState, holders: Holders, used: _Used) -> None:
    """Compare a tenant's namespaces: counts in the table against each namespace's own books."""
    table, segment = state.table, used.segment
    rows = used.rows[used.bound]
    numbers = table.namespace[rows]
    pairs = table.kinds(rows)
    slots = _tally(pairs)
    heads = _tally(pairs[table.head[rows] == 0])
    # Sums of integers, exact below 2^53 bytes.
    used_bytes = np.bincount(numbers, weights=used.sizes[used.bound])
    spaces = {s.number: s for s in state.namespaces if state.segment_of[s.tenant] == segment}
    held, alive = Counter(holders.promotions.billed()), Counter[int]()
    for group in state.groups:
        held[group.namespace] += group.stock_bytes + group.quarantined_bytes
        alive[group.namespace] += not group.ended
    blocks: Counter[int] = Counter()
    for pair, count in heads.items():
        number, kv_group = divmod(pair, 256)
        if number not in spaces or kv_group >= len(spaces[number].contract.groups):
            raise BooksError(f"{count} blocks of group {kv_group} of an unknown namespace {number}")
        shards = spaces[number].contract.groups[kv_group].shards
        what = f"namespace {number} group {kv_group} slots of its blocks"
        _equal(what, slots.pop(pair), count * shards)
        blocks[number] += count
    _equal(f"segment {segment} slots without a first shard", sum(slots.values()), 0)
    for number, space in spaces.items():
        stored = int(used_bytes[number]) if number < len(used_bytes) else 0
        _equal(f"namespace {number} blocks", blocks[number], space.blocks)
        _equal(f"namespace {number} bytes", stored + held[number], space.used_bytes)
        _equal(f"namespace {number} groups", alive[number], space.groups)


def _check_owners(state: CoreState, holders: Holders, used: _Used) -> None:
    """Check that each reserved or quarantined slot belongs to a group, a reader or the kernel."""
    table, segment = state.table, used.segment
    mine = used.rows[(used.states == _RESERVED) | (used.states == _QUARANTINED)]
    owners = _tally(table.owner[mine].astype(np.int64))
    unowned = mine[(table.owner[mine] == 0) & (table.refs[mine] == 0)]
    _equal("quarantined slots without a reason", len(unowned), 0)
    owners.pop(0, None)
    promotions = holders.promotions
    for what, state_word, known in (
        ("loading", _LOADING, promotions.slots()),
        ("orphaned load", _QUARANTINED, promotions.orphaned_loads),
    ):
        found = used.rows[(used.states == state_word) & (table.owner[used.rows] == KERNEL)]
        here = known[table.slab_segment[table.slabs_of(known)] == segment]
        if not np.array_equal(found, np.sort(here)):
            raise BooksError(f"{what} slots: counted {len(found)}, on record {len(here)}")
    owners.pop(KERNEL, None)
    for group in state.groups:
        if group.segment == segment:
            _check_group(state, group)
            held = len(group.held_slots(table))
            _equal(f"slots that group {group.number} holds", held, owners.pop(group.number, 0))
    _equal(f"segment {segment} slots that unknown groups hold", sum(owners.values()), 0)


def _tally(values: npt.NDArray[Any]) -> dict[int, int]:
    """Count the occurrences of each value; none is negative."""
    if int(values.max(initial=0)) < _TALLY_DENSE_MAX:
        counts = np.bincount(values)
        numbers = np.flatnonzero(counts)
        counts = counts[numbers]
    else:
        numbers, counts = np.unique(values, return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))


def _check_group(state: CoreState, group: Group) -> None:
    """Compare a group's stock, its quarantined bytes and the grant times of its leases."""
    table = state.table
    held = group.held_slots(table)
    reserved_slots = held[table.state[held] == State.RESERVED]
    quarantined = held[table.state[held] == State.QUARANTINED]
    what = f"group {group.number}"
    _equal(f"{what} stock bytes", table.total_bytes(reserved_slots), group.stock_bytes)
    _equal(f"{what} quarantined bytes", table.total_bytes(quarantined), group.quarantined_bytes)
    if group.leases.keys() != group.leased_at.keys():
        raise BooksError(
            f"{what}: {len(group.leases)} leases, {len(group.leased_at)} times of leases, "
            "not of the same ids"
        )
    if group.ended and (group.leases or group.stock_bytes or group.drained):
        raise BooksError(f"{what} has ended but still holds leases or stock")


# -- blocks ----------------------------------------------------------------------------------------


def _check_blocks(state: CoreState, segment: int, parts: list[slice]) -> None:
    """Check shards, keys and links of the blocks whose heads are in some rows."""
    table = state.table
    rows = _rows_of(state, parts)
    heads = rows[_is_head(state, rows)]
    for number, kv_group, mine in table.by_kind(heads):
        _check_pair(state, segment, number, kv_group, mine)
        keys = state.index.keys(mine)
        if (state.index.find(number, kv_group, keys) != mine).any():
            raise BooksError(f"slots {mine[0]}..{mine[-1]}: a key is bound to another slot")
    state.chains.check_links(heads, lambda slots: _is_head(state, slots))


def _check_pair(state: CoreState, segment: int, number: int, kv_group: int, heads: I64) -> None:
    table, what = state.table, f"namespace {number} group {kv_group}"
    if number not in state.namespaces:
        raise BooksError(f"{what}: {len(heads)} blocks of no namespace")
    space = state.namespaces.get(number)
    if state.segment_of[space.tenant] != segment:
        raise BooksError(f"{what}: {len(heads)} blocks in another tenant's segment")
    spec = space.contract.groups[kv_group]
    shards = table.all_shards(heads, spec.shards)
    if (shards < 0).any() or table.sibling[shards[:, -1]].any():
        raise BooksError(f"{what}: a block has not {spec.shards} shards")
    if (table.head[shards[:, 1:]] != heads[:, None] + 1).any():
        raise BooksError(f"{what}: a shard says that it is another block's")
    for column in (table.state, table.namespace, table.group, table.epoch):
        if (column[shards] != column[heads][:, None]).any():
            raise BooksError(f"{what}: the shards of a block are not alike")
    if (table.slot_bytes_of(shards) != state.slot_bytes(spec)).any():
        raise BooksError(f"{what}: a shard is in a slot of another size")


def _check_members(state: CoreState, number: int, slot_bytes: int) -> None:
    """Check that a policy's members are heads of its namespace in slots of its size.

    The policies have as many members as there are blocks, and none twice, so each head is a member
    of exactly one policy.
    """
    table = state.table
    members = state.policies.members(number, slot_bytes)
    good = _is_head(state, members)
    good &= (table.namespace[members] == number) & (table.slot_bytes_of(members) == slot_bytes)
    if not good.all():
        raise BooksError(
            f"{int((~good).sum())} members of the policy of namespace {number} for {slot_bytes} "
            "bytes are no heads of such blocks"
        )

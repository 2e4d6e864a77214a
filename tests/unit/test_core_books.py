"""``check_books`` detects accounts that disagree and names them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest
from support.core_kit import Rig, contract, full, key, keys

from kvhearth_server.core.check_books import BooksError
from kvhearth_server.core.slot_table import State

SHARDS = 2


class World:
    """A core with stored, leased, pinned, reserved and quarantined blocks."""

    def __init__(self) -> None:
        self.rig = Rig(4)
        self.session = self.rig.attach(contract(full(shards=SHARDS)))
        self.rig.put(self.session, keys(0, 1, 2))
        self.rig.lookup(self.session, keys(0), lease_id=1)
        self.rig.pin(self.session, 1, keys(1))
        self.reserved, generations = self.rig.take(self.session, 2)
        self.rig.abort(self.session, self.reserved[1:], generations[1:], in_doubt=True)
        self.state = self.rig.state
        self.table = self.rig.state.table
        self.group = self.rig.group(self.session)
        self.space = self.rig.space(self.session)
        self.books = self.state.books[0]
        self.head = self.rig.head(self.session, key(0))


def _ended(world: World) -> None:
    world.group.ended = True
    world.space.groups -= 1


def _free_twice(world: World) -> None:
    found = world.state.pools[0]._first.classes[4096]
    found.free[0] = found.free[1]


def _policy(world: World) -> None:
    policy = next(world.state.policies.of_namespace(world.space.number))
    policy.evict(world.head)


def _unbound(world: World) -> None:
    world.state.index.unbind(world.space.number, 0, np.array([world.head]))


def _key_twice(world: World) -> None:
    _unbound(world)
    world.state.index.bind(world.space.number, 0, [key(1)], np.array([world.head]))


def _unleased(world: World) -> None:
    world.group.leased_at[2] = 0.0


def _renamed(world: World) -> None:
    world.group.leased_at[2] = world.group.leased_at.pop(1)


def add(holder: str, field: str) -> Callable[[World], None]:
    """Adds one byte (or one) to an account."""

    def tamper(world: World) -> None:
        owner = getattr(world, holder)
        setattr(owner, field, getattr(owner, field) + 1)

    return tamper


def more(column: str) -> Callable[[World], None]:
    """Adds one to a column of the table."""

    def tamper(world: World) -> None:
        getattr(world.table, column)[world.head] += 1

    return tamper


def put(column: str, value: int, after: int = 0) -> Callable[[World], None]:
    """Writes to a column of the table, so many slots behind the head."""

    def tamper(world: World) -> None:
        getattr(world.table, column)[world.head + after] = value

    return tamper


def _freed(world: World) -> None:
    world.table.state[world.reserved[0]] = State.FREE


TAMPERED: list[tuple[Callable[[World], None], str]] = [
    (put("state", State.RESERVED), "reserved bytes"),
    (put("group", 1), "group 1 of an unknown namespace 1|without a first shard|slots of its"),
    (put("state", State.SUMMED, 12), "is not FREE"),
    (_ended, "has ended"),
    (_free_twice, "twice on the free stack"),
    (_freed, "in use, booked"),
    (_policy, "in the policies"),
    (_unbound, "no key|blocks in the index"),
    (_key_twice, "not found|bound to another slot"),
    (_unleased, "leases, 2 times of leases"),
    (_renamed, "1 leases, 1 times of leases"),
    (more("refs"), "not as many leases as holders"),
    (more("pins"), "not as many pins as holders|pinned bytes"),
    (more("parent"), "parent does not name"),
    (more("child"), "child that"),
    (more("sibling"), "shard"),
    (more("epoch"), "not alike"),
    (more("head"), "slots of its blocks"),
    (add("books", "leased_slots"), "leased slots"),
    (add("group", "stock_bytes"), "bytes: counted"),
    (add("group", "quarantined_bytes"), "bytes: counted"),
    (add("space", "blocks"), "blocks"),
    (add("space", "used_bytes"), "bytes"),
    (add("space", "groups"), "groups"),
    (add("books", "reserved"), "reserved bytes"),
    (add("books", "committed"), "committed bytes"),
    (add("books", "quarantined"), "quarantined bytes"),
    (add("books", "held"), "held bytes"),
    (add("books", "pinned"), "pinned bytes"),
    (add("state", "retained_blocks"), "retained blocks"),
]


def in_portions(world: World) -> int:
    """Recounts in portions, as a daemon that serves in between; returns the number of portions."""
    return sum(1 for _ in world.rig.core.book_portions())


def test_a_disagreement_is_found() -> None:
    for tamper, said in TAMPERED:
        world = World()
        in_portions(world)
        tamper(world)
        for check in (world.rig.check, functools.partial(in_portions, world)):
            with pytest.raises(BooksError, match=said):
                check()


def _move(world: World, number: int) -> None:
    """One action of engines, operators or a full arena while the books are counted."""
    rig, state = world.rig, world.state
    name = f"e{number}"
    session = rig.attach(contract(full(shards=SHARDS), revision=f"r{number % 3}"), engine_id=name)
    first = 100 + 10 * number
    rig.put(session, keys(first))
    rig.put(session, keys(first + 1, first + 2), parent=key(first), summed=False)
    rig.lookup(session, keys(first), lease_id=number + 10)
    rig.pin(session, number + 1, keys(first))
    slots, generations = rig.take(session, 2)
    rig.abort(session, slots[1:], generations[1:], in_doubt=True)
    rig.core.evict(rig.space(session).digest, 0, number % 4)
    rig.leave(session, finished=number % 2 == 0)
    for member in rig.members[session]:
        rig.core.membership.drained(member)
    if number % 3 == 0:
        state.namespaces._forget_of("t")
    rig.core.pinning.expire(1e9)


def test_what_changes_between_two_portions_is_no_disagreement() -> None:
    world = World()
    moves = 0
    for moves, _ in enumerate(world.rig.core.book_portions()):
        _move(world, moves)
    assert moves >= 8
    world.rig.check()


def test_siblings_in_a_ring_are_found() -> None:
    rig = Rig()
    session = rig.attach()
    rig.put(session, keys(0))
    for number in range(1, 9):
        rig.put(session, keys(number), parent=key(0))
    rig.check()
    table = rig.state.table
    ring = [rig.head(session, key(number)) for number in (2, 3, 4)]
    outer = [rig.head(session, key(number)) for number in (1, 5)]
    # Every link agrees with its counterpart, but three siblings form a cycle.
    for head, other in zip(ring, [*ring[1:], ring[0]], strict=True):
        table.younger[head], table.older[other] = other + 1, head + 1
    table.younger[outer[0]], table.older[outer[1]] = outer[1] + 1, outer[0] + 1
    with pytest.raises(BooksError, match="ring of siblings, and 2 more"):
        rig.check()

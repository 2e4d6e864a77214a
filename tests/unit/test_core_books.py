"""The books notice when two accounts of the same thing disagree, and say which."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.core_kit import Rig, contract, full, key, keys

from kvhearth_server.core.books import BooksError
from kvhearth_server.core.table import State

SHARDS = 2


class World:
    """A core in which everything occurs: stored, leased, pinned, reserved and put aside."""

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
        self.space = self.state.namespaces.get(self.group.namespace)
        self.books = self.state.ledger.segments[0]
        self.head = self.rig.head(self.session, key(0))


def _state(world: World) -> None:
    world.table.state[world.head] = State.RESERVED


def _other(world: World) -> None:
    world.table.group[world.head] = 1


def _lost_slot(world: World) -> None:
    world.table.state[world.head + 12] = State.SUMMED


def _ended(world: World) -> None:
    world.group.ended = True
    world.space.groups -= 1


def _free_twice(world: World) -> None:
    found = world.state.pools[0]._classes[4096]
    found.free[0] = found.free[1]


def _freed(world: World) -> None:
    world.table.state[world.reserved[0]] = State.FREE


def _policy(world: World) -> None:
    policy = next(world.state.policies.of_namespace(world.space.number))
    policy.evict(world.head)


def _unbound(world: World) -> None:
    world.state.index.unbind(world.space.number, 0, [world.head])


def add(holder: str, field: str) -> Callable[[World], None]:
    """One byte (or one) too many in an account."""

    def tamper(world: World) -> None:
        owner = getattr(world, holder)
        setattr(owner, field, getattr(owner, field) + 1)

    return tamper


def more(column: str) -> Callable[[World], None]:
    """One more in a column of the table."""

    def tamper(world: World) -> None:
        getattr(world.table, column)[world.head] += 1

    return tamper


TAMPERED: list[tuple[str, Callable[[World], None], str]] = [
    ("state", _state, "no bound state"),
    ("other", _other, "another's"),
    ("lost", _lost_slot, "is not FREE"),
    ("ended", _ended, "has ended"),
    ("free twice", _free_twice, "twice on the free stack"),
    ("freed", _freed, "in use, booked"),
    ("policy", _policy, "in the policies"),
    ("unbound", _unbound, "slots of indexed blocks"),
    ("refs", more("refs"), "number of its holders"),
    ("pins", more("pins"), "slots held by pins"),
    ("parent", more("parent"), "point here"),
    ("stock", add("group", "stock_bytes"), "bytes: counted"),
    ("aside", add("group", "aside_bytes"), "bytes: counted"),
    ("blocks", add("space", "blocks"), "blocks"),
    ("used", add("space", "used_bytes"), "bytes"),
    ("groups", add("space", "groups"), "groups"),
    ("reserved", add("books", "reserved"), "reserved bytes"),
    ("committed", add("books", "committed"), "committed bytes"),
    ("quarantined", add("books", "quarantined"), "quarantined bytes"),
    ("held", add("books", "held"), "held bytes"),
]


@pytest.mark.parametrize(
    ("tamper", "said"), [one[1:] for one in TAMPERED], ids=[o[0] for o in TAMPERED]
)
def test_a_disagreement_is_found(tamper: Callable[[World], None], said: str) -> None:
    world = World()
    world.rig.check()
    tamper(world)
    with pytest.raises(BooksError, match=said):
        world.rig.check()

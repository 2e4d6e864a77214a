"""The daemon's cost of leases and pins is bounded, however many of them hold the same slots."""

from __future__ import annotations

import pytest
from support.core_kit import Rig, key, keys, refused

from kvhearth.errors import Reason
from kvhearth_server.core.lookup import KeysItem


def test_the_bound_is_a_tenants() -> None:
    rig = Rig(tenants=("t", "u"), leased_slots_max=4)
    mine, theirs = rig.attach(), rig.attach(tenant="u")
    for session in (mine, theirs):
        rig.put(session, keys(*range(4)))
        rig.lookup(session, keys(*range(4)), lease_id=1)
    with refused(Reason.TOO_MANY_LEASES):
        rig.lookup(mine, keys(0), lease_id=2)


def test_whatever_ends_a_lease_gives_its_part_of_the_bound_back() -> None:
    rig = Rig(leased_slots_max=8)
    session = rig.attach()
    rig.put(session, keys(*range(8)))
    rig.lookup(session, keys(*range(8)), lease_id=1)
    head = rig.head(session, key(3))
    # A block that is removed under its readers stays held until they release it.
    rig.remove_bad(head)
    rig.check()
    assert rig.state.books[0].leased_slots == 8
    rig.leave(session)
    assert rig.state.books[0].leased_slots == 0


@pytest.mark.parametrize("asked", [(0, 1, 2), (0, 1, 9)], ids=["all there", "one not"])
def test_a_lease_that_is_over_is_counted_and_holds_nothing(asked: tuple[int, ...]) -> None:
    rig = Rig()
    session = rig.attach()
    rig.put(session, keys(0, 1, 2))
    item, epoch = KeysItem(0, keys(*asked)), rig.epoch(session)
    counted = []
    for lease_id, released in ((1, False), (0, True), (0, False)):
        rig.state.take_counts()
        rig.core.reading.lookup(session, epoch, [item], lease_id, released=released)
        rig.core.reading.release(session, [1] if lease_id else [])
        counted.append(rig.state.take_counts().get(("leased_bytes", ""), 0))
        assert not rig.state.books[0].leased_slots
    assert counted[0] == counted[1] > counted[2] == 0

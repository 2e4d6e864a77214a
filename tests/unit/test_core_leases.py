"""The daemon's cost of leases and pins is bounded, however many of them hold the same slots."""

from __future__ import annotations

from support.core_kit import Rig, key, keys, refused

from kvhearth.errors import Reason


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

"""The daemon's cost of leases and pins is bounded, however many of them hold the same slots."""

from __future__ import annotations

import numpy as np
from support.core_kit import Rig, key, keys, refused

from kvhearth.errors import Reason
from kvhearth_server.core.groups import Leases


def test_a_lease_on_one_slot_is_as_any_other() -> None:
    ours, others = Leases(), Leases()
    for leases in (ours, others):
        leases[4] = np.array([1, 2], np.int64)
    ours.enter_one(5, (1 << 30) - 1)
    others[5] = np.array([(1 << 30) - 1], np.int64)
    assert {number: (slots.dtype, slots.tolist()) for number, slots in ours.items()} == {
        number: (slots.dtype, slots.tolist()) for number, slots in others.items()
    }
    assert (ours.slot_count, ours.nbytes) == (others.slot_count, others.nbytes) == (3, 12)
    every = ours.all_slots()
    assert every.dtype == others.all_slots().dtype == np.uint32
    assert sorted(every.tolist()) == sorted(others.all_slots().tolist())
    assert ours.pop(5).tolist() == [(1 << 30) - 1]
    assert 5 not in ours


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
    assert rig.state.ledger.segments[0].leased_slots == 8
    rig.leave(session)
    assert rig.state.ledger.segments[0].leased_slots == 0

"""The daemon's cost of leases and pins is bounded, however many of them hold the same slots."""

from __future__ import annotations

import numpy as np
import pytest
from support.core_kit import Rig, contract, full, key, keys, refused

from kvhearth.errors import Reason
from kvhearth_server.core.groups import Leases

SLOT_LIST_BYTES = 4


def test_leases_give_back_what_was_put_in() -> None:
    leases = Leases()
    slots = np.array([1, 7, (1 << 30) - 1], np.int64)
    leases[5] = slots
    leases[3] = slots[:1]
    assert list(leases) == [5, 3]
    assert (leases[5].dtype, leases[5].tolist()) == (np.int64, slots.tolist())
    assert (leases.slot_count, leases.nbytes) == (4, 4 * SLOT_LIST_BYTES)
    assert leases.all_slots().tolist() == [*slots.tolist(), 1]
    assert 7 not in leases
    assert leases.pop(5).tolist() == slots.tolist()
    assert leases.pop(5, None) is None
    assert (len(leases), leases.slot_count) == (1, 1)


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


def test_leases_on_the_same_blocks_may_not_name_slots_without_end() -> None:
    """The cap on held bytes counts a slot once, but each lease stores its number again."""
    rig = Rig(leased_slots_max=100, leases_max=1000)
    session = rig.attach(contract(full(shards=2)))
    rig.put(session, keys(*range(8)))
    held = rig.state.ledger.segments[0]
    for lease_id in range(1, 7):
        rig.lookup(session, keys(*range(8)), lease_id=lease_id)
    assert (held.leased_slots, held.held) == (6 * 16, 16 * 4096)
    assert rig.group(session).leases.nbytes == 6 * 16 * SLOT_LIST_BYTES
    with refused(Reason.TOO_MANY_LEASES):
        rig.lookup(session, keys(*range(8)), lease_id=7)
    assert rig.group(session).leases.keys() == set(range(1, 7))
    assert int(rig.state.table.refs.sum()) == 6 * 16
    # A smaller lease, or an answer without a lease, is still granted.
    assert rig.lookup(session, keys(0, 1), lease_id=7).lease_id == 7
    assert rig.lookup(session, keys(*range(8))).hit_tokens == 128
    rig.core.reading.release(session, [1])
    assert rig.lookup(session, keys(*range(8)), lease_id=8).lease_id == 8


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
    rig.remove_bad(head, "reader")
    rig.check()
    assert rig.state.ledger.segments[0].leased_slots == 8
    rig.leave(session)
    assert rig.state.ledger.segments[0].leased_slots == 0


def test_pins_of_the_same_blocks_may_not_name_slots_without_end() -> None:
    rig = Rig(pinned_slots_max=20)
    session = rig.attach()
    rig.put(session, keys(*range(8)))
    for pin_id in (1, 2):
        rig.pin(session, pin_id, keys(*range(8)))
    with refused(Reason.TOO_MANY_PINS):
        rig.pin(session, 3, keys(*range(8)))
    assert all(rig.pin(session, 3, keys(*range(4))))
    rig.core.pinning.unpin(session, [1])
    assert all(rig.pin(session, 4, keys(*range(8))))
    rig.core.pinning.expire(1e9)
    rig.check()
    assert not rig.state.table.pins.any()


@pytest.mark.parametrize("lease_id", [1, 2])
def test_the_books_know_since_when_each_lease_is(lease_id: int) -> None:
    rig = Rig()
    session = rig.attach()
    rig.put(session, keys(0))
    rig.lookup(session, keys(0), lease_id=lease_id)
    group = rig.group(session)
    assert group.leased_at.keys() == group.leases.keys() == {lease_id}

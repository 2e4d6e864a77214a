"""Inspection of the core: leases by age, the place of a key; and exact eviction."""

from __future__ import annotations

from support.core_kit import SLOT_BYTES, Rig, contract, full, keys

from kvhearth_server.core.inspection import LEASES_AT_ONCE, Held, held_by_groups, places
from kvhearth_server.core.lookup import KeysItem


def lease(rig: Rig, session: int, lease_id: int, named: list[bytes], now: float) -> None:
    items = [KeysItem(0, named)]
    epoch = rig.epoch(session)
    assert rig.core.reading.lookup(session, epoch, items, lease_id, now=now).lease_id == lease_id


def held(rig: Rig) -> list[Held]:
    found = [one for one in held_by_groups(rig.state, 25.0) if one]
    return sorted(found, key=lambda one: -one.oldest_s)


def test_many_leases_are_counted_in_portions() -> None:
    rig = Rig()
    session = rig.attach(engine_id="a")
    named = keys(1)
    rig.put(session, named)
    for number in range(2 * LEASES_AT_ONCE):
        lease(rig, session, 1 + number, named, 1.0)
    portions = held_by_groups(rig.state, 25.0)
    assert next(portions) is None
    rig.core.reading.release(session, [2 * LEASES_AT_ONCE])  # one that is not counted yet
    assert next(portions) is None
    last = next(portions)
    assert last is not None
    assert (last.leases, last.slots) == (2 * LEASES_AT_ONCE - 1, 2 * LEASES_AT_ONCE - 1)
    rig.leave(session)


def test_the_group_with_the_oldest_lease_comes_first() -> None:
    rig = Rig()
    first, second = rig.attach(engine_id="a"), rig.attach(engine_id="b")
    named = keys(1, 2, 3)
    rig.put(first, named)
    lease(rig, first, 1, named[:1], 10.0)
    lease(rig, second, 1, named, 5.0)
    lease(rig, second, 2, named[:2], 20.0)
    found = held(rig)
    reported = [(one.group.engine_id, one.leases, one.slots, one.oldest_s) for one in found]
    assert reported == [("b", 2, 5, 20.0), ("a", 1, 1, 15.0)]
    assert found[0].bytes == 5 * SLOT_BYTES
    rig.core.reading.release(second, [1])
    assert [one.oldest_s for one in held(rig)] == [15.0, 5.0]
    rig.leave(first)
    rig.leave(second)
    assert held(rig) == []
    assert [group.leased_at for group in rig.state.groups] == []


def test_a_key_may_be_in_several_places() -> None:
    rig = Rig()
    one = rig.attach(contract(full(), full()), engine_id="a")
    other = rig.attach(contract(full(), model="other"), engine_id="b")
    named = keys(7)
    rig.put(one, named, kv_group=1)
    rig.put(other, named, summed=False)
    rig.core.bump_epoch(one, 1)
    stale, unready = places(rig.state, named[0])
    assert (stale.kv_group, stale.epoch, stale.namespace.epoch) == (1, 1, 2)
    assert "weights epoch 1" in stale.why_not
    assert (unready.kv_group, unready.state.name) == (0, "COMMITTED")
    assert "checksum is still being taken" in unready.why_not
    assert places(rig.state, keys(8)[0]) == []

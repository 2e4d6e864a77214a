"""Reports of the core: leases by age, the place of a key."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from support.core_kit import SLOT_BYTES, Rig, contract, full, keys

from kvhearth_server.core.lookup import KeysItem
from kvhearth_server.transport.reports import (
    LEASES_AT_ONCE,
    KeyPlace,
    LeaseHolder,
    key_places,
    leases,
)


def lease(rig: Rig, session: int, lease_id: int, named: list[bytes], now: float) -> None:
    items = [KeysItem(0, named)]
    epoch = rig.epoch(session)
    assert rig.core.reading.lookup(session, epoch, items, lease_id, now=now).lease_id == lease_id


def engine_of(rig: Rig) -> Any:
    return SimpleNamespace(core=rig.core, boot_id="b", now=lambda: 25.0, tiering=None)


def held(rig: Rig) -> list[LeaseHolder]:
    return asyncio.run(leases(engine_of(rig))).groups


def places(rig: Rig, key: bytes) -> list[KeyPlace]:
    return key_places(engine_of(rig), key).places


def test_many_leases_are_counted_in_portions() -> None:
    rig = Rig()
    session = rig.attach(engine_id="a")
    named = keys(1)
    rig.put(session, named)
    for number in range(2 * LEASES_AT_ONCE):
        lease(rig, session, 1 + number, named, 1.0)

    async def counted() -> list[LeaseHolder]:
        counting = asyncio.create_task(leases(engine_of(rig)))
        await asyncio.sleep(0)
        rig.core.reading.release(session, [2 * LEASES_AT_ONCE])  # one that is not counted yet
        return (await counting).groups

    (last,) = asyncio.run(counted())
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
    reported = [(one.engine_id, one.leases, one.slots, one.oldest_s) for one in found]
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
    stale, unready = places(rig, named[0])
    assert (stale.kv_group, stale.epoch, stale.namespace_epoch) == (1, 1, 2)
    assert "weights epoch 1" in stale.why_not
    assert (unready.kv_group, unready.state) == (0, "committed")
    assert "checksum is still being taken" in unready.why_not
    assert places(rig, keys(8)[0]) == []

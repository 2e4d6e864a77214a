"""Pins: blocks that go last for a limited time, and never make a store fail."""

from __future__ import annotations

from support.core_kit import Rig, contract, full, keys, refused

from kvhearth.errors import Reason


def fill(rig: Rig, session: int, first: int = 1000) -> None:
    """Store enough to evict every evictable block."""
    for number in range(first, first + 200, 20):
        rig.put(session, keys(*range(number, number + 20)))


def test_a_pin_keeps_its_blocks_until_its_time_and_not_longer() -> None:
    rig = Rig()
    session = rig.attach()
    rig.put(session, keys(0, 1, 2))
    assert rig.pin(session, 1, keys(0, 7, 2), ttl_s=10.0, now=100.0) == [True, False, True]
    assert rig.core.pinning.expire(109.9) == 0
    fill(rig, session)
    assert rig.present(session, keys(0, 1, 2)) == [True, False, True]
    assert rig.core.pinning.expire(110.0) == 1
    assert rig.core.pinning.expire(110.0) == 0
    rig.check()
    fill(rig, session, 5000)
    assert rig.present(session, keys(0, 2)) == [False, False]


def test_a_pin_does_not_keep_wrong_bytes() -> None:
    rig = Rig()
    session = rig.attach()
    rig.put(session, keys(0, 1))
    rig.pin(session, 1, keys(0, 1))
    rig.pin(session, 2, keys(0))
    assert rig.remove_bad(rig.head(session, keys(0)[0]))
    rig.checked(rig.core.pinning.unpin, session, [2])  # while its slot is free
    assert rig.state.table.pins.sum() == 1
    rig.put(session, keys(0))
    # The first pin's slot belongs to another block now.
    rig.checked(rig.core.pinning.unpin, session, [1])
    assert not rig.state.table.pins.any()


def test_pins_end_with_their_weights() -> None:
    for bump in ("engine", "operator"):
        rig = Rig()
        session, other = rig.attach(), rig.attach(contract(full(), model="another"), engine_id="f")
        for each in (session, other):
            rig.put(each, keys(0, 1))
            rig.pin(each, 1, keys(0, 1))
        if bump == "engine":
            rig.checked(rig.core.bump_epoch, session, rig.epoch(session))
        else:
            rig.checked(rig.core.bump_namespace, rig.space(session).digest)
        assert len(rig.core.pinning) == 1
        assert rig.state.retained_blocks == 2
        rig.put(session, keys(2))
        rig.pin(session, 1, keys(2))
        assert rig.state.take_counts()["retained_ended", "epoch"] == 2


def test_pins_of_a_private_run_end_with_it() -> None:
    rig = Rig()
    private = rig.attach(contract(revision="private:run"))
    rig.put(private, keys(0))
    rig.pin(private, 1, keys(0))
    rig.leave(private)
    assert len(rig.core.pinning) == 0


def test_a_hint_never_makes_a_store_fail() -> None:
    """Pinned blocks are the last ones to go: after all others of any slot size."""
    small, large = full(4096), full(16384)
    rig = Rig(2)
    session = rig.attach(contract(small, large))
    rig.put(session, keys(*range(32)))
    for pin_id in range(1, 9):
        rig.pin(session, pin_id, keys(*range(4 * pin_id - 4, 4 * pin_id)))
    rig.put(session, keys(100), kv_group=1)
    assert sum(rig.present(session, keys(*range(32)))) == 16, "a slab was emptied"
    rig.put(session, keys(*range(200, 216)))
    assert sum(rig.present(session, keys(*range(32)))) == 16, "the large block went first"
    rig.put(session, keys(*range(300, 312)))
    assert sum(rig.present(session, keys(*range(32)))) == 16, "as do others of their size"
    rig.put(session, keys(*range(400, 420)))
    assert sum(rig.present(session, keys(*range(32)))) == 12
    assert rig.state.retained_blocks == 12
    assert rig.state.take_counts()["retained_ended", "evicted"] == 20
    assert rig.lookup(session, keys(*range(400, 420)), lease_id=1).lease_id == 1
    rig.put(session, keys(*range(500, 512)))
    assert not rig.state.retained_blocks


def test_a_quota_is_not_used_up_by_pins() -> None:
    rig = Rig(namespace_quota_bytes=8 * 4096)
    session = rig.attach()
    rig.put(session, keys(0, 1, 2, 3))
    rig.put(session, keys(4, 5, 6, 7))
    rig.pin(session, 1, keys(*range(6)))
    rig.put(session, keys(10, 11))
    assert rig.present(session, keys(6, 7)) == [False, False]
    rig.put(session, keys(12, 13, 14, 15))
    assert sum(rig.present(session, keys(*range(6)))) == 4
    rig.checked(rig.core.evict, rig.space(session).digest, 3 * 4096)
    assert rig.state.retained_blocks == 3
    rig.checked(rig.core.evict, rig.space(session).digest, 0)
    assert rig.state.retained_blocks == 0


def test_the_part_of_memory_that_pins_keep() -> None:
    rig = Rig(1, pinned_fraction_max=0.5, held_fraction_max=0.5)
    session = rig.attach()
    for number in range(0, 16, 4):
        rig.put(session, keys(*range(number, number + 4)))
    rig.lookup(session, keys(*range(8)), lease_id=1)
    rig.pin(session, 1, keys(*range(6)))
    with refused(Reason.TOO_MANY_PINS):
        rig.pin(session, 2, keys(6, 7, 8))
    # A block that has a pin costs nothing more; the refused pin leaves nothing behind.
    rig.pin(session, 2, keys(*range(6), 6, 7))
    assert rig.state.books[0].pinned == rig.state.books[0].held == 8 * 4096
    assert rig.state.retained_blocks == 8, "a block with two pins counts once"
    rig.release(session, 1)
    # Pins take nothing of what leases and stores may hold.
    assert rig.lookup(session, keys(*range(8, 16)), lease_id=2).lease_id == 2


def test_the_slots_that_pins_name_are_bounded() -> None:
    rig = Rig(pinned_slots_max=4)
    session = rig.attach(contract(full(shards=2)))
    rig.put(session, keys(0, 1))
    rig.pin(session, 1, keys(0))
    with refused(Reason.TOO_MANY_PINS):
        rig.pin(session, 2, keys(0, 1))
    rig.pin(session, 2, keys(0))
    rig.core.pinning.unpin(session, [1, 2])
    rig.pin(session, 3, keys(0, 1))


def test_pins_without_a_block_are_bounded_too() -> None:
    """Each takes 500 bytes of the daemon's memory, and namespaces are many."""
    rig = Rig(pins_max=2, tenant_pins_max=3, tenants=("t", "u"))
    first, second = rig.attach(), rig.attach(contract(full(), model="another"), engine_id="f")
    theirs = rig.attach(tenant="u")
    for pin_id in (1, 2):
        assert rig.pin(first, pin_id, keys(7)) == [False]
    with refused(Reason.TOO_MANY_PINS):
        rig.pin(first, 3, keys(7))
    rig.pin(second, 1, keys(7))
    with refused(Reason.TOO_MANY_PINS):
        rig.pin(second, 2, keys(7))
    rig.pin(theirs, 1, keys(7))
    rig.core.pinning.unpin(first, [2])
    rig.pin(second, 2, keys(7))


def test_pins_expire_in_portions_oldest_first() -> None:
    rig = Rig()
    session = rig.attach()
    rig.put(session, keys(0, 1, 2))
    for pin_id in (1, 2, 3):
        rig.pin(session, pin_id, keys(pin_id - 1), ttl_s=40.0 - pin_id, now=100.0)
    assert rig.checked(rig.core.pinning.expire, 200.0, 2) == 2
    assert rig.state.table.pins.sum() == 1
    rig.core.pinning.unpin(session, [1])  # the one that was to live longest
    assert rig.checked(rig.core.pinning.expire, 200.0, 2) == 0


def test_a_pin_that_is_made_again_lives_as_long_as_the_second_time() -> None:
    rig = Rig()
    session = rig.attach()
    rig.put(session, keys(0))
    pinning, nothing = rig.core.pinning, []
    for ttl_s in [10.0, *[20.0] * 3000]:
        pinning.pin(session, 1, 1, nothing, ttl_s=ttl_s, now=100.0)
        pinning.unpin(session, [1])
    rig.pin(session, 1, keys(0), ttl_s=30.0, now=100.0)
    assert len(pinning._due) < 2000, "expiries of ended pins are dropped"
    assert rig.checked(pinning.expire, 125.0) == 0
    assert rig.checked(pinning.expire, 130.0) == 1


def test_pins_end_by_namespace_by_session_or_all() -> None:
    rig = Rig()
    sessions = rig.attach(), rig.attach(contract(full(), model="another"), engine_id="f")
    for each in sessions:
        rig.put(each, keys(0))
        for pin_id, name in enumerate(("a", "a", "b", ""), 1):
            rig.pin(each, pin_id, keys(0), name=name)
    end_all, first = rig.core.pinning.end_all, rig.space(sessions[0]).number
    assert rig.checked(end_all, first, "operator", name="a") == 2
    assert rig.checked(end_all, None, "operator", name="b") == 2
    assert rig.checked(end_all, first, "operator") == 1
    assert rig.checked(end_all, None, "operator", most=2) == 2
    assert rig.checked(end_all, None, "operator", most=2) == 1
    assert not rig.state.table.pins.any()

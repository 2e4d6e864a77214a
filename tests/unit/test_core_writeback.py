"""Write-back in the core: blocks that are held, blocks evicted meanwhile, blocks not written."""

from __future__ import annotations

import contextlib

import pytest
from support.core_kit import contract, full, key, keys, refused
from support.tier_rig import MakeRig

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.core.slot_table import CopyState
from kvhearth_server.tiers.base import Throttled

FULL = 32
"""Blocks of 4 KiB in two slabs."""


def test_an_operator_evicts_what_waits_but_not_what_is_written(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=2)
    session = rig.attach()
    rig.tier.held = True
    rig.put(session, keys(*range(8)))
    rig.turn()
    rig.put(session, keys(*range(8, 16)))
    digest = rig.state.namespaces.get(1).digest
    rig.core.evict(digest, 0)
    assert rig.in_memory(session, keys(*range(16))) == [True] * 8 + [False] * 8
    rig.tier.held = False
    rig.settle()
    assert rig.tier.keys() == set(keys(*range(8)))


def test_a_block_without_its_checksum_is_neither_written_nor_evicted(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=2)
    session = rig.attach()
    rig.put(session, keys(*range(FULL)), summed=False)
    rig.settle()
    assert not rig.tier.keys()
    with refused(Reason.NO_SPACE):
        rig.reserve(session, 1)


def test_blocks_of_old_weights_are_not_written(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=2)
    session = rig.attach()
    rig.tier.refuse_stores = Throttled("recovering")
    rig.put(session, keys(*range(FULL)))
    rig.core.bump_epoch(session, 1)
    rig.tier.refuse_stores = None
    rig.settle()
    assert rig.tier.submitted["store"] == 0
    rig.put(session, keys(100, 101))


def test_an_old_block_that_is_written_last_does_not_pass_for_the_new_one(tier_rig: MakeRig) -> None:
    rig = tier_rig()
    session = rig.attach()
    rig.tier.held = True
    rig.put(session, keys(1))
    rig.turn()
    rig.core.bump_epoch(session, 1)
    rig.put(session, keys(1))
    rig.turn()
    assert len(rig.tier.under_way) == 2
    rig.tier.under_way.reverse()
    rig.tier.lose_blocks(2)
    rig.turn()
    rig.tier.held = False
    rig.settle()
    space = rig.state.namespaces.get(1)
    assert not rig.tiering.present(space, 0, keys(1)).any()
    assert rig.copy_state(session, key(1)) != CopyState.SAVED


def test_what_the_tier_let_go_before_it_said_done_is_not_saved(tier_rig: MakeRig) -> None:
    rig = tier_rig()
    session = rig.attach()
    poll = rig.tier.poll

    def poll_and_lose() -> object:
        done = poll()
        rig.tier.lose(keys(1))
        return done

    rig.tier.poll = poll_and_lose  # type: ignore[method-assign, assignment]
    rig.put(session, keys(1, 2))
    rig.turn(2)
    assert rig.copy_state(session, key(1)) == CopyState.NOT
    assert rig.copy_state(session, key(2)) == CopyState.SAVED


def test_what_the_tier_evicted_is_written_again_before_its_room_is_taken(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=2)
    session = rig.attach()
    rig.save(session, keys(*range(FULL)))
    rig.tier.evict(keys(*range(FULL)))
    rig.turn()
    with refused(Reason.NO_SPACE):
        rig.reserve(session, 1)
    rig.settle()
    written = rig.tier.keys()
    assert 0 < len(written) < FULL // 2, "no more than are wanted soon"
    assert written < set(keys(*range(FULL)))
    rig.put(session, keys(100))


def test_a_tier_smaller_than_memory_is_not_written_to_without_end(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=2)
    session = rig.attach()
    rig.save(session, keys(*range(FULL)))
    rig.tier.evict(keys(*range(FULL)))
    rig.turn()
    before = rig.tier.submitted["store"]
    held: list[bytes] = []
    for number in range(100, 100 + FULL):
        with contextlib.suppress(KVHearthError):
            rig.put(session, keys(number))
        rig.settle()
        if not rig.in_memory(session, keys(number))[0]:
            rig.put(session, keys(number))  # the blocks that had to be saved first are saved now
            rig.settle()
        there = rig.tier.keys()
        held = [k for k in held if k in there] + sorted(there - set(held))
        rig.tier.evict(held[:-10])  # the tier keeps the ten newest
        held = held[-10:]
        rig.turn()
    written = rig.tier.submitted["store"] - before
    assert written <= 9 * FULL, f"{written} writes for {FULL} blocks"


@pytest.mark.parametrize("state", ["lost", "waiting"])
def test_another_slot_size_gets_the_room_of_blocks_that_are_to_be_saved_first(
    tier_rig: MakeRig, state: str
) -> None:
    rig = tier_rig(slabs=2)
    small = rig.attach()
    large = rig.attach(contract(full(8192), revision="large"), engine_id="large")
    if state == "waiting":
        rig.tier.refuse_stores = Throttled("full")
        rig.put(small, keys(*range(FULL)))
    else:
        rig.save(small, keys(*range(FULL)))
        rig.tier.evict(keys(*range(FULL)))
        rig.turn()
    for _ in range(8):
        rig.now += 1
        rig.turn()
        try:
            rig.put(large, keys(100))
        except KVHearthError as error:
            if error.reason is not Reason.NO_SPACE:
                raise
        else:
            return
    raise AssertionError("no room for the other size, ever")


def test_a_tenant_whose_blocks_cannot_be_held_keeps_no_other_waiting(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=4, tenants=("t", "u"), held_fraction_max=0.5)
    first, second = rig.attach(), rig.attach(tenant="u", engine_id="u")
    rig.tier.refuse_stores = Throttled("recovering")
    rig.put(first, keys(*range(32)))
    rig.put(first, keys(*range(32, 40)))
    assert rig.lookup(first, keys(*range(32)), lease_id=1).hit_tokens == 32 * 16
    rig.put(second, keys(*range(10)))
    rig.tier.refuse_stores = None
    for _ in range(10):
        rig.now += 0.1
        rig.turn()
    assert rig.copy_state(second, key(0)) == CopyState.SAVED
    assert rig.copy_state(first, key(39)) == CopyState.QUEUED
    rig.core.reading.release(first, [1])
    rig.settle()
    assert rig.copy_state(first, key(39)) == CopyState.SAVED


def test_tenants_take_turns(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=64, tenants=("t", "u"))
    first, second = rig.attach(), rig.attach(tenant="u", engine_id="u")
    rig.tier.refuse_stores = Throttled("recovering")
    for start in range(0, 800, 400):
        rig.put(first, keys(*range(start, start + 400)))
    rig.put(second, keys(1))
    rig.tier.refuse_stores = None
    rig.now += 1
    rig.turn(2)
    assert rig.copy_state(second, key(1)) == CopyState.SAVED


def test_a_block_larger_than_what_is_written_at_once_is_written_alone(tier_rig: MakeRig) -> None:
    rig = tier_rig(slabs=40, slab_bytes=8192)
    session = rig.attach(contract(full(shards=16)))
    rig.save(session, keys(1, 2))
    assert rig.tier.keys() == set(keys(1, 2))


def test_what_admission_refused_may_go_and_is_offered_again_when_asked_for(
    tier_rig: MakeRig,
) -> None:
    rig = tier_rig(slabs=2)
    session = rig.attach()
    rig.tier.spoil = lambda load, key: Throttled("admission")
    rig.save(session, keys(1, 2))
    assert rig.copy_state(session, key(1)) == CopyState.REFUSED
    rig.tier.spoil = lambda load, key: None
    rig.lookup(session, keys(1))
    rig.settle()
    assert rig.tier.keys() == {key(1)}
    assert rig.count_of("demotion_refused", "admission") == 2


def test_wrong_bytes_in_memory_are_found_on_the_way_down(tier_rig: MakeRig) -> None:
    rig = tier_rig()
    session = rig.attach()
    rig.put(session, keys(1, 2))
    rig.view(rig.head(session, key(1)), 4096)[5] ^= 1
    rig.tiering.turn()
    rig.tiering.turn()
    assert rig.in_memory(session, keys(1, 2)) == [False, True]
    assert rig.count_of("checksum_failures", "demotion") == 1
    rig.check()

"""Eviction for room: takes the end of the coldest chain, and never more than needed."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from support.core_kit import Rig, contract, full, key, keys, mamba, refused

from kvhearth.errors import Reason
from kvhearth_server.core.slot_table import State

POLICIES = pytest.mark.parametrize("eviction", ["s3fifo", "sieve"])


def prefix(rig: Rig, session: int, length: int, kv_group: int = 0) -> int:
    """Returns the number of usable blocks of the chain 0, 1, ...: up to its first hole."""
    flags = rig.present(session, keys(*range(length)), kv_group)
    return ([*flags, False]).index(False)


def store_chain(rig: Rig, session: int, length: int, step: int, first: int = 0) -> None:
    """Stores a chain in commits of ``step`` blocks, each naming the one before."""
    for number in range(first, first + length, step):
        parent = key(number - 1) if number > first else b""
        rig.put(session, keys(*range(number, number + step)), parent=parent)


@POLICIES
@pytest.mark.parametrize("step", [100, 10, 1])
@pytest.mark.parametrize("evicted", [1, 10, 37, 99])
def test_a_usable_prefix_is_left(eviction: str, step: int, evicted: int) -> None:
    """Evicting 10 blocks of a chain of 100 leaves 90, in however many commits it was stored."""
    rig = Rig(8, eviction=eviction)
    session = rig.attach()
    store_chain(rig, session, 100, step)
    rig.take(session, 28 + evicted)
    assert prefix(rig, session, 100) == 100 - evicted


@POLICIES
def test_one_at_a_time_is_as_good(eviction: str) -> None:
    rig = Rig(8, eviction=eviction)
    session = rig.attach()
    store_chain(rig, session, 100, 4)
    rig.take(session, 28)
    for left in range(99, 70, -1):
        rig.take(session, 1)
        assert prefix(rig, session, 100) == left


def test_blocks_of_several_shards_go_no_faster_than_needed() -> None:
    rig = Rig(8)
    session = rig.attach(contract(full(shards=4)))
    store_chain(rig, session, 32, 8)
    rig.take(session, 5)
    assert prefix(rig, session, 32) == 27


def test_a_used_chain_outlives_an_unused_one() -> None:
    rig = Rig(4)
    session = rig.attach()
    store_chain(rig, session, 20, 5)
    store_chain(rig, session, 20, 5, first=100)
    assert rig.lookup(session, keys(*range(20))).hit_tokens == 320
    rig.take(session, 24 + 15)
    assert prefix(rig, session, 20) == 20
    assert sum(rig.present(session, keys(*range(100, 120)))) == 5


def test_of_a_tree_the_branches_go_before_the_trunk() -> None:
    rig = Rig(4)
    session = rig.attach()
    store_chain(rig, session, 10, 10)
    for branch in (100, 200, 300):
        rig.put(session, keys(*range(branch, branch + 10)), parent=key(9))
    rig.take(session, 24 + 30)
    assert prefix(rig, session, 10) == 10
    left = [
        n for b in (100, 200, 300) for n in range(b, b + 10) if rig.present(session, [key(n)])[0]
    ]
    assert left == []


@POLICIES
def test_four_times_the_arena_back_to_back(eviction: str) -> None:
    rig = Rig(4, eviction=eviction)
    session = rig.attach(contract(full(shards=2)))
    stored = 0
    for number in range(0, 128, 4):
        stored += int(rig.put(session, keys(*range(number, number + 4))).sum())
        rig.state.take_actions()
    assert stored == 128
    assert rig.state.ledger.segments[0].free == 0
    assert sum(rig.present(session, keys(*range(128)))) == 32


@POLICIES
def test_four_times_the_arena_in_several_sizes(eviction: str) -> None:
    rig = Rig(6, eviction=eviction)
    session = rig.attach(contract(full(), mamba(9000), full(20000)))
    for number in range(0, 400, 5):
        for kv_group, count in ((0, 5), (1, 1), (2, 2)):
            named = keys(*range(number, number + count))
            assert rig.put(session, named, kv_group=kv_group).all()


def test_a_scan_leaves_what_is_used_again_and_again() -> None:
    rig = Rig(8)
    session = rig.attach()
    store_chain(rig, session, 40, 8)
    rig.lookup(session, keys(*range(40)))
    # More blocks than the whole arena are stored between two uses.
    for number in range(1000, 3000, 8):
        rig.put(session, keys(*range(number, number + 8)))
        if number % 160 == 0:
            assert rig.lookup(session, keys(*range(40))).hit_tokens == 640
    assert prefix(rig, session, 40) == 40


def test_what_is_leased_stays_and_the_rest_goes() -> None:
    rig = Rig(1)
    session = rig.attach()
    store_chain(rig, session, 16, 4)
    found = rig.lookup(session, keys(*range(6)), lease_id=1)
    assert found.groups[0].leased.sum() == 6
    rig.take(session, 10)
    assert prefix(rig, session, 16) == 6
    with refused(Reason.HELD_CAP):
        rig.reserve(session, 1)
    assert prefix(rig, session, 16) == 6


def test_a_leased_end_does_not_keep_the_rest_of_its_chain() -> None:
    """Only the end of a state group's chain is leased: all other blocks can be evicted."""
    rig = Rig(1)
    session = rig.attach(contract(mamba()))
    store_chain(rig, session, 16, 4)
    rig.lookup(session, keys(*range(16)), lease_id=1)
    rig.take(session, 15)
    assert rig.present(session, keys(*range(16))) == [False] * 15 + [True]


def test_a_chain_that_lost_a_block_in_its_middle() -> None:
    """The next search must not begin at a block that has been removed."""
    rig = Rig(1)
    session = rig.attach()
    store_chain(rig, session, 16, 1)
    for _ in range(2):
        rig.take(session, 1)
    head = rig.head(session, key(13))
    assert rig.remove_bad(head, "reader")
    rig.check()
    for left in (13, 12, 11):
        rig.take(session, 1)
        assert prefix(rig, session, 16) == left


def test_a_chain_whose_middle_was_replaced_by_another_chains_block() -> None:
    rig = Rig(1)
    session = rig.attach(contract(full(), full()))
    store_chain(rig, session, 16, 1)
    for _ in range(2):
        rig.take(session, 1)
    head = rig.head(session, key(13))
    assert rig.remove_bad(head, "reader")
    rig.put(session, keys(13), kv_group=1)
    assert rig.head(session, key(13), 1) == head
    rig.take(session, 1)
    assert rig.present(session, keys(13), 1) == [True]
    assert prefix(rig, session, 16) == 12


def test_blocks_that_wait_for_their_checksum_can_go() -> None:
    rig = Rig(1)
    session = rig.attach()
    rig.put(session, keys(*range(16)), summed=False)
    rig.take(session, 4)
    assert prefix(rig, session, 16) == 12


def test_an_evicted_slots_extents_are_worth_nothing() -> None:
    rig = Rig(1)
    session = rig.attach(contract(full(shards=2)))
    rig.put(session, keys(*range(8)))
    extents = rig.lookup(session, keys(*range(8)), lease_id=1).groups[0].extents
    rig.core.reading.release(session, [1])
    rig.take(session, 8)
    generations = rig.state.table.generation[extents["slot"].astype(int)]
    assert (generations != extents["generation"]).all()
    assert rig.slots_in(State.SUMMED) == 0


def test_the_colder_namespace_goes_first() -> None:
    rig = Rig(4)
    old, new = rig.attach(), rig.attach(contract(revision="new"), engine_id="new")
    store_chain(rig, old, 32, 8)
    store_chain(rig, new, 32, 8)
    rig.take(new, 20)
    assert prefix(rig, old, 32) == 12
    assert prefix(rig, new, 32) == 32


def test_nothing_is_left_to_evict() -> None:
    rig = Rig(1)
    session = rig.attach()
    slots, generations = rig.take(session, 16)
    with refused(Reason.STOCK_CAP):
        rig.reserve(session, 1)
    rig.abort(session, slots, generations, in_doubt=True)
    with refused(Reason.STOCK_CAP):
        rig.reserve(session, 1)
    rig.abort(session, slots, generations)
    assert len(rig.take(session, 16)[0]) == 16


@POLICIES
def test_a_victim_does_not_cost_a_look_at_every_namespace(eviction: str) -> None:
    """With a thousand namespaces 2,048 victims took 3.5 s: all policies were sorted for each."""
    spaces, victims = 50, 32
    rig = Rig(2 * spaces, eviction=eviction)
    for number in range(spaces):
        session = rig.attach(contract(revision=str(number)), engine_id=str(number))
        rig.put(session, keys(*range(32)))
    looks = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal looks
        looks += event == "call" and frame.f_code.co_name == "age_rank"

    sys.setprofile(count)
    try:
        rig.core.writing.reserve(session, 1 << 40, rig.epoch(session), [(0, victims)])
    finally:
        sys.setprofile(None)
    assert rig.state.counts["evicted_blocks", "space"] == victims
    assert looks <= victims + 10, "policies were looked at as they filled"
    rig.check()

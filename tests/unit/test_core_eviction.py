"""Eviction for room: takes the end of the coldest chain, and never more than needed."""

from __future__ import annotations

import sys
from types import FrameType

from support.core_kit import Rig, contract, full, key, keys, mamba, refused

from kvhearth.errors import Reason


def prefix(rig: Rig, session: int, length: int, kv_group: int = 0) -> int:
    """Returns the number of usable blocks of the chain 0, 1, ...: up to its first hole."""
    flags = rig.present(session, keys(*range(length)), kv_group)
    return ([*flags, False]).index(False)


def store_chain(rig: Rig, session: int, length: int, step: int, first: int = 0) -> None:
    """Stores a chain in commits of ``step`` blocks, each naming the one before."""
    for number in range(first, first + length, step):
        parent = key(number - 1) if number > first else b""
        rig.put(session, keys(*range(number, number + step)), parent=parent)


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


def test_four_times_the_arena_back_to_back() -> None:
    rig = Rig(4)
    session = rig.attach(contract(full(shards=2)))
    stored = 0
    for number in range(0, 128, 4):
        stored += int(rig.put(session, keys(*range(number, number + 4))).sum())
        rig.state.take_actions()
    assert stored == 128
    assert rig.state.books[0].free == 0
    assert sum(rig.present(session, keys(*range(128)))) == 32


def test_four_times_the_arena_in_several_sizes() -> None:
    rig = Rig(6)
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


def test_blocks_that_wait_for_their_checksum_can_go() -> None:
    rig = Rig(1)
    session = rig.attach()
    rig.put(session, keys(*range(16)), summed=False)
    rig.take(session, 4)
    assert prefix(rig, session, 16) == 12


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


def test_a_victim_does_not_cost_a_look_at_every_namespace() -> None:
    """With a thousand namespaces 2,048 victims took 3.5 s: all policies were sorted for each."""
    spaces, victims = 50, 32
    rig = Rig(2 * spaces)
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

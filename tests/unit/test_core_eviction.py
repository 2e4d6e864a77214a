"""Eviction for room: takes the end of the coldest chain, and looks no further than needed."""

from __future__ import annotations

import sys
from types import FrameType

from support.core_kit import Rig, contract, full, key, keys, mamba


def store_chain(rig: Rig, session: int, length: int, step: int) -> None:
    """Store a chain in commits of ``step`` blocks, each naming the one before."""
    for number in range(0, length, step):
        parent = key(number - 1) if number else b""
        rig.put(session, keys(*range(number, number + step)), parent=parent)


def test_the_branches_of_a_tree_go_before_the_trunk() -> None:
    rig = Rig(4)
    session = rig.attach()
    store_chain(rig, session, 10, 10)
    branches = [range(first, first + 10) for first in (100, 200, 300)]
    for branch in branches:
        rig.put(session, keys(*branch), parent=key(9))
    rig.take(session, 24 + 30)
    assert all(rig.present(session, keys(*range(10))))
    assert not any(rig.present(session, keys(*(n for branch in branches for n in branch))))


def test_a_leased_block_stays_though_it_is_the_coldest() -> None:
    rig = Rig(1)
    session = rig.attach()
    for number in range(16):  # each a chain of its own
        rig.put(session, keys(number))
    rig.lookup(session, keys(0), lease_id=1)
    rig.lookup(session, keys(*range(1, 16)))
    rig.take(session, 8)
    there = rig.present(session, keys(*range(16)))
    assert there[0]
    assert sum(there) == 8


def test_stores_of_several_sizes_go_on_in_a_full_arena() -> None:
    rig = Rig(6)
    session = rig.attach(contract(full(), mamba(9000), full(20000)))
    for number in range(0, 200, 5):
        for kv_group, count in ((0, 5), (1, 1), (2, 2)):
            named = keys(*range(number, number + count))
            assert rig.put(session, named, kv_group=kv_group).all()


def test_a_scan_leaves_what_is_used_again_and_again() -> None:
    rig = Rig(8)
    session = rig.attach()
    store_chain(rig, session, 40, 8)
    rig.lookup(session, keys(*range(40)))
    # More blocks than the whole arena are stored between two uses.
    for number in range(1000, 1960, 40):
        rig.put(session, keys(*range(number, number + 40)))
        if number % 160 == 0:
            assert rig.lookup(session, keys(*range(40))).hit_tokens == 640
    assert all(rig.present(session, keys(*range(40))))


def test_a_victim_does_not_cost_a_look_at_every_namespace() -> None:
    """With a thousand namespaces 2,048 victims took 3.5 s: all policies were sorted for each."""
    spaces, victims = 20, 32
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

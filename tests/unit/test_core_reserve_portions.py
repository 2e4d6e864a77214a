"""A reservation in portions equals one in a single call, and each call evicts a bounded number."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
from support.core_kit import Rig, contract, full, keys, refused

from kvhearth.errors import Reason
from kvhearth_server.core.reservations import Reserved
from kvhearth_server.core.slot_table import State

NUMBER = 1 << 40
WANTED = 24


def full_rig(blocks: int = 64, **limits: object) -> tuple[Rig, int]:
    """An arena full of one namespace's blocks of one size, and its session."""
    rig = Rig(blocks // 16, **limits)
    session = rig.attach()
    for first in range(0, blocks, 8):
        rig.put(session, keys(*range(first, first + 8)))
    return rig, session


def begin(rig: Rig, session: int, evicted_max: int, count: int = WANTED) -> Reserved:
    """Reserves the first portion."""
    wants = [(0, count)]
    return rig.core.writing.reserve(session, NUMBER, rig.epoch(session), wants, evicted_max)


def go_on(rig: Rig, session: int, evicted_max: int) -> Reserved:
    """Reserves one more portion."""
    return rig.core.writing.reserve_more(session, NUMBER, rig.epoch(session), evicted_max)


def blocks_of(rig: Rig, session: int) -> int:
    """Number of blocks in the session's namespace."""
    return rig.state.namespaces.get(rig.group(session).namespace).blocks


@pytest.mark.parametrize("limits", [{}, {"namespace_quota_bytes": 64 * 4096}])
@pytest.mark.parametrize("portion", [1, 5, WANTED])
def test_no_call_evicts_more_than_its_portion(portion: int, limits: dict[str, int]) -> None:
    rig, session = full_rig(**limits)
    before, calls = blocks_of(rig, session), 1
    found = begin(rig, session, portion)
    while True:
        rig.check()
        assert 0 < before - blocks_of(rig, session) <= portion
        before = blocks_of(rig, session)
        if not found.more:
            break
        found = go_on(rig, session, portion)
        calls += 1
    assert calls == -(-WANTED // portion)
    (part,) = found.handed
    assert len(set(part.slots.reshape(-1).tolist())) == WANTED
    assert found.short is None
    assert blocks_of(rig, session) == 64 - WANTED
    assert rig.slots_in(State.RESERVED) == WANTED


def test_a_bound_is_told_at_the_end() -> None:
    rig, session = full_rig(stock_fraction_max=0.25)
    found = begin(rig, session, 5)
    while found.more:
        assert found.short is None
        found = go_on(rig, session, 5)
    assert found.short is Reason.STOCK_CAP
    assert len(found.handed[0].slots) == 16


def test_several_groups_are_granted_one_after_another() -> None:
    rig = Rig(4)
    session = rig.attach(contract(full(), full(shards=2)))
    for first in range(0, 64, 8):
        rig.put(session, keys(*range(first, first + 8)))
    wants = [(0, 7), (1, 9)]
    found = rig.core.writing.reserve(session, NUMBER, 1, wants, 2)
    while found.more:
        rig.check()
        found = go_on(rig, session, 2)
    assert [part.slots.shape for part in found.handed] == [(7, 1), (9, 2)]


def test_who_asks_again_meanwhile_gets_the_same() -> None:
    rig, session = full_rig()
    assert begin(rig, session, 5).more
    again = begin(rig, session, 100)
    assert not again.more
    assert go_on(rig, session, 5).handed == again.handed
    assert rig.slots_in(State.RESERVED) == WANTED


@pytest.mark.parametrize("in_doubt", [False, True])
def test_an_abort_in_between_ends_it(in_doubt: bool) -> None:
    rig, session = full_rig()
    begin(rig, session, 5)
    freed, quarantined = rig.core.writing.abort(session, [], [NUMBER], in_doubt=in_doubt)
    assert (freed, quarantined) == ((0, 5) if in_doubt else (5, 0))
    with refused(Reason.NOT_RESERVED):
        go_on(rig, session, 5)
    rig.check()


def test_an_epoch_that_ends_in_between_ends_it() -> None:
    rig, session = full_rig()
    begin(rig, session, 5)
    rig.core.bump_epoch(session, 1)
    with refused(Reason.STALE_EPOCH):
        rig.core.writing.reserve_more(session, NUMBER, 1, 5)


def test_a_group_that_ends_in_between_holds_nothing_afterwards() -> None:
    rig, session = full_rig()
    begin(rig, session, 5)
    rig.leave(session)
    with refused(Reason.GROUP_GONE):
        rig.core.writing.reserve_more(session, NUMBER, 1, 5)
    assert rig.slots_in(State.RESERVED) == rig.slots_in(State.QUARANTINED) == 0


def test_an_unfinished_one_is_not_forgotten_for_newer_ones() -> None:
    rig, session = full_rig()
    begin(rig, session, 5)
    for number in range(1, 100):
        slots, generations = rig.take(session, 1)
        rig.abort(session, slots, generations)
        assert rig.group(session).reservations.keys() & {NUMBER}, number
    found = go_on(rig, session, 100)
    assert len(found.handed[0].slots) == WANTED


def test_no_call_passes_over_all_used_blocks() -> None:
    """With all blocks of 64 engines used since their store, the first reservation from the full
    arena visited every one of them and stopped the loop for half a second.
    """
    blocks = 4096
    rig = Rig(blocks // 16, keys_max=blocks)
    session = rig.attach()
    rig.put(session, keys(*range(blocks)))
    for _ in range(2):
        rig.lookup(session, keys(*range(blocks)))
    passed = []

    def count(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "_pass_over":
            passed[-1] += frame.f_locals["used"]

    more = True
    while more:
        passed.append(0)
        sys.setprofile(count)
        try:
            found = go_on(rig, session, 5) if len(passed) > 1 else begin(rig, session, 5)
        finally:
            sys.setprofile(None)
        more = found.more
    assert sum(passed) >= blocks // 2
    assert max(passed) <= blocks // 4
    assert found.short is None
    assert len(found.handed[0].slots) == WANTED
    rig.check()

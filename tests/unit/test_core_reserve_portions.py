"""A reservation in portions equals one in a single call, and each call evicts a bounded number."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType

from support.core_kit import Rig, keys, refused

from kvhearth.errors import Reason
from kvhearth_server.core.reservations import Reserved
from kvhearth_server.core.slot_table import State

NUMBER = 1 << 40
WANTED = 24


def full_rig(blocks: int = 64, **limits: object) -> tuple[Rig, int]:
    """An arena full of one namespace's blocks of one size, and its session."""
    rig = Rig(blocks // 16, **limits)
    session = rig.attach()
    for first in range(0, blocks, blocks // 8):
        rig.put(session, keys(*range(first, first + blocks // 8)))
    return rig, session


def begin(rig: Rig, session: int, evicted_max: int) -> Reserved:
    """Reserve the first portion."""
    wants = [(0, WANTED)]
    return rig.core.writing.reserve(session, NUMBER, rig.epoch(session), wants, evicted_max)


def go_on(rig: Rig, session: int, evicted_max: int) -> Reserved:
    """Reserve one more portion."""
    return rig.core.writing.reserve_more(session, NUMBER, rig.epoch(session), evicted_max)


def test_no_call_evicts_more_than_its_portion() -> None:
    for portion, limits in (
        (1, {}),
        (5, {}),
        (5, {"namespace_quota_bytes": 64 * 4096}),
        (WANTED, {}),
    ):
        rig, session = full_rig(**limits)
        space, calls, before = rig.space(session), 1, 64
        found = begin(rig, session, portion)
        while True:
            rig.check()
            assert 0 < before - space.blocks <= portion
            before = space.blocks
            if not found.more:
                break
            found = go_on(rig, session, portion)
            calls += 1
        assert calls == -(-WANTED // portion)
        (part,) = found.handed
        assert len(set(part.slots.reshape(-1).tolist())) == WANTED
        assert found.short is None
        assert space.blocks == 64 - WANTED
        assert rig.slots_in(State.RESERVED) == WANTED


def test_whoever_asks_again_meanwhile_gets_the_same() -> None:
    rig, session = full_rig()
    assert begin(rig, session, 5).more
    again = begin(rig, session, 100)
    assert not again.more
    assert go_on(rig, session, 5).handed == again.handed
    assert rig.slots_in(State.RESERVED) == WANTED


def test_an_abort_an_epoch_or_the_groups_end_ends_it() -> None:
    def abort(rig: Rig, session: int, *, in_doubt: bool) -> None:
        counts = rig.core.writing.abort(session, [], [NUMBER], in_doubt=in_doubt)
        assert counts == ((0, 5) if in_doubt else (5, 0))

    ends: list[tuple[Callable[[Rig, int], object], Reason, int]] = [
        (lambda rig, session: abort(rig, session, in_doubt=False), Reason.NOT_RESERVED, 0),
        (lambda rig, session: abort(rig, session, in_doubt=True), Reason.NOT_RESERVED, 5),
        (lambda rig, session: rig.core.bump_epoch(session, 1), Reason.STALE_EPOCH, 5),
        (lambda rig, session: rig.leave(session), Reason.GROUP_GONE, 0),
    ]
    for end, reason, left in ends:
        rig, session = full_rig()
        begin(rig, session, 5)
        end(rig, session)
        with refused(reason):
            rig.core.writing.reserve_more(session, NUMBER, 1, 5)
        rig.check()
        assert rig.slots_in(State.RESERVED) + rig.slots_in(State.QUARANTINED) == left


def test_an_unfinished_one_is_not_forgotten_for_newer_ones() -> None:
    rig, session = full_rig()
    begin(rig, session, 5)
    for number in range(1, 100):
        slots, generations = rig.take(session, 1)
        rig.abort(session, slots, generations)
        assert NUMBER in rig.group(session).reservations, number
    assert len(go_on(rig, session, 100).handed[0].slots) == WANTED


def test_no_call_passes_over_all_used_blocks() -> None:
    """With all blocks of 64 engines used since their store, the first reservation from the full
    arena visited every one of them and stopped the loop for half a second.
    """
    blocks = 4096
    rig, session = full_rig(blocks, keys_max=blocks)
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

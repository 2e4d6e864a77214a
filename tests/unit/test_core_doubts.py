"""Aborts in doubt quarantine slots, and the next abort without doubt frees them."""

from __future__ import annotations

import numpy as np
from support.core_kit import Rig, contract, full

from kvhearth.model import I64
from kvhearth_server.core.groups import DOUBTS_REMEMBERED, SlotGrant
from kvhearth_server.core.reservations import SlotsItem
from kvhearth_server.core.slot_table import State

RESERVATION = 9


class Stock:
    """An engine with one reservation, named by its slots or by its id."""

    def __init__(self, count: int = 3) -> None:
        self.rig = Rig()
        self.session = self.rig.attach(contract(full(shards=2)))
        (self.part,) = self.rig.reserve(self.session, count, reservation_id=RESERVATION).handed

    def abort(self, how: str, *, in_doubt: bool) -> tuple[int, int]:
        """Aborts all of it."""
        part: SlotGrant = self.part
        items = [SlotsItem(part.slots.reshape(-1), part.generations.reshape(-1))]
        abort = self.rig.core.writing.abort
        try:
            if how == "slots":
                return abort(self.session, items, [], in_doubt=in_doubt)
            return abort(self.session, [], [RESERVATION], in_doubt=in_doubt)
        finally:
            self.rig.check()

    def states(self, slots: I64 | None = None) -> set[State]:
        """Returns the states of its slots."""
        found = self.rig.state.table.state[self.part.slots if slots is None else slots]
        return {State(value) for value in np.unique(found).tolist()}


def test_while_a_rank_is_gone_the_second_word_waits_for_it() -> None:
    stock = Stock()
    rig = stock.rig
    stock.abort("reservation", in_doubt=True)
    worker = rig.members[stock.session][1]
    rig.core.membership.leave(worker, finished=False)
    assert stock.abort("reservation", in_doubt=False) == (0, 0)
    assert stock.states() == {State.QUARANTINED}
    rig.core.membership.drained(worker)
    rig.check()
    assert stock.states() == {State.FREE}


def test_a_word_that_comes_again_and_again_takes_no_more_memory() -> None:
    stock = Stock()
    rig = stock.rig
    rig.core.membership.leave(rig.members[stock.session][1], finished=False)
    for _ in range(500):
        stock.abort("slots", in_doubt=False)
    assert sum(map(len, rig.group(stock.session).doubtful)) <= 66 * 6


def test_what_is_remembered_of_doubts_is_bounded() -> None:
    rig = Rig(slabs=4)
    session = rig.attach()
    known = rig.group(session).reservations
    for number in range(1, 2 * DOUBTS_REMEMBERED):
        (part,) = rig.core.writing.reserve(session, number, 1, [(0, 60)]).handed
        rig.core.writing.abort(session, [], [number], in_doubt=True)
        items = [SlotsItem(part.slots.reshape(-1), part.generations.reshape(-1))]
        assert rig.core.writing.abort(session, items, [], in_doubt=False) == (60, 0)
        # Each record covers 60 slots, none of which is still quarantined.
        slots = sum(part.slots.size for each in known.values() for part in each.handed)
        assert slots <= 4096 + 10 * 60
    rig.check()
    assert len(known) <= DOUBTS_REMEMBERED


def test_of_too_many_doubts_the_oldest_comes_back_with_the_group() -> None:
    rig = Rig(slabs=80)
    session = rig.attach()
    oldest = rig.core.writing.reserve(session, 1, 1, [(0, 1)]).handed[0].slots
    for number in range(1, DOUBTS_REMEMBERED + 2):
        if number > 1:
            rig.core.writing.reserve(session, number, 1, [(0, 1)])
        rig.core.writing.abort(session, [], [number], in_doubt=True)
    group = rig.group(session)
    assert len(group.reservations) == DOUBTS_REMEMBERED
    assert rig.core.writing.abort(session, [], [1], in_doubt=False) == (0, 0)
    assert rig.core.writing.abort(session, [], [2], in_doubt=False) == (1, 0)
    assert (rig.state.table.state[oldest] == State.QUARANTINED).all()
    rig.leave(session)
    assert (rig.state.table.state[oldest] == State.FREE).all()

"""Reserve, commit and abort, where the core's machine does not reach: shapes, bounds, members."""

from __future__ import annotations

import numpy as np
import pytest
from support.core_kit import Rig, contract, full, keys, refused

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.core.groups import DOUBTS_REMEMBERED
from kvhearth_server.core.reservations import SlotsItem
from kvhearth_server.core.slot_table import State

TWO_RANKS: Contract = contract(full(shards=2))


def states(rig: Rig, slots: np.ndarray) -> set[State]:
    """Return the states of the slots."""
    return {State(value) for value in np.unique(rig.state.table.state[slots]).tolist()}


def test_all_ranks_must_be_there() -> None:
    rig = Rig()
    scheduler = rig.join(TWO_RANKS)
    with refused(Reason.GROUP_INCOMPLETE):
        rig.reserve(scheduler, 1)
    worker = rig.join(TWO_RANKS, scheduler=False, rank=1)
    rig.take(scheduler, 1)
    rig.core.membership.leave(worker, finished=False)
    with refused(Reason.GROUP_INCOMPLETE):
        rig.reserve(scheduler, 1)


# -- commit ----------------------------------------------------------------------------------------


def test_slots_of_another_size_are_refused() -> None:
    rig = Rig()
    session = rig.attach(contract(full(), full(9000)))
    slots, generations = rig.take(session, 1)
    with refused(Reason.BAD_EXTENTS):
        rig.commit(session, rig.item(keys(0), slots, generations, kv_group=1))


def test_a_commit_of_nothing() -> None:
    rig = Rig()
    session = rig.attach()
    none = np.zeros((0, 1), np.int64)
    (stored,) = rig.commit(session, rig.item([], none, none.astype(np.uint32)))
    assert stored.tolist() == []
    assert rig.commit(session) == []


# -- abort -----------------------------------------------------------------------------------------


def test_slots_in_doubt_wait_for_a_second_word() -> None:
    rig = Rig()
    session = rig.attach()
    slots, generations = rig.take(session, 2)
    assert rig.abort(session, slots, generations, in_doubt=True) == (0, 2)
    assert states(rig, slots) == {State.QUARANTINED}
    with refused(Reason.NOT_RESERVED):
        rig.commit(session, rig.item(keys(0, 1), slots, generations))
    assert rig.abort(session, slots, generations, in_doubt=True) == (0, 0)
    assert rig.abort(session, slots, generations) == (2, 0)
    assert states(rig, slots) == {State.FREE}


def test_one_wrong_slot_refuses_the_whole_abort() -> None:
    rig = Rig()
    one, other = rig.attach(), rig.attach(engine_id="other")
    handed = [rig.take(one, 2), rig.take(other, 1)]
    items = [SlotsItem(slots.reshape(-1), numbers.reshape(-1)) for slots, numbers in handed]
    with refused(Reason.FOREIGN_EXTENT):
        rig.core.writing.abort(one, items, [], in_doubt=False)
    assert states(rig, handed[0][0]) == {State.RESERVED}


def test_a_reservation_that_was_aborted_is_not_made_any_more() -> None:
    rig = Rig()
    session = rig.attach()
    rig.core.writing.abort(session, [], [1], in_doubt=False)  # it overtook its reservation
    rig.reserve(session, 1, reservation_id=2)
    rig.core.writing.abort(session, [], [2], in_doubt=True)
    for number in (1, 2):
        with refused(Reason.NOT_RESERVED):
            rig.reserve(session, 1, reservation_id=number)


def test_a_dead_rank_keeps_what_it_might_write_whatever_the_scheduler_says() -> None:
    rig = Rig()
    scheduler = rig.attach(TWO_RANKS)
    worker = rig.members[scheduler][1]
    slots, generations = rig.take(scheduler, 2)
    rig.core.membership.leave(worker, finished=False)
    assert rig.abort(scheduler, slots, generations) == (0, 4)
    for _ in range(500):  # the same word again and again takes no more memory
        rig.core.writing.abort(
            scheduler, [SlotsItem(slots.reshape(-1), generations.reshape(-1))], [], in_doubt=False
        )
    assert sum(map(len, rig.group(scheduler).doubtful)) <= 66 * 4
    assert states(rig, slots) == {State.QUARANTINED}
    rig.checked(rig.core.membership.drained, worker)
    assert states(rig, slots) == {State.FREE}


def test_remembered_doubts_cover_a_bounded_number_of_slots() -> None:
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


def test_the_oldest_of_too_many_doubts_comes_back_with_the_group() -> None:
    rig = Rig(slabs=80)
    session = rig.attach()
    oldest = rig.core.writing.reserve(session, 1, 1, [(0, 1)]).handed[0].slots
    for number in range(1, DOUBTS_REMEMBERED + 2):
        if number > 1:
            rig.core.writing.reserve(session, number, 1, [(0, 1)])
        rig.core.writing.abort(session, [], [number], in_doubt=True)
    assert len(rig.group(session).reservations) == DOUBTS_REMEMBERED
    assert rig.core.writing.abort(session, [], [1], in_doubt=False) == (0, 0)
    assert rig.core.writing.abort(session, [], [2], in_doubt=False) == (1, 0)
    assert states(rig, oldest) == {State.QUARANTINED}
    rig.leave(session)
    assert states(rig, oldest) == {State.FREE}


# -- bounds ----------------------------------------------------------------------------------------


def test_the_list_of_handed_out_slots_stays_short() -> None:
    rig = Rig(4)
    session = rig.attach()
    for number in range(100):
        slots, generations = rig.take(session, 60)
        rig.commit(session, rig.item(keys(number), slots[:1], generations[:1]))
        rig.abort(session, slots[1:], generations[1:])
        assert rig.group(session).handed_count <= 4096 + 64


def test_aborts_that_precede_their_reservation_are_bounded() -> None:
    rig = Rig()
    session = rig.attach()
    for number in range(1, 3000):
        rig.core.writing.abort(session, [], [number], in_doubt=False)
    assert len(rig.group(session).released_early) == 1024
    assert rig.reserve(session, 1, reservation_id=5).short is None


# -- members ---------------------------------------------------------------------------------------


def test_a_member_that_is_attached_cannot_be_drained() -> None:
    rig = Rig()
    session = rig.attach()
    slots, _ = rig.take(session, 1)
    rig.core.membership.drained(session)
    assert states(rig, slots) == {State.RESERVED}
    assert rig.reserve(session, 1).short is None


def test_a_member_that_mapped_nothing_is_quiet_at_once() -> None:
    rig = Rig()
    scheduler = rig.join(contract(), rank=-1, mapped=False)
    worker = rig.join(contract(), scheduler=False, rank=0)
    slots, _ = rig.take(scheduler, 1)
    rig.core.membership.leave(scheduler, finished=False)
    rig.checked(rig.core.membership.leave, worker, finished=True)
    assert states(rig, slots) == {State.FREE}


def test_a_rank_that_comes_and_goes_leaves_no_record() -> None:
    rig = Rig()
    scheduler = rig.join(TWO_RANKS)
    for finished in (True, False) * 20:
        worker = rig.join(TWO_RANKS, scheduler=False, rank=1)
        rig.core.membership.leave(worker, finished=finished)
        rig.core.membership.drained(worker)
    assert list(rig.group(scheduler).members) == [scheduler]
    assert rig.state.groups.of_session(worker) is None


def test_a_contract_whose_block_can_never_fit_is_refused_at_once() -> None:
    """A 64 KiB slab has one 40 KiB slot: two slabs hold a block of two shards, not of three."""
    rig = Rig(2)
    assert len(rig.take(rig.attach(contract(full(40 * 1024, shards=2))), 1)[0]) == 1
    with pytest.raises(KVHearthError, match=r"groups\[0\].page_bytes") as caught:
        rig.join(contract(full(40 * 1024, shards=3)), engine_id="larger")
    assert caught.value.reason is Reason.BAD_CONTRACT

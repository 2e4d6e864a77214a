"""Reserve, commit, abort, and slots that a client may still be writing to."""

from __future__ import annotations

import numpy as np
import pytest
from support.core_kit import Rig, contract, full, keys, refused

from kvhearth.contract import Contract
from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.core.reservations import SlotsItem
from kvhearth_server.core.slot_table import State

TWO_RANKS: Contract = contract(full(shards=2))


def states(rig: Rig, slots: np.ndarray) -> set[State]:
    """Returns the states of the slots."""
    return {State(value) for value in np.unique(rig.state.table.state[slots]).tolist()}


# -- reserve ---------------------------------------------------------------------------------------


def test_asking_again_gives_the_same_slots() -> None:
    rig = Rig()
    session = rig.attach()
    first = rig.reserve(session, 3, reservation_id=77)
    again = rig.reserve(session, 3, reservation_id=77)
    assert again.handed == first.handed
    assert rig.slots_in(State.RESERVED) == 3


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


def test_a_reserved_extent_tells_nothing_of_its_last_block() -> None:
    rig = Rig(1)
    session = rig.attach()
    rig.put(session, keys(*range(16)))
    slots, _ = rig.take(session, 4)
    extents = rig.state.table.extents(slots, 4096)
    assert not extents["flags"].any()
    assert not extents["checksum"].tobytes().strip(b"\0")


# -- commit ----------------------------------------------------------------------------------------


def test_nothing_is_applied_if_one_item_is_wrong() -> None:
    rig = Rig()
    session = rig.attach()
    slots, generations = rig.take(session, 3)
    good = rig.item(keys(0), slots[:1], generations[:1])
    bad = rig.item(keys(1), slots[1:2], generations[1:2] + np.uint32(1))
    with refused(Reason.STALE_EXTENT):
        rig.commit(session, good, bad)
    assert rig.present(session, keys(0, 1)) == [False, False]
    assert states(rig, slots) == {State.RESERVED}


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


def test_what_is_in_doubt_waits_for_a_second_word() -> None:
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


def test_a_word_of_long_ago_does_not_free_what_is_in_doubt_now() -> None:
    """The first abort arrives again after its slot was handed out and quarantined once more."""
    rig = Rig()
    session = rig.attach()
    slots, generations = rig.take(session, 1)
    rig.abort(session, slots, generations, in_doubt=True)
    rig.abort(session, slots, generations)
    again, later = rig.take(session, 1)
    assert again.tolist() == slots.tolist()
    rig.abort(session, again, later, in_doubt=True)
    with refused(Reason.STALE_EXTENT):
        rig.abort(session, slots, generations)
    assert states(rig, slots) == {State.QUARANTINED}
    assert rig.abort(session, again, later) == (1, 0)


def test_one_wrong_slot_refuses_the_whole_abort() -> None:
    rig = Rig()
    one, other = rig.attach(), rig.attach(engine_id="other")
    slots, generations = rig.take(one, 2)
    foreign, theirs = rig.take(other, 1)
    items = [
        SlotsItem(slots.reshape(-1), generations.reshape(-1)),
        SlotsItem(foreign.reshape(-1), theirs.reshape(-1)),
    ]
    with refused(Reason.FOREIGN_EXTENT):
        rig.core.writing.abort(one, items, [], in_doubt=False)
    assert states(rig, slots) == {State.RESERVED}


# -- slots that may still be written to ------------------------------------------------------------


def test_nothing_is_freed_before_the_last_member_is_drained() -> None:
    rig = Rig()
    scheduler = rig.attach(TWO_RANKS)
    worker = rig.members[scheduler][1]
    slots, _ = rig.take(scheduler, 3)
    rig.core.membership.leave(scheduler, finished=True)
    rig.check()
    assert states(rig, slots) == {State.QUARANTINED}
    rig.core.membership.leave(worker, finished=False)
    rig.check()
    assert states(rig, slots) == {State.QUARANTINED}
    rig.core.membership.drained(worker)
    rig.check()
    assert states(rig, slots) == {State.FREE}
    assert len(rig.state.groups) == 0


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
    rig.core.membership.leave(worker, finished=True)
    rig.check()
    assert states(rig, slots) == {State.FREE}


def test_a_dead_rank_keeps_what_it_might_write_whatever_the_scheduler_says() -> None:
    rig = Rig()
    scheduler = rig.attach(TWO_RANKS)
    worker = rig.members[scheduler][1]
    slots, generations = rig.take(scheduler, 2)
    rig.core.membership.leave(worker, finished=False)
    assert rig.abort(scheduler, slots, generations) == (0, 4)
    assert states(rig, slots) == {State.QUARANTINED}
    rig.core.membership.drained(worker)
    rig.check()
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


def test_an_ended_group_answers_nobody() -> None:
    rig = Rig()
    scheduler = rig.attach(TWO_RANKS)
    worker = rig.members[scheduler][1]
    rig.core.membership.leave(scheduler, finished=True)
    for session in (scheduler, worker, 4711):
        with refused(Reason.GROUP_GONE):
            rig.state.group_of(session)
    again = rig.join(TWO_RANKS)
    assert rig.group(again).number != 1
    assert rig.group(again).incarnation == 2


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_a_contract_whose_block_can_never_fit_is_refused_at_once(shards: int) -> None:
    """A 64 KiB slab has one 40 KiB slot: two slabs hold a block of two shards, not of three."""
    rig = Rig(2)
    made = contract(full(40 * 1024, shards=shards))
    if shards < 3:
        assert len(rig.take(rig.attach(made), 1)[0]) == 1
        return
    with pytest.raises(KVHearthError, match=r"groups\[0\].page_bytes") as caught:
        rig.join(made)
    assert caught.value.reason is Reason.BAD_CONTRACT


def test_the_list_of_what_was_handed_out_stays_short() -> None:
    rig = Rig(4)
    session = rig.attach()
    for number in range(100):
        slots, generations = rig.take(session, 60)
        rig.commit(session, rig.item(keys(number), slots[:1], generations[:1]))
        rig.abort(session, slots[1:], generations[1:])
        assert rig.group(session).handed_count <= 4096 + 64


def test_the_words_that_came_too_early_are_bounded() -> None:
    rig = Rig()
    session = rig.attach()
    for number in range(1, 3000):
        rig.core.writing.abort(session, [], [number], in_doubt=False)
    assert len(rig.group(session).released_early) == 1024
    assert rig.reserve(session, 1, reservation_id=5).short is None

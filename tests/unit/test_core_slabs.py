"""Slabs: fixed pieces cut into slots of one size, and slabs that change their slot size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core_kit import SLAB_BYTES, Rig, contract, full, keys, no_deadline, refused

from kvhearth.errors import Reason
from kvhearth.model import I64
from kvhearth_server.core.slot_table import Geometry, SlabPool, SlotTable, State

SMALL, ODD, LARGE = 4096, 12288, 16384


class Pool:
    """A pool, its table and the sizes reported to it."""

    def __init__(self, slabs: int = 4) -> None:
        geometry = Geometry.of([("a", SLAB_BYTES), ("b", slabs * SLAB_BYTES)], SLAB_BYTES, 4096)
        self.table = SlotTable(geometry, np.zeros(geometry.slot_count, np.uint32))
        self.sized: list[tuple[int, int]] = []
        self.pool = SlabPool(self.table, 1, lambda slab, size: self.sized.append((slab, size)))

    def take(self, size: int, count: int) -> I64:
        """Takes slots and uses them."""
        slots = self.pool.take(size, count)
        self.table.state[slots] = State.RESERVED
        self.pool.check()
        return slots

    def give(self, slots: I64) -> int:
        """Frees slots; returns the bytes of withheld ones."""
        self.table.state[slots] = State.FREE
        lost = self.pool.give(slots)
        self.pool.check()
        return lost


def test_slots_come_out_in_rising_order_and_only_an_empty_slab_is_taken_back() -> None:
    pool = Pool(2)
    slots = pool.take(SMALL, 3)
    assert slots.tolist() == [16, 17, 18]
    with pytest.raises(ValueError, match="not empty"):
        pool.pool.take_back(1)
    pool.give(slots)
    assert pool.pool.empty_of_others(SMALL) is None
    assert pool.pool.empty_of_others(LARGE) == 1
    pool.pool.take_back(1)
    pool.pool.check()
    assert pool.pool.can_take(LARGE) == 8
    assert pool.sized == [(1, SMALL), (1, 0)]


def test_free_slots_are_never_copied_to_a_larger_stack() -> None:
    """At four million slots one call took 0.2 s for it."""
    pool = Pool(4)
    slots = pool.take(SMALL, 16)
    stack = pool.pool._first.classes[SMALL].free
    pool.give(np.concatenate([slots, pool.take(SMALL, 48)]))
    assert pool.pool._first.classes[SMALL].free is stack
    assert pool.pool.free_count(SMALL) == 64


def test_numbers_that_name_no_slot() -> None:
    pool = Pool(2)
    pool.take(ODD, 1)
    numbers = np.array([-1, 0, 15, 16, 20, 21, 31, 32, 48, 1 << 32])
    known = pool.table.in_use(numbers)
    assert numbers[known].tolist() == [16, 20]


@no_deadline
@given(data=st.data())
def test_against_a_set_of_free_slots(data: st.DataObject) -> None:
    pool = Pool(3)
    used: dict[int, int] = {}
    withheld: set[int] = set()
    capacity = 3 * SLAB_BYTES
    for _ in range(data.draw(st.integers(1, 30))):
        size = data.draw(st.sampled_from([SMALL, ODD, LARGE]))
        if data.draw(st.integers(0, 5)) == 0:
            slabs = data.draw(st.sets(st.integers(1, 3)))
            if data.draw(st.booleans()):
                capacity -= pool.pool.withhold(slabs)
                withheld |= slabs
            else:
                empty = {slab for slab in slabs if not pool.table.slab_slot_bytes[slab]}
                capacity += pool.pool.offer(empty)
                withheld -= empty
            pool.pool.check()
        elif data.draw(st.booleans()):
            count = data.draw(st.integers(0, 20))
            can = pool.pool.can_take(size)
            slots = pool.take(size, count)
            assert len(slots) == min(count, can)
            assert len(pool.table.extents(slots, size)) == len(slots)
            assert not used.keys() & set(slots.tolist())
            assert not withheld & set(pool.table.slabs_of(slots).tolist())
            used |= dict.fromkeys(slots.tolist(), size)
        elif used:
            some = data.draw(st.lists(st.sampled_from(sorted(used)), unique=True, min_size=1))
            capacity -= pool.give(np.array(some, np.int64))
            used = {slot: size for slot, size in used.items() if slot not in some}
        elif (slab := pool.pool.empty_of_others(size)) is not None:
            pool.pool.take_back(slab)
            pool.pool.check()
        assert pool.pool.slab_used.sum() == len(used)
        for slot, of_size in used.items():
            assert pool.table.slot_bytes_of(np.array([slot]))[0] == of_size
        if not withheld:
            assert capacity <= 3 * SLAB_BYTES
        assert capacity >= sum(used.values())


def test_withheld_slabs_come_back_behind_the_others_in_rising_order() -> None:
    pool = Pool(4)
    assert pool.pool.withhold([2, 3, 4]) == 3 * SLAB_BYTES
    assert pool.pool.can_take(LARGE) == SLAB_BYTES // LARGE
    assert pool.pool.offer([2, 3]) == 2 * SLAB_BYTES
    slots = np.concatenate([pool.take(LARGE, 4) for _ in range(4)])
    assert pool.table.slabs_of(slots).tolist() == [1] * 4 + [2] * 4 + [3] * 4
    assert pool.pool.withhold([1]) == 0
    assert pool.give(slots) == SLAB_BYTES
    assert pool.pool.can_take(LARGE) == 8


@no_deadline
@given(used=st.sets(st.integers(0, 15)))
def test_an_adopted_slab_has_the_other_slots_free(used: set[int]) -> None:
    pool = Pool(2)
    slots = np.array(sorted(used), np.int64) + 32
    pool.table.state[slots] = State.SUMMED
    pool.pool.adopt(2, SMALL, slots)
    pool.pool.check()
    assert pool.pool.free_count(SMALL) == 16 - len(used)
    taken = pool.take(SMALL, 32)
    assert len(taken) == 32 - len(used)
    assert not set(taken.tolist()) & set(slots.tolist())


# -- slabs that change their size ------------------------------------------------------------------

TWO_SIZES = contract(full(SMALL), full(LARGE), full(ODD))


@pytest.mark.parametrize("free_by", ["abort", "release", "leave"])
def test_a_refusal_is_not_remembered_for_too_long(free_by: str) -> None:
    rig = Rig(2)
    session, other = rig.attach(TWO_SIZES), rig.attach(TWO_SIZES, engine_id="other")
    if free_by in ("abort", "leave"):
        slots, generations = rig.take(other, 28)
    else:
        rig.put(other, keys(*range(28)))
        rig.lookup(other, keys(*range(28)), lease_id=9)
    with refused(Reason.NO_SPACE):
        rig.reserve(session, 1, 1)
    if free_by == "abort":
        rig.abort(other, slots, generations)
    elif free_by == "leave":
        rig.leave(other)
    else:
        rig.release(other, 9)
    assert rig.reserve(session, 1, 1).short is None


def test_the_slab_that_was_used_longest_ago_changes_its_size() -> None:
    rig = Rig(2)
    session = rig.attach(TWO_SIZES)
    for first in (0, 16):
        rig.put(session, keys(*range(first, first + 16)))
    rig.lookup(session, keys(*range(16)))
    rig.put(session, keys(100), kv_group=1)
    assert all(rig.present(session, keys(*range(16))))
    assert not any(rig.present(session, keys(*range(16, 32))))

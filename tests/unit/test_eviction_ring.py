"""FifoRing against a list, with queues long enough that chunks fill, become sparse and merge."""

from __future__ import annotations

import numpy as np
import pytest

from kvhearth_server.core.slot_rings import CHUNK_ENTRIES, FifoRing, PolicyArrays, remove_slots

SLOT_COUNT = 8 * CHUNK_ENTRIES


class Pair:
    """A ring and the list that it must equal, driven together."""

    def __init__(self, seed: int) -> None:
        print(f"seed {seed}")
        self.rng = np.random.default_rng(seed)
        self.arrays = PolicyArrays(SLOT_COUNT)
        self.ring = FifoRing(self.arrays)
        self.order: list[int] = []
        self.pushed_at = np.zeros(SLOT_COUNT, np.int64)
        self.tick = 0

    def pushed(self, slots: list[int]) -> None:
        """Note that slots were pushed, in this order."""
        self.pushed_at[slots] = range(self.tick + 1, self.tick + len(slots) + 1)
        self.tick += len(slots)
        self.order += slots

    def push(self, count: int) -> None:
        free = np.setdiff1d(np.arange(SLOT_COUNT), self.order)
        slots = self.rng.permutation(free)[:count]
        if len(slots) == 1:
            self.ring.push_one(int(slots[0]))
        else:
            self.ring.push(slots)
        self.pushed(slots.tolist())

    def remove_bulk(self, count: int) -> None:
        slots = self.rng.permutation(np.array(self.order, np.int64))[:count]
        remove_slots(self.arrays, slots, (self.ring,))
        gone = set(slots.tolist())
        self.order = [slot for slot in self.order if slot not in gone]

    def remove_run(self, count: int) -> None:
        """Remove neighbours in the queue one by one, so that one chunk empties before others."""
        low = int(self.rng.integers(0, max(1, len(self.order) - count)))
        slots = self.order[low : low + count]
        for slot in self.rng.permutation(np.array(slots, np.int64)).tolist():
            assert self.ring.remove_one(slot)
        del self.order[low : low + count]

    def move_oldest(self, count: int) -> None:
        for _ in range(min(count, len(self.order))):
            slot = self.ring.peek()
            assert slot == self.order.pop(0)
            self.ring.move_oldest(self.ring)
            self.pushed([slot])

    def compare(self) -> None:
        self.ring.check()
        order = self.ring.slots()
        assert order.tolist() == self.order
        assert self.ring.peek() == (self.order[0] if self.order else None)
        ticks = np.array([self.arrays.tick_of(slot) for slot in self.order], np.int64)
        assert (np.diff(ticks) >= 0).all()
        assert (ticks >= self.pushed_at[order]).all()
        assert not len(ticks) or ticks[-1] <= self.tick


@pytest.mark.parametrize("seed", [51, 52])
def test_against_a_list(seed: int) -> None:
    pair = Pair(seed)
    for _ in range(100):
        step = pair.rng.integers(0, 5)
        size = int(pair.rng.choice([1, 5, 300, 1500]))
        if step == 0:
            pair.push(size)
        elif step == 1:
            pair.push(1)
            pair.push(2 * size)
        elif step == 2:
            pair.remove_bulk(2 * size)
        elif step == 3:
            pair.remove_run(size)
        else:
            pair.move_oldest(min(size, 400))
        pair.compare()


def test_rings_beyond_the_spare_chunks_make_the_arrays_grow() -> None:
    arrays = PolicyArrays(400)
    rings = [FifoRing(arrays) for _ in range(400)]
    room = len(arrays.entries)
    for slot, ring in enumerate(rings):
        ring.push_one(slot)
    assert len(arrays.entries) > room
    for slot, ring in enumerate(rings[::20]):
        ring.check()
        assert ring.slots().tolist() == [20 * slot]

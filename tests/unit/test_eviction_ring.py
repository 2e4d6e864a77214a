"""FifoRing against a list, with queues long enough that chunks fill, become sparse and merge."""

from __future__ import annotations

import numpy as np
import pytest

from kvhearth_server.core.slot_rings import CHUNK_ENTRIES, FifoRing, PolicyArrays, remove_slots

SLOT_COUNT = 8 * CHUNK_ENTRIES


class ListRing:
    """The same on a list."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.pushed_at: dict[int, int] = {}
        self.tick = 0

    def push(self, slots: list[int]) -> None:
        for slot in slots:
            self.tick += 1
            self.pushed_at[slot] = self.tick
        self.order += slots

    def remove(self, slots: list[int]) -> None:
        gone = set(slots)
        self.order = [slot for slot in self.order if slot not in gone]


class Pair:
    """A ring and its model, driven together."""

    def __init__(self, seed: int) -> None:
        print(f"seed {seed}")
        self.rng = np.random.default_rng(seed)
        self.arrays = PolicyArrays(SLOT_COUNT)
        self.ring = FifoRing(self.arrays)
        self.model = ListRing()

    def push(self, count: int) -> None:
        free = np.setdiff1d(np.arange(SLOT_COUNT), self.model.order)
        slots = self.rng.permutation(free)[:count]
        if len(slots) == 1:
            self.ring.push_one(int(slots[0]))
        else:
            self.ring.push(slots)
        self.model.push(slots.tolist())

    def remove_bulk(self, count: int) -> None:
        slots = self.rng.permutation(np.array(self.model.order, np.int64))[:count]
        remove_slots(self.arrays, slots, (self.ring,))
        self.model.remove(slots.tolist())

    def remove_run(self, count: int) -> None:
        """Removes neighbours in the queue one by one, so that one chunk empties before others."""
        low = int(self.rng.integers(0, max(1, len(self.model.order) - count)))
        slots = self.model.order[low : low + count]
        for slot in self.rng.permutation(np.array(slots, np.int64)).tolist():
            assert self.ring.remove_one(slot)
        self.model.remove(slots)

    def move_oldest(self, count: int) -> None:
        for _ in range(min(count, len(self.model.order))):
            slot = self.ring.peek()
            assert slot == self.model.order[0]
            self.ring.move_oldest(self.ring)
            self.model.remove([slot])
            self.model.push([slot])

    def compare(self) -> None:
        self.ring.check()
        order = self.ring.slots().tolist()
        assert order == self.model.order
        assert self.ring.peek() == (order[0] if order else None)
        ticks = [self.arrays.tick_of(slot) for slot in order]
        assert ticks == sorted(ticks)
        assert all(t >= self.model.pushed_at[s] for t, s in zip(ticks, order, strict=True))
        assert not ticks or ticks[-1] <= self.model.tick


@pytest.mark.parametrize("seed", range(51, 54))
def test_against_a_list(seed: int) -> None:
    pair = Pair(seed)
    for _ in range(150):
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
    for slot, ring in enumerate(rings):
        ring.check()
        assert ring.slots().tolist() == [slot]

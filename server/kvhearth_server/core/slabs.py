"""Slab allocator of one segment: slot size of each slab, and free slots of each size.

A slab belongs to one slot size until it is empty and another size wants it. Free slots of a size
are a stack in an array, so that taking and giving thousands costs a few array operations.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvhearth.model import I64
from kvhearth_server.core.slot_table import SlotTable, State


class _SizeClass:
    """The free slots of one slot size; a segment has at most ``slots_max`` of them."""

    def __init__(self, slots_max: int) -> None:
        # Full size from the start: copying a stack of millions takes longer than a call may.
        # Entries that were never used take no memory.
        self.free = np.zeros(slots_max, np.int64)
        self.count = 0

    def push(self, slots: I64) -> None:
        need = self.count + len(slots)
        self.free[self.count : need] = slots
        self.count = need

    def pop(self, count: int) -> I64:
        """Take ``count`` slots; the lowest was pushed last, so neighbours come out ascending."""
        start = self.count - count
        taken = self.free[start : self.count][::-1].copy()
        self.count = start
        return taken

    def drop_slab(self, slab: int, stride: int) -> None:
        live = self.free[: self.count]
        kept = live[live // stride != slab]
        self.free[: len(kept)] = kept
        self.count = len(kept)


class SlabPool:
    """Allocator of one segment; does not decide on eviction."""

    def __init__(self, table: SlotTable, segment: int, sized: Callable[[int, int], None]) -> None:
        """Make a pool; ``sized`` is called with each slab and its new slot size, in order."""
        self._table = table
        self._sized = sized
        geometry = table.geometry
        shape = geometry.segments[segment]
        self.segment = segment
        self.first_slab = shape.first_slab
        self.end_slab = shape.first_slab + shape.slabs
        self._stride = geometry.stride
        self._slab_bytes = geometry.slab_bytes
        self._classes: dict[int, _SizeClass] = {}
        self.slab_used = np.zeros(shape.slabs, np.int64)
        # A dict, because adoption takes slabs out of the middle; the last one is assigned next.
        self._unassigned = dict.fromkeys(range(self.end_slab - 1, self.first_slab - 1, -1))

    @property
    def unassigned_count(self) -> int:
        """Number of slabs that no slot size holds."""
        return len(self._unassigned)

    @property
    def largest_free_bytes(self) -> int:
        """Size of the largest slot that could be taken without evicting anything."""
        if self._unassigned:
            return self._slab_bytes
        return max((size for size, found in self._classes.items() if found.count), default=0)

    def free_count(self, slot_bytes: int) -> int:
        """Number of free slots of a size, without taking another slab."""
        found = self._classes.get(slot_bytes)
        return found.count if found else 0

    def slots_per_slab(self, slot_bytes: int) -> int:
        """Number of slots in a slab of this size."""
        return self._slab_bytes // slot_bytes

    def can_take(self, slot_bytes: int) -> int:
        """Number of slots that could be taken without evicting anything."""
        return self.free_count(slot_bytes) + len(self._unassigned) * self.slots_per_slab(slot_bytes)

    def take(self, slot_bytes: int, count: int) -> I64:
        """Take up to ``count`` free slots, assigning slabs as needed; their state stays FREE."""
        found = self._class_of(slot_bytes)
        while found.count < count and self._unassigned:
            self.assign(self._unassigned.popitem()[0], slot_bytes)
        slots = found.pop(min(count, found.count))
        np.add.at(self.slab_used, slots // self._stride - self.first_slab, 1)
        return slots

    def _class_of(self, slot_bytes: int) -> _SizeClass:
        found = self._classes.get(slot_bytes)
        if found is None:
            slots_max = (self.end_slab - self.first_slab) * self.slots_per_slab(slot_bytes)
            found = self._classes[slot_bytes] = _SizeClass(slots_max)
        return found

    def give(self, slots: I64) -> None:
        """Return slots of any sizes; the caller has set their state to FREE."""
        if not len(slots):
            return
        np.subtract.at(self.slab_used, slots // self._stride - self.first_slab, 1)
        sizes = self._table.slot_bytes_of(slots)
        first = int(sizes[0])
        if (sizes == first).all():
            self._classes[first].push(slots[::-1])
            return
        for size in np.unique(sizes):
            self._classes[int(size)].push(slots[sizes == size][::-1])

    def assign(self, slab: int, slot_bytes: int, used: I64 | None = None) -> None:
        """Give a slab to a slot size; all its slots except ``used`` become free."""
        self._table.slab_slot_bytes[slab] = slot_bytes
        self._sized(slab, slot_bytes)
        free = np.ones(self.slots_per_slab(slot_bytes), np.bool_)
        first = slab * self._stride
        if used is not None:
            free[used - first] = False
        slots = np.flatnonzero(free)[::-1].astype(np.int64) + first
        self._class_of(slot_bytes).push(slots)

    def adopt(self, slab: int, slot_bytes: int, used: I64) -> None:
        """Restore a slab after a restart: ``used`` are its slots that are not free."""
        del self._unassigned[slab]
        self.assign(slab, slot_bytes, used)
        self.slab_used[slab - self.first_slab] = len(used)

    def take_back(self, slab: int) -> None:
        """Take an empty slab from its slot size."""
        if self.slab_used[slab - self.first_slab]:
            raise ValueError(f"slab {slab} is not empty")
        size = int(self._table.slab_slot_bytes[slab])
        self._classes[size].drop_slab(slab, self._stride)
        self._table.slab_slot_bytes[slab] = 0
        self._sized(slab, 0)
        self._unassigned[slab] = None

    def slabs_of_others(self, slot_bytes: int) -> list[int]:
        """Slabs that other slot sizes hold, the emptiest first."""
        sizes = self._table.slab_slot_bytes[self.first_slab : self.end_slab]
        others = np.flatnonzero((sizes != 0) & (sizes != slot_bytes))
        order = np.argsort(self.slab_used[others], kind="stable")
        return [int(slab) + self.first_slab for slab in others[order]]

    def empty_of_others(self, slot_bytes: int) -> int | None:
        """An empty slab that another slot size holds; None if there is none."""
        sizes = self._table.slab_slot_bytes[self.first_slab : self.end_slab]
        empty = (self.slab_used == 0) & (sizes != 0) & (sizes != slot_bytes)
        place = int(empty.argmax())
        return place + self.first_slab if empty[place] else None

    def slots_in(self, slab: int) -> slice:
        """Row range of a slab's slots."""
        size = int(self._table.slab_slot_bytes[slab])
        start = slab * self._stride
        return slice(start, start + (self.slots_per_slab(size) if size else 0))

    def check(self) -> None:
        """Raise ValueError if free stacks, slab counts and slot states disagree."""
        table = self._table
        for size, found in self._classes.items():
            live = found.free[: found.count]
            ordered = np.sort(live)  # np.unique takes several times as long
            if (ordered[1:] == ordered[:-1]).any():
                raise ValueError(f"size {size}: a slot is twice on the free stack")
            if len(live) and (table.state[live] != State.FREE).any():
                raise ValueError(f"size {size}: a slot on the free stack is not FREE")
            if len(live) and (table.slot_bytes_of(live) != size).any():
                raise ValueError(f"size {size}: a free slot is in another size's slab")
        free_total = sum(found.count for found in self._classes.values())
        used_total = 0
        for slab in range(self.first_slab, self.end_slab):
            used = int((table.state[self.slots_in(slab)] != State.FREE).sum())
            if used != self.slab_used[slab - self.first_slab]:
                booked = self.slab_used[slab - self.first_slab]
                raise ValueError(f"slab {slab}: {used} slots in use, booked {booked}")
            used_total += used
        sizes = table.slab_slot_bytes[self.first_slab : self.end_slab]
        slots = int((self._slab_bytes // sizes[sizes > 0]).sum())
        if slots != free_total + used_total:
            raise ValueError(f"{slots} slots, but {free_total} free + {used_total} used")
        if int((sizes == 0).sum()) != len(self._unassigned):
            raise ValueError("unassigned slabs and their list disagree")

"""A memfd mapping that looks like the daemon's arena; tests bump generations and end its life."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvhearth.model import EXTENT_DTYPE, FLAG_SUMMED, Records
from kvhearth.prefault import Unpopulated

MAP_HUGETLB = 0x40000
GUARD_BYTE = 0xA5
"""Initial value of every byte of the arena."""


class _Watched(np.ndarray):
    """Bytes that report each access to a part of them."""

    looked: Callable[[], None] | None = None

    def __getitem__(self, key: Any) -> Any:
        if self.looked is not None:
            self.looked()
        return np.asarray(self)[key]


class FakeArena:
    """Segments of ``slot_count`` slots of ``slot_bytes`` each; slots are numbered across the
    segments.

    ``switch_alive(False)`` simulates the daemon's death. ``on_alive`` is called at each check of
    whether the daemon lives: a copier checks before it starts and after its last copy, so a test
    can change the world in between. ``on_look`` is called when numpy takes a part of a segment, as
    the CUDA copier does for a checksum.
    """

    def __init__(
        self, slot_bytes: int, slot_count: int = 16, segments: int = 1, hugepages: bool = False
    ) -> None:
        self.boot_id = "boot-1"
        self.slot_bytes = slot_bytes
        self.slot_count = slot_count
        self.on_alive: Callable[[int], None] = lambda question: None
        self.on_look: Callable[[], None] = lambda: None
        self.questions = 0
        self._alive = True
        self.unpopulated = Unpopulated()
        segment_bytes = slot_bytes * slot_count
        if hugepages:
            segment_bytes = -(-segment_bytes // (2 << 20)) * (2 << 20)
        self.segments = dict.fromkeys(range(segments), segment_bytes)
        self._maps = [_map(segment_bytes, hugepages) for _ in range(segments)]
        self._views = [np.frombuffer(mapped, np.uint8) for mapped in self._maps]
        for view in self._views:
            view[:] = GUARD_BYTE
        self._generations = np.ones(slot_count * segments, np.uint32)
        self.generations = self._generations.view()
        self.generations.flags.writeable = False

    def view(self, segment: int) -> np.ndarray:
        watched = self._views[segment].view(_Watched)
        watched.looked = self._look
        return watched

    def _look(self) -> None:
        self.on_look()

    def address(self, segment: int) -> int:
        return int(self._views[segment].ctypes.data)

    def alive(self) -> bool:
        self.questions += 1
        self.on_alive(self.questions)
        return self._alive

    def switch_alive(self, alive: bool) -> None:
        self._alive = alive

    def bump(self, slot: int) -> None:
        """Bump the generation of a slot, as when it is freed."""
        self._generations[slot] += 1

    def extents(self, slots: Sequence[int], length: int | None = None) -> Records:
        """Return extents of ``slots`` as the daemon would grant them now."""
        records = np.zeros(len(slots), EXTENT_DTYPE)
        records["slot"] = slots
        records["segment"] = np.asarray(slots) // self.slot_count
        records["offset"] = (np.asarray(slots) % self.slot_count) * self.slot_bytes
        records["length"] = self.slot_bytes if length is None else length
        records["generation"] = self._generations[np.asarray(slots, np.int64)]
        return records

    def slot(self, slot: int) -> np.ndarray:
        """Return the bytes of one slot."""
        start = (slot % self.slot_count) * self.slot_bytes
        return self._views[slot // self.slot_count][start : start + self.slot_bytes]

    def untouched(self) -> bool:
        """Whether no byte was ever written."""
        return all(bool((view == GUARD_BYTE).all()) for view in self._views)


def summed(extents: Records, checksums: np.ndarray, flags: int = FLAG_SUMMED) -> Records:
    """Return the extents as a lookup returns them: with the checksums of a store."""
    records = extents.copy()
    records["flags"] = flags
    records["checksum"] = np.ascontiguousarray(checksums).view("V16").reshape(-1)
    return records


def _map(size: int, hugepages: bool) -> mmap.mmap:
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | (MAP_HUGETLB if hugepages else 0)
    return mmap.mmap(-1, size, flags)

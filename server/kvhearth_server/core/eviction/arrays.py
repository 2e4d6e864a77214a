"""The memory that all eviction policies share: per-slot arrays and the chunks of their rings.

One slot is in at most one ring, so one set of arrays serves every namespace and size class. All
arrays begin as zeros that were never written: pages of slots that nobody tracks are not resident.
That is why "none" is 0 everywhere and real values are stored plus one.

Bytes per tracked slot: 4 (position) + 1 (freq) + 4 (ring entry, times the tombstones' share) + 1/8
(ticks) + about 1/5 (chunk objects).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from kvhearth_server.core.eviction.ring import FifoRing

I64: TypeAlias = npt.NDArray[np.int64]
U32: TypeAlias = npt.NDArray[np.uint32]

CHUNK_SHIFT = 10
CHUNK_ENTRIES = 1 << CHUNK_SHIFT
TICK_SHIFT = 6
"""One tick is kept for each group of 64 entries: a tick per entry would cost as much as the entry.
"""
FREQ_MAX = 3
SLOTS_MAX = 1 << 30
"""Twice as many ring entries must have positions in 32 bits."""
_SPARE_CHUNKS = 64
_ONE_USE_MORE = bytes(min(uses + 1, FREQ_MAX) for uses in range(256))
"""By the uses so far."""


@dataclass(slots=True, eq=False)
class Chunk:
    """``CHUNK_ENTRIES`` consecutive ring entries; those in use are ``[start, filled)``, in order of
    age.
    """

    base: int
    """Index of its first entry in ``PolicyArrays.entries``."""
    ring: FifoRing | None
    """Its owner; None once it was given back."""
    before: Chunk | None = None
    after: Chunk | None = None
    start: int = 0
    """All entries before this offset are tombstones."""
    filled: int = 0
    live: int = 0
    """Entries that are not tombstones."""


class PolicyArrays:
    """Shared by all policies of one arena; the only way to mark a slot as used."""

    def __init__(self, slot_count: int) -> None:
        """Arrays for slots ``0 .. slot_count - 1``.

        Raises:
            ValueError: if there are no slots or more than ``SLOTS_MAX``.
        """
        if not 0 < slot_count <= SLOTS_MAX:
            raise ValueError(f"slot_count is {slot_count}, it must be 1 to {SLOTS_MAX}")
        self.slot_count = slot_count
        self.freq = np.zeros(slot_count, np.uint8)
        """Uses since admission, capped at ``FREQ_MAX``."""
        self._uses = self.freq.data
        self.position = np.zeros(slot_count, np.uint32)
        """Index of the slot's entry in ``entries``, plus one; 0 is in no ring."""
        self.places = self.position.data
        """The same memory, for one slot at a time: numpy's calls cost several times as much."""
        # Rings hold at most twice their live entries and a little for each ring, so this suffices
        # until there are many rings; reserving it costs address space only.
        chunk_count = 2 * -(-slot_count // CHUNK_ENTRIES) + _SPARE_CHUNKS
        self.entries = np.zeros(chunk_count << CHUNK_SHIFT, np.uint32)
        """Slot number plus one; 0 is a tombstone. Replaced when it grows: never keep a reference.
        """
        self.ticks = np.zeros(chunk_count << CHUNK_SHIFT >> TICK_SHIFT, np.int64)
        """The tick of the newest entry of each group. Replaced like ``entries``."""
        self._see()
        self.tick = 0
        """Entries pushed so far, in all rings."""
        self.chunks: list[Chunk | None] = []
        self._free: list[int] = []

    def touch(self, slots: I64 | slice) -> None:
        """Count a use of each slot, whichever policies they are in; moves nothing.

        ``slots`` has shape (n,), or is a slice; one that occurs twice counts once, one in no policy
        has no effect.
        """
        if isinstance(slots, slice):
            # Bytes looked up in a table: five times as fast as numpy's calls on a slice.
            self._uses[slots] = bytes(self._uses[slots]).translate(_ONE_USE_MORE)
            return
        if len(slots) == 1:
            self.touch_one(int(slots[0]))
            return
        freq = self.freq[slots]
        self.freq[slots] = freq + (freq < FREQ_MAX)

    def touch_one(self, slot: int) -> None:
        """As ``touch``, of one slot."""
        self._uses[slot] = _ONE_USE_MORE[self._uses[slot]]

    def claim(self, slots: I64) -> None:
        """Make sure that slots may be pushed, and forget the uses that their former blocks had.

        Raises:
            ValueError: if one does not exist, is in a ring already or occurs twice; nothing has
                changed.
        """
        if not len(slots):
            return
        self.require_range(slots)
        if self.position[slots].any():
            taken = slots[self.position[slots] > 0]
            raise ValueError(f"{len(taken)} slots are in a policy already, the first is {taken[0]}")
        # A slot that occurs twice is found by what its later place overwrites; sorting is slower.
        order = np.arange(1, len(slots) + 1, dtype=np.uint32)
        self.position[slots] = order
        repeated = int(np.count_nonzero(self.position[slots] != order))
        if repeated:
            self.position[slots] = 0
            raise ValueError(f"{repeated} of {len(slots)} slots occur more than once")
        self.freq[slots] = 0

    def claim_one(self, slot: int) -> None:
        """As ``claim``, of one slot.

        Raises:
            ValueError: if it does not exist or is in a ring already; nothing has changed.
        """
        if not 0 <= slot < self.slot_count:
            raise ValueError(f"slots {slot}..{slot} are not within 0..{self.slot_count - 1}")
        if self.places[slot]:
            raise ValueError(f"1 slots are in a policy already, the first is {slot}")
        self._uses[slot] = 0

    def require_range(self, slots: I64) -> None:
        """Raise ValueError if a slot, of at least one, does not exist; negative ones would wrap."""
        low, high = int(slots.min()), int(slots.max())
        if low < 0 or high >= self.slot_count:
            raise ValueError(f"slots {low}..{high} are not within 0..{self.slot_count - 1}")

    def tick_of(self, slot: int) -> int:
        """When a tracked slot was pushed; late by the rest of its group, more after merges."""
        return int(self.ticks.item((int(self.position.item(slot)) - 1) >> TICK_SHIFT))

    def live_entries(self, chunk: Chunk) -> I64:
        """Indices in ``entries`` of a chunk's live entries, oldest first; shape (chunk.live,)."""
        low = chunk.base + chunk.start
        return np.flatnonzero(self.entries[low : chunk.base + chunk.filled]) + low

    def seek(self, chunk: Chunk | None, offset: int) -> tuple[Chunk, int] | None:
        """The first live entry at or after an offset, in this chunk or one after it."""
        while chunk is not None:
            for index in range(chunk.base + max(offset, chunk.start), chunk.base + chunk.filled):
                if self.entries.item(index):
                    return chunk, index - chunk.base
            chunk, offset = chunk.after, 0
        return None

    def take_chunk(self, ring: FifoRing) -> Chunk:
        """An empty chunk for a ring, one that was used before if there is one."""
        if self._free:
            number = self._free.pop()
        else:
            number = len(self.chunks)
            self.chunks.append(None)
            if number << CHUNK_SHIFT == len(self.entries):
                self._grow()
        chunk = self.chunks[number] = Chunk(number << CHUNK_SHIFT, ring)
        return chunk

    def give_chunk(self, chunk: Chunk) -> None:
        """Take a chunk back from its ring."""
        number = chunk.base >> CHUNK_SHIFT
        chunk.ring = chunk.before = chunk.after = None
        self.chunks[number] = None
        self._free.append(number)

    def _grow(self) -> None:
        # Only reached with far more rings than `_SPARE_CHUNKS`, all of them nearly empty.
        self.entries = np.concatenate([self.entries, np.zeros_like(self.entries)])
        self.ticks = np.concatenate([self.ticks, np.zeros_like(self.ticks)])
        self._see()

    def _see(self) -> None:
        """``entries`` and ``ticks`` are others now: see their memory, as ``places`` is."""
        self.entry_places, self.tick_places = self.entries.data, self.ticks.data

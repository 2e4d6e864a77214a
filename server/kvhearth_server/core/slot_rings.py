"""Rings of slots, of which eviction queues are made, and the arrays that they share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvhearth.model import I64

CHUNK_SHIFT = 10
CHUNK_ENTRIES = 1 << CHUNK_SHIFT
TICK_SHIFT = 6
"""log2 of the entries that share a tick: a tick per entry would cost as much as the entry."""
FREQ_MAX = 3
SLOTS_MAX = 1 << 30
"""Upper bound on slots: positions of twice as many ring entries must fit in 32 bits."""
_ONE_USE_MORE = bytes(min(uses + 1, FREQ_MAX) for uses in range(256))
"""Number of uses after one more, by the uses so far."""


@dataclass(slots=True, eq=False)
class Chunk:
    """``CHUNK_ENTRIES`` consecutive ring entries; ``[start, filled)`` are in use, by age."""

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
    """Arrays shared by all policies of one arena; the only way to mark a slot as used."""

    def __init__(self, slot_count: int, ring_count: int = 64) -> None:
        """Make arrays for slots ``0 .. slot_count - 1``, and for rings that are nearly empty.

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
        """The same memory for access to single slots: numpy's calls cost several times as much."""
        # Rings hold at most twice their live entries and a little for each ring, so this suffices
        # for ``ring_count`` rings; reserving it costs address space only.
        chunk_count = 2 * -(-slot_count // CHUNK_ENTRIES) + ring_count
        self.entries = np.zeros(chunk_count << CHUNK_SHIFT, np.uint32)
        """Slot number plus one; 0 is a tombstone. Replaced when it grows: keep no reference."""
        self.ticks = np.zeros(chunk_count << CHUNK_SHIFT >> TICK_SHIFT, np.int64)
        """The tick of the newest entry of each group. Replaced like ``entries``."""
        self._see()
        self.tick = 0
        """Entries pushed so far, in all rings."""
        self.chunks: list[Chunk | None] = []
        self._free: list[int] = []

    def touch(self, slots: I64 | slice) -> None:
        """Count a use of each slot, whichever policies they are in; moves nothing.

        ``slots`` has shape (n,), or is a slice. A slot that occurs twice counts once; a slot in no
        policy has no effect.
        """
        if isinstance(slots, slice):
            # A table look-up on bytes is five times as fast as numpy's calls on a slice.
            self._uses[slots] = bytes(self._uses[slots]).translate(_ONE_USE_MORE)
            return
        if len(slots) == 1:
            slot = int(slots[0])
            self._uses[slot] = _ONE_USE_MORE[self._uses[slot]]
            return
        freq = self.freq[slots]
        self.freq[slots] = freq + (freq < FREQ_MAX)

    def claim(self, slots: I64) -> None:
        """Ensure that slots may be pushed, and reset the use counts of their former blocks.

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
        # A slot that occurs twice is found because its later place overwrites the earlier one;
        # sorting is slower.
        order = np.arange(1, len(slots) + 1, dtype=np.uint32)
        self.position[slots] = order
        repeated = int(np.count_nonzero(self.position[slots] != order))
        if repeated:
            self.position[slots] = 0
            raise ValueError(f"{repeated} of {len(slots)} slots occur more than once")
        self.freq[slots] = 0

    def claim_one(self, slot: int) -> None:
        """Ensure that one slot may be pushed; see ``claim``.

        Raises:
            ValueError: if it does not exist or is in a ring already; nothing has changed.
        """
        if not 0 <= slot < self.slot_count:
            raise ValueError(f"slots {slot}..{slot} are not within 0..{self.slot_count - 1}")
        if self.places[slot]:
            raise ValueError(f"1 slots are in a policy already, the first is {slot}")
        self._uses[slot] = 0

    def require_range(self, slots: I64) -> None:
        """Raise ValueError if one of at least one slot does not exist; negative ones would wrap."""
        low, high = int(slots.min()), int(slots.max())
        if low < 0 or high >= self.slot_count:
            raise ValueError(f"slots {low}..{high} are not within 0..{self.slot_count - 1}")

    def tick_of(self, slot: int) -> int:
        """Push time of a tracked slot; late by the rest of its group, more after merges."""
        return int(self.ticks.item((int(self.position.item(slot)) - 1) >> TICK_SHIFT))

    def live_entries(self, chunk: Chunk) -> I64:
        """Indices in ``entries`` of a chunk's live entries, oldest first; shape (chunk.live,)."""
        low = chunk.base + chunk.start
        return np.flatnonzero(self.entries[low : chunk.base + chunk.filled]) + low

    def take_chunk(self, ring: FifoRing) -> Chunk:
        """Take an empty chunk for a ring, reusing a returned one if possible."""
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
        # Only reached with far more rings than were foreseen, all of them nearly empty.
        self.entries = np.concatenate([self.entries, np.zeros_like(self.entries)])
        self.ticks = np.concatenate([self.ticks, np.zeros_like(self.ticks)])
        self._see()

    def _see(self) -> None:
        """Renew the views on the memory of replaced ``entries`` and ``ticks``; see ``places``."""
        self.entry_places, self.tick_places = self.entries.data, self.ticks.data


_GROUP = 1 << TICK_SHIFT


class FifoRing:
    """Slots in order of pushing. The caller guarantees that a pushed slot is in no ring."""

    def __init__(self, arrays: PolicyArrays) -> None:
        self._arrays = arrays
        self._first: Chunk | None = None
        self._last: Chunk | None = None
        self.live = 0
        """Slots in the ring; read only."""

    def push(self, slots: I64) -> None:
        """Append slots of shape (n,), the oldest first."""
        done = 0
        while done < len(slots):
            tail = self._tail_with_room()
            part = slots[done : done + CHUNK_ENTRIES - tail.filled]
            count = len(part)
            low = tail.base + tail.filled
            arrays = self._arrays
            arrays.entries[low : low + count] = part + 1
            arrays.position[part] = np.arange(low + 1, low + count + 1, dtype=np.uint32)
            arrays.tick += count
            arrays.ticks[low >> TICK_SHIFT : ((low + count - 1) >> TICK_SHIFT) + 1] = arrays.tick
            tail.filled += count
            self.count(tail, count)
            done += count

    def push_one(self, slot: int) -> None:
        """Append one slot; several times as fast as ``push`` of one."""
        tail = self._tail_with_room()
        index = tail.base + tail.filled
        arrays = self._arrays
        arrays.entry_places[index] = slot + 1
        arrays.places[slot] = index + 1
        arrays.tick += 1
        arrays.tick_places[index >> TICK_SHIFT] = arrays.tick
        tail.filled += 1
        tail.live += 1
        self.live += 1

    def peek(self) -> int | None:
        """The oldest slot."""
        chunk = self._first
        if chunk is None:
            return None
        # The first chunk has a live entry, or it would have been merged or given back. The offset
        # is kept, so each tombstone at the cold end is passed once.
        while not (entry := self._arrays.entries.item(chunk.base + chunk.start)):
            chunk.start += 1
        return int(entry) - 1

    def move_oldest(self, target: FifoRing) -> None:
        """Move the slot that ``peek`` just returned to the new end of a ring, possibly this one."""
        chunk = self._first
        assert chunk is not None
        index = chunk.base + chunk.start
        slot = int(self._arrays.entries.item(index)) - 1
        self._arrays.entries[index] = 0
        self.count(chunk, -1)
        self.settle(chunk)
        target.push_one(slot)

    def remove_one(self, slot: int) -> bool:
        """Leave a tombstone for a slot; False (no change) if it is not in this ring."""
        arrays = self._arrays
        index = int(arrays.position.item(slot)) - 1
        chunk = arrays.chunks[index >> CHUNK_SHIFT] if index >= 0 else None
        if chunk is None or chunk.ring is not self:
            return False
        arrays.entries[index] = 0
        arrays.position[slot] = 0
        self.count(chunk, -1)
        self.settle(chunk)
        return True

    def slots(self) -> I64:
        """All slots, the oldest first; shape (len,)."""
        parts = [self._arrays.live_entries(chunk) for chunk in self._walk()]
        if not parts:
            return np.zeros(0, np.int64)
        return self._arrays.entries[np.concatenate(parts)].astype(np.int64) - 1

    def check(self) -> None:
        """Raise ValueError if entries, positions, links and counts disagree."""
        arrays, total, held, before = self._arrays, 0, 0, None
        for chunk in self._walk():
            if chunk.ring is not self or chunk.before is not before:
                raise ValueError(f"chunk at {chunk.base} is linked wrongly or is not this ring's")
            indices = arrays.live_entries(chunk)
            if len(indices) != chunk.live or not chunk.start <= chunk.filled <= CHUNK_ENTRIES:
                raise ValueError(
                    f"chunk at {chunk.base} has {len(indices)} live entries in "
                    f"[{chunk.start}, {chunk.filled}), its count says {chunk.live}"
                )
            positions = arrays.position[arrays.entries[indices].astype(np.int64) - 1]
            if (wrong := int(np.count_nonzero(positions != indices + 1))) > 0:
                raise ValueError(
                    f"{wrong} slots of the chunk at {chunk.base} have another position"
                )
            if before is not None and _fits(before, chunk):
                raise ValueError(f"chunks of {before.live} and {chunk.live} entries are not merged")
            total += chunk.live
            held += CHUNK_ENTRIES
            before = chunk
        if before is not self._last or total != self.live:
            raise ValueError(f"{total} live entries in the chunks, the ring counts {self.live}")
        if held > 2 * self.live + 2 * CHUNK_ENTRIES:
            raise ValueError(f"{held} entries are held for {self.live} live ones")

    def _walk(self) -> Iterator[Chunk]:
        chunk = self._first
        while chunk is not None:
            yield chunk
            chunk = chunk.after

    def _tail_with_room(self) -> Chunk:
        tail = self._last
        if tail is not None and tail.filled < CHUNK_ENTRIES:
            return tail
        if tail is not None and tail.live <= CHUNK_ENTRIES // 2:
            self._rewrite(tail, [tail])
            return tail
        chunk = self._arrays.take_chunk(self)
        chunk.before, self._last = tail, chunk
        if tail is None:
            self._first = chunk
            return chunk
        tail.after = chunk
        if tail.before is not None and _fits(tail.before, tail):
            self._absorb(tail.before, tail)  # the newest chunk's limit no longer applies
        return chunk

    def count(self, chunk: Chunk, change: int) -> None:
        """Count entries of a chunk that were added or became tombstones; ``settle`` follows."""
        chunk.live += change
        self.live += change

    def settle(self, chunk: Chunk) -> None:
        """Merge a chunk with its neighbours where they fit, after removals from it."""
        if chunk.ring is not self:
            return  # merged already, as one of several
        if chunk.before is not None and _fits(chunk.before, chunk):
            chunk = self._absorb(chunk.before, chunk)
        while chunk.after is not None and _fits(chunk, chunk.after):
            chunk = self._absorb(chunk, chunk.after)
        if not chunk.live and chunk is self._first and chunk is self._last:
            self._unlink(chunk)

    def _absorb(self, older: Chunk, newer: Chunk) -> Chunk:
        """Merge two neighbours; returns the chunk that stays."""
        if not older.live:
            self._unlink(older)
            return newer
        if newer.live:
            self._rewrite(older, [older, newer])
        self._unlink(newer)
        return older

    def _rewrite(self, target: Chunk, sources: list[Chunk]) -> None:
        """Write the live entries of chunks, the target first, to the target's beginning."""
        arrays = self._arrays
        indices = np.concatenate([arrays.live_entries(chunk) for chunk in sources])
        count = len(indices)
        values = arrays.entries[indices]
        ticks = arrays.ticks[indices >> TICK_SHIFT]
        low = target.base
        arrays.entries[low : low + count] = values
        arrays.position[values.astype(np.int64) - 1] = np.arange(
            low + 1, low + count + 1, dtype=np.uint32
        )
        newest = np.minimum(np.arange(0, count, _GROUP) + _GROUP - 1, count - 1)
        group = low >> TICK_SHIFT
        arrays.ticks[group : group + len(newest)] = ticks[newest]
        target.start, target.filled, target.live = 0, count, count

    def _unlink(self, chunk: Chunk) -> None:
        if chunk.before is not None:
            chunk.before.after = chunk.after
        else:
            self._first = chunk.after
        if chunk.after is not None:
            chunk.after.before = chunk.before
        else:
            self._last = chunk.before
        self._arrays.give_chunk(chunk)


def _fits(older: Chunk, newer: Chunk) -> bool:
    """Whether two neighbours are to be merged."""
    limit = CHUNK_ENTRIES if newer.after is not None else CHUNK_ENTRIES // 2
    return not older.live or not newer.live or older.live + newer.live <= limit


def remove_slots(arrays: PolicyArrays, slots: I64, rings: tuple[FifoRing, ...]) -> None:
    """Leave tombstones for slots of shape (n,), each in one of the given rings.

    Raises:
        ValueError: if one is in none of them or occurs twice; nothing has changed.
    """
    if not len(slots):
        return
    arrays.require_range(slots)
    # Explicit sort: np.unique hashes, which takes four times as long.
    indices = np.sort(arrays.position[slots].astype(np.int64)) - 1
    numbers = indices >> CHUNK_SHIFT
    if indices[0] < 0 or not np.diff(indices).all():
        raise ValueError(f"of {len(slots)} slots to be removed some are no members or repeated")
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    counts = np.diff(starts, append=len(numbers))
    chunks: list[tuple[FifoRing, Chunk, int]] = []
    for number, count in zip(numbers[starts].tolist(), counts.tolist(), strict=True):
        chunk = arrays.chunks[number]
        if chunk is None or chunk.ring is None or chunk.ring not in rings:
            raise ValueError(f"{count} slots to be removed are members of another policy")
        chunks.append((chunk.ring, chunk, count))
    arrays.entries[indices] = 0
    arrays.position[slots] = 0
    for ring, chunk, count in chunks:
        ring.count(chunk, -count)
    for ring, chunk, _ in chunks:
        ring.settle(chunk)

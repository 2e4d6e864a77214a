"""A FIFO of slots with O(1) removal from the middle, in chunks of the shared arrays.

    oldest                                                            newest
    [ . . 7 3 . 9 ] -> [ 4 . . . 8 . ] -> [ 1 6 2 5 _ _ ]      . tombstone   _ free

A removed slot leaves a tombstone. Two neighbouring chunks are merged as soon as their live entries
fit into one (with the newest chunk: into half of one, so that it takes half a chunk of pushes to
need another). Hence:

- a ring holds at most ``2 * live + 2 * CHUNK_ENTRIES`` entries;
- a merge, O(CHUNK_ENTRIES), gives back a chunk that at least half as many pushes were needed to
  fill: O(1) amortised;
- no removal ever moves the whole ring. One array that is compacted and doubled was rejected: it
  stalls the event loop for as long as all its slots take, and its spare room costs up to 4 bytes a
  slot.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvhearth_server.core.eviction.arrays import (
    CHUNK_ENTRIES,
    CHUNK_SHIFT,
    I64,
    TICK_SHIFT,
    Chunk,
    PolicyArrays,
)

_GROUP = 1 << TICK_SHIFT


class FifoRing:
    """Slots in order of pushing, and a hand that may stand anywhere among them.

    The caller guarantees that a pushed slot is in no ring. The hand keeps its place while entries
    come and go.
    """

    def __init__(self, arrays: PolicyArrays) -> None:
        self._arrays = arrays
        self._first: Chunk | None = None
        self._last: Chunk | None = None
        self.live = 0
        """Slots in the ring; read only."""
        self._hand: Chunk | None = None
        self._hand_offset = 0

    def push(self, slots: I64) -> None:
        """Append slots of shape (n,), the oldest first."""
        self._wrap_hand()
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
        if self._hand is not None:
            self._wrap_hand()
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
        """Move the slot that ``peek`` returned just now to the new end of a ring, this one too."""
        chunk = self._first
        assert chunk is not None
        index = chunk.base + chunk.start
        slot = int(self._arrays.entries.item(index)) - 1
        self._arrays.entries[index] = 0
        self.count(chunk, -1)
        self.settle(chunk)
        target.push_one(slot)

    def peek_hand(self) -> int | None:
        """The slot at the hand, which goes on to the oldest when it has passed the newest."""
        arrays = self._arrays
        found = arrays.seek(self._hand, self._hand_offset) or arrays.seek(self._first, 0)
        if found is None:
            return None
        self._hand, self._hand_offset = found
        return int(arrays.entries.item(found[0].base + found[1])) - 1

    def step_hand(self) -> None:
        """Move the hand past the slot that ``peek_hand`` returned just now."""
        self._hand_offset += 1

    def remove_one(self, slot: int) -> bool:
        """Leave a tombstone for a slot; False, with nothing changed, if it is not in this ring."""
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

    def _wrap_hand(self) -> None:
        """Before a push: a hand that has passed the newest entry stands before the oldest.

        Otherwise it would go on into what is pushed now, and with one push for each eviction never
        turn back.
        """
        if self._hand is not None and self._arrays.seek(self._hand, self._hand_offset) is None:
            self._hand = None

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
            self._absorb(tail.before, tail)  # the limit for the newest chunk is no longer theirs
        return chunk

    def count(self, chunk: Chunk, change: int) -> None:
        """Entries of a chunk came or became tombstones; ``settle`` comes after."""
        chunk.live += change
        self.live += change

    def settle(self, chunk: Chunk) -> None:
        """After removals from a chunk: merge it with its neighbours where they fit."""
        if chunk.ring is not self:
            return  # one of several, merged since
        if chunk.before is not None and _fits(chunk.before, chunk):
            chunk = self._absorb(chunk.before, chunk)
        while chunk.after is not None and _fits(chunk, chunk.after):
            chunk = self._absorb(chunk, chunk.after)
        if not chunk.live and chunk is self._first and chunk is self._last:
            self._unlink(chunk)

    def _absorb(self, older: Chunk, newer: Chunk) -> Chunk:
        """Make one chunk of two neighbours; returns the one that stays."""
        if not older.live:
            self._unlink(older)  # the first chunk, so a hand in it stands before the oldest again
            return newer
        if newer.live:
            self._rewrite(older, [older, newer])
        if self._hand is newer:
            self._hand, self._hand_offset = older, older.filled
        self._unlink(newer)
        return older

    def _rewrite(self, target: Chunk, sources: list[Chunk]) -> None:
        """Write the live entries of chunks, the target first, to the target's beginning."""
        arrays = self._arrays
        indices = np.concatenate([arrays.live_entries(chunk) for chunk in sources])
        if self._hand in sources:
            assert self._hand is not None
            older = sources[0].live if self._hand is not sources[0] else 0
            own = arrays.live_entries(self._hand)
            passed = int(np.searchsorted(own, self._hand.base + self._hand_offset))
            self._hand, self._hand_offset = target, older + passed
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
        if self._hand is chunk:
            self._hand = None
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
    # Sorted by hand: np.unique hashes, which takes four times as long.
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

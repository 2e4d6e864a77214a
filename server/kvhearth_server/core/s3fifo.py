"""S3-FIFO eviction policy and its ghost, a small memory of recent keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from kvhearth.model import I64, U32
from kvhearth_server.core.slot_rings import FREQ_MAX, FifoRing, PolicyArrays, remove_slots

_ENTRIES_MIN = 64
_GROWN_MIN = 64
"""Places that are split at once: as many cost hardly more than one."""
_PART = 1 << 16
"""Places of the first part of a large table."""
_TAG_BITS = 24
_TAG_SHIFT = np.uint32(_TAG_BITS)


class Ghost:
    """Direct-mapped table of fingerprints: the low bits select the place, the top eight are kept.

    An exact queue needs a dict of keys; this costs one byte per key. In exchange, about one unknown
    key in 256 seems known, and a key is forgotten after as many others as there are places only on
    average.

    The table grows in portions: with ``_size`` a power of two, a fingerprint whose low bits are
    below ``_split`` has one more bit of its place. Memory for twice the size is reserved, in parts
    that double, so that growth neither copies a large table nor makes one resident at once.
    """

    def __init__(self) -> None:
        self._size, self._split = _ENTRIES_MIN, 0
        self._parts: list[npt.NDArray[np.uint8]] = []
        self._reserve()

    def __len__(self) -> int:
        """Number of places."""
        return self._size + self._split

    def _reserve(self) -> None:
        wanted = 2 * self._size
        while self._parts and self._start(len(self._parts)) > max(wanted, _PART):
            self._parts.pop()
        first = np.zeros(min(wanted, _PART), np.uint8)
        if self._parts:
            kept = self._parts[0][: len(first)]
            first[: len(kept)] = kept
        if not self._parts or len(first) != len(self._parts[0]):
            self._parts[:1] = [first]
        while (start := self._start(len(self._parts))) < wanted:
            self._parts.append(np.zeros(start, np.uint8))
        self._views = [part.data for part in self._parts]

    def _start(self, part: int) -> int:
        """Number of the first place of a part; the first part has at most ``_PART`` places."""
        return _PART << part - 1 if part else 0

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """Yield (number of the first place, places) of a range, by part."""
        for number, part in enumerate(self._parts):
            start = self._start(number)
            low, high = max(begin, start), min(end, start + len(part))
            if low < high:
                yield low, part[low - start : high - start]

    def fit(self, member_count: int) -> None:
        """Keep the number of places between once and four times the members.

        Members that come a few at a time cost a few places at a time.
        """
        while len(self) < member_count:
            self._grow(member_count - self._size)
        while len(self) > _ENTRIES_MIN and member_count * 4 < len(self):
            self._halve()

    def _grow(self, split: int) -> None:
        """Give the fingerprints of the places before ``split`` two places each, at most all."""
        split = min(max(split, self._split + _GROWN_MIN), self._size)
        # A key's place is one of the two. The copy in the other one is noise that the tag filters
        # out and later keys overwrite.
        for low, tags in list(self._pieces(self._split, split)):
            ((_, above),) = self._pieces(self._size + low, self._size + low + len(tags))
            above[:] = tags
        self._split = split
        if split == self._size:
            self._size, self._split = 2 * self._size, 0
            self._reserve()

    def _halve(self) -> None:
        """Let pairs of places share one again."""
        end = len(self)
        if not self._split:
            self._size //= 2
        for low, tags in list(self._pieces(0, end - self._size)):
            ((_, above),) = self._pieces(self._size + low, self._size + low + len(tags))
            np.maximum(tags, above, out=tags)
        self._split = 0
        self._reserve()

    def take_known(self, fingerprints: U32) -> npt.NDArray[np.bool_]:
        """Tell which fingerprints of shape (n,) are known; forget those and remember the others."""
        places = (fingerprints & np.uint32(self._size - 1)).astype(np.int64)
        if self._split:
            wide = fingerprints & np.uint32(2 * self._size - 1)
            places = np.where(places < self._split, wide, places)
        tags = np.maximum(fingerprints >> _TAG_SHIFT, 1).astype(np.uint8)
        if len(self._parts) == 1:
            return _take(self._parts[0], places, tags)
        known = np.zeros(len(places), np.bool_)
        starts = [self._start(part) for part in range(len(self._parts))]
        numbers = np.searchsorted(starts, places, side="right") - 1
        for number in np.unique(numbers).tolist():
            here = numbers == number
            part = self._parts[number]
            known[here] = _take(part, places[here] - starts[number], tags[here])
        return known

    def take_known_one(self, fingerprint: int) -> bool:
        """Do ``take_known`` for one fingerprint."""
        place = fingerprint & (self._size - 1)
        if place < self._split:
            place = fingerprint & (2 * self._size - 1)
        tag = fingerprint >> _TAG_BITS or 1
        number = (place // _PART).bit_length()
        view, place = self._views[number], place - self._start(number)
        known: bool = view[place] == tag
        view[place] = 0 if known else tag
        return known


def _take(
    part: npt.NDArray[np.uint8], places: I64, tags: npt.NDArray[np.uint8]
) -> npt.NDArray[np.bool_]:
    known: npt.NDArray[np.bool_] = part[places] == tags
    part[places] = np.where(known, np.uint8(0), tags)
    return known


SMALL_ONE_IN = 10
"""Inverse share of the small queue: its end is the cold end while it has a tenth of the members."""
PROMOTE_FREQ = 1
"""Uses that move a block from the small queue to the main one. The paper asks for two. One kept
0.2-3 % more hits on mixes of zipf and scans: a prefix is often asked for again only a turn of
the conversation later, when the small queue has passed.
"""


Evictable = Callable[[int], bool]
PassOver = Callable[[int, bool], bool]
"""See ``S3FifoPolicy.victim``."""
_ENOUGH = -1
"""Answer of a scan that was told to stop."""


def never_enough(slot: int, used: bool) -> bool:
    """Lets a policy pass over any number of blocks."""
    return False


class S3FifoPolicy:
    """S3-FIFO over the heads of blocks of one namespace and one size class, by slot number.

    The caller guarantees that all calls come from one thread, that all policies over one
    ``PolicyArrays`` share an arena, and that a chain's blocks are inserted leaf first, so that its
    tail goes before its prefix. The policy frees nothing: it proposes, the caller evicts.

    Slots are I64 arrays of shape (n,); the caller guarantees to ``touch`` and ``evict`` that they
    exist. Methods that raise ValueError have changed nothing.

    Two things differ from the paper. First, the ghost learns a key when the key enters the small
    queue, not when it is evicted from it. Both orders are the same in a FIFO, an inserted key is
    not resident (so known means gone), and no fingerprint has to be kept per slot (4 bytes). A key
    that was *removed* and soon returns is therefore known, too. Second, a block that cannot be
    evicted is rotated to the new end of its queue.
    """

    def __init__(self, arrays: PolicyArrays) -> None:
        self._arrays = arrays
        self._small = FifoRing(arrays)
        self._main = FifoRing(arrays)
        self._ghost = Ghost()

    def __len__(self) -> int:
        return self._small.live + self._main.live

    def insert(self, slots: I64, fingerprints: U32 | None = None) -> None:
        """Admit blocks, the coldest first; O(n), vectorised.

        ``fingerprints``, shape (n,), are hashes of the blocks' keys, uniform over 32 bits. A policy
        may use them to recognise a key that was here before. Without them (adoption) every block
        counts as new.

        Raises:
            ValueError: if a slot is in a policy already, occurs twice or does not exist, or the
                shapes differ.
        """
        if fingerprints is not None and len(fingerprints) != len(slots):
            raise ValueError(f"{len(fingerprints)} fingerprints for {len(slots)} slots")
        if len(slots) == 1 and fingerprints is not None:
            self.insert_one(int(slots[0]), int(fingerprints[0]))
            return
        self._arrays.claim(slots)
        if fingerprints is None:
            self._small.push(slots)
            return
        self._ghost.fit(len(self) + len(slots))
        known = self._ghost.take_known(fingerprints)
        self._small.push(slots[~known])
        self._main.push(slots[known])

    def insert_one(self, slot: int, fingerprint: int) -> None:
        """Admit one block with the hash of its key.

        Raises:
            ValueError: as ``insert``.
        """
        self._arrays.claim_one(slot)
        self._ghost.fit(self._small.live + self._main.live + 1)
        known = self._ghost.take_known_one(fingerprint)
        (self._main if known else self._small).push_one(slot)

    def remove(self, slots: I64) -> None:
        """Remove members whose blocks were deleted, replaced or found invalid; O(n), vectorised.

        Raises:
            ValueError: if a slot is not a member or occurs twice.
        """
        remove_slots(self._arrays, slots, (self._small, self._main))

    def evict(self, slot: int) -> None:
        """Evict one member: the last victim or another block of its chain.

        Raises:
            ValueError: if the slot is not a member.
        """
        if not self._small.remove_one(slot) and not self._main.remove_one(slot):
            raise ValueError(f"slot {slot} is not a member")

    def victim(self, evictable: Evictable, pass_over: PassOver = never_enough) -> int | None:
        """Return the member to evict next, still a member; None if none of them is evictable.

        ``pass_over`` is called for each block that was passed over, with whether that was for its
        use. If it answers true, the search ends with None, and the next call continues from there.

        ``evictable`` must be pure. Without other calls between, and while
        ``evictable`` answers the same, a second call returns the same slot.

        Passing over a used block spends one of its uses, so those steps are paid for by ``touch``.
        Passing over one that is not evictable puts it where the next scan meets it last. Therefore
        only a policy whose members are nearly all leased makes a call O(n). The global cap on held
        bytes rules that out except for small namespaces, and a call never looks at a member more
        than ``FREQ_MAX + 3`` times.
        """
        for scan in (self._scan_small, self._scan_main, self._any_of_small):
            slot = scan(evictable, pass_over)
            if slot is not None:
                return None if slot == _ENOUGH else slot
        return None

    def age_rank(self) -> int | None:
        """Push time of the entry at the cold end; None if there is none.

        The unit is pushes to all policies of these arrays. The caller takes from the policy with
        the smaller rank. Approximate: never early, late by some tens of entries of this policy (one
        tick serves a group), so a tiny active namespace looks younger than it is, not older.
        """
        slot = self._small.peek() if self._small_is_due() else self._main.peek()
        return None if slot is None else self._arrays.tick_of(slot)

    def slots(self) -> I64:
        """All members, in no guaranteed order; shape (len,)."""
        return np.concatenate([self._small.slots(), self._main.slots()])

    def check(self) -> None:
        """Recompute everything from scratch.

        Raises:
            ValueError: with the numbers, if entries, positions and counts disagree.
        """
        self._small.check()
        self._main.check()
        members = self.slots()
        if len(members) != len(self):
            raise ValueError(f"{len(members)} slots are listed, {len(self)} are counted")
        highest = int(self._arrays.freq[members].max(initial=0))
        if highest > FREQ_MAX:
            raise ValueError(f"a slot has {highest} uses, at most {FREQ_MAX} are counted")

    def _small_is_due(self) -> bool:
        small = self._small.live
        return small > 0 and small * SMALL_ONE_IN >= small + self._main.live

    def _scan_small(self, evictable: Evictable, pass_over: PassOver) -> int | None:
        """Promote used blocks and propose the first unused one, while the small queue is due.

        The turn is checked at each step, so that a second call finds the answer that this one left.
        """
        freq, passed = self._arrays.freq, 0
        while self._small_is_due() and passed < self._small.live:
            slot = self._small.peek()
            assert slot is not None
            used = freq.item(slot) >= PROMOTE_FREQ
            if used:
                freq[slot] = 0
                self._small.move_oldest(self._main)
            elif evictable(slot):
                return slot
            else:
                self._small.move_oldest(self._small)
                passed += 1
            if pass_over(slot, used):
                return _ENOUGH
        return None

    def _scan_main(self, evictable: Evictable, pass_over: PassOver) -> int | None:
        """Give used blocks another round for one use each; propose the first without uses."""
        freq, passed = self._arrays.freq, 0
        while passed < self._main.live:
            slot = self._main.peek()
            assert slot is not None
            uses = int(freq.item(slot))
            if uses:
                freq[slot] = uses - 1
                self._main.move_oldest(self._main)
                passed = 0
            elif evictable(slot):
                return slot
            else:
                self._main.move_oldest(self._main)
                passed += 1
            if pass_over(slot, uses > 0):
                return _ENOUGH
        return None

    def _any_of_small(self, evictable: Evictable, pass_over: PassOver) -> int | None:
        """Return the oldest evictable block of the small queue, used or not, if main is all held.

        Promotes nothing: the main queue's scan of a second call would find it first.
        """
        for _ in range(self._small.live):
            slot = self._small.peek()
            assert slot is not None
            if evictable(slot):
                return slot
            self._small.move_oldest(self._small)
            if pass_over(slot, False):
                return _ENOUGH
        return None

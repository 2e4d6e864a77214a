"""S3-FIFO: new blocks prove themselves in a small queue, so a scan leaves the main one alone.

Source: Yang, Zhang, Qiu, Yue, Rashmi: "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvhearth_server.core.eviction.arrays import FREQ_MAX, I64, U32, PolicyArrays
from kvhearth_server.core.eviction.base import nothing_passed
from kvhearth_server.core.eviction.ghost import Ghost
from kvhearth_server.core.eviction.ring import FifoRing, remove_slots

SMALL_ONE_IN = 10
"""The small queue's share: the cold end is its end while it has at least a tenth of the members."""
PROMOTE_FREQ = 1
"""Uses that carry a block from the small queue to the main one. The paper asks for two. One kept
0.2-3 % more hits on mixes of zipf and scans: a prefix is often asked for again only a turn of the
conversation later, when the small queue has passed."""


class S3FifoPolicy:
    """``EvictionPolicy`` by S3-FIFO.

    Two things differ from the paper. The ghost learns a key when it enters the small queue, not
    when it is evicted from it: both orders are the same in a FIFO, a key that is inserted is not
    here, so known means gone, and no fingerprint has to be kept per slot (4 bytes). So a key that
    was *removed* and comes back soon is known, too. And a block that cannot be evicted is rotated
    to the new end of its queue.
    """

    def __init__(self, arrays: PolicyArrays) -> None:
        self._arrays = arrays
        self._small = FifoRing(arrays)
        self._main = FifoRing(arrays)
        self._ghost = Ghost()

    def __len__(self) -> int:
        return self._small.live + self._main.live

    def insert(self, slots: I64, fingerprints: U32 | None = None) -> None:
        """See ``EvictionPolicy.insert``; a key that the ghost knows goes to the main queue."""
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
        """See ``EvictionPolicy.insert_one``."""
        self._arrays.claim_one(slot)
        self._ghost.fit(self._small.live + self._main.live + 1)
        known = self._ghost.take_known_one(fingerprint)
        (self._main if known else self._small).push_one(slot)

    def touch(self, slots: I64) -> None:
        """See ``EvictionPolicy.touch``."""
        self._arrays.touch(slots)

    def remove(self, slots: I64) -> None:
        """See ``EvictionPolicy.remove``."""
        remove_slots(self._arrays, slots, (self._small, self._main))

    def evict(self, slot: int) -> None:
        """See ``EvictionPolicy.evict``."""
        if not self._small.remove_one(slot) and not self._main.remove_one(slot):
            raise ValueError(f"slot {slot} is not a member")

    def victim(
        self, evictable: Callable[[int], bool], passed: Callable[[], None] = nothing_passed
    ) -> int | None:
        """See ``EvictionPolicy.victim``."""
        for scan in (self._scan_small, self._scan_main):
            slot = scan(evictable, passed)
            if slot is not None:
                return slot
        return self._any_of_small(evictable)

    def age_rank(self) -> int | None:
        """See ``EvictionPolicy.age_rank`` of the queue whose turn it is."""
        slot = self._small.peek() if self._small_is_due() else self._main.peek()
        return None if slot is None else self._arrays.tick_of(slot)

    def slots(self) -> I64:
        """See ``EvictionPolicy.slots``: the small queue, then the main one, each oldest first."""
        return np.concatenate([self._small.slots(), self._main.slots()])

    def check(self) -> None:
        """See ``EvictionPolicy.check``."""
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

    def _scan_small(self, evictable: Callable[[int], bool], used: Callable[[], None]) -> int | None:
        """While it is the small queue's turn: promote what was used, propose the first that was
        not.

        Whose turn it is must be asked at each step: then a second call finds the answer that this
            one left.
        """
        freq, passed = self._arrays.freq, 0
        while self._small_is_due() and passed < self._small.live:
            slot = self._small.peek()
            assert slot is not None
            if freq.item(slot) >= PROMOTE_FREQ:
                freq[slot] = 0
                self._small.move_oldest(self._main)
                used()
            elif evictable(slot):
                return slot
            else:
                self._small.move_oldest(self._small)
                passed += 1
        return None

    def _scan_main(self, evictable: Callable[[int], bool], used: Callable[[], None]) -> int | None:
        """Give used blocks another round for one use each, propose the first without uses."""
        freq, passed = self._arrays.freq, 0
        while passed < self._main.live:
            slot = self._main.peek()
            assert slot is not None
            uses = int(freq.item(slot))
            if uses:
                freq[slot] = uses - 1
                self._main.move_oldest(self._main)
                passed = 0
                used()
            elif evictable(slot):
                return slot
            else:
                self._main.move_oldest(self._main)
                passed += 1
        return None

    def _any_of_small(self, evictable: Callable[[int], bool]) -> int | None:
        """All of the main queue is held: the oldest evictable of the small one, used or not.

        Nothing is promoted here: the main queue's scan of a second call would find it first.
        """
        for _ in range(self._small.live):
            slot = self._small.peek()
            assert slot is not None
            if evictable(slot):
                return slot
            self._small.move_oldest(self._small)
        return None

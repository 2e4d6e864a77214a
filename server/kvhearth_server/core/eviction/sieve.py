"""SIEVE eviction policy: one queue, one mark, and a hand that keeps its place between evictions.

Source: Zhang, Yang, Yue, Vigfusson, Rashmi: "SIEVE is simpler than LRU", NSDI 2024.
"""

from __future__ import annotations

from collections.abc import Callable

from kvhearth_server.core.eviction.base import (
    FREQ_MAX,
    I64,
    U32,
    FifoRing,
    PolicyArrays,
    nothing_passed,
    remove_slots,
)


class SievePolicy:
    """``EvictionPolicy`` by SIEVE: a hand moves from old to new and evicts unmarked blocks.

    The hand clears the marks of the blocks that it passes, and these keep their place. A count of
    uses serves as the mark. Keys are not remembered.
    """

    def __init__(self, arrays: PolicyArrays) -> None:
        self._arrays = arrays
        self._ring = FifoRing(arrays)

    def __len__(self) -> int:
        return self._ring.live

    def insert(self, slots: I64, fingerprints: U32 | None = None) -> None:
        """See ``EvictionPolicy.insert``."""
        if fingerprints is not None and len(fingerprints) != len(slots):
            raise ValueError(f"{len(fingerprints)} fingerprints for {len(slots)} slots")
        if len(slots) == 1:
            self.insert_one(int(slots[0]), 0)
            return
        self._arrays.claim(slots)
        self._ring.push(slots)

    def insert_one(self, slot: int, fingerprint: int) -> None:
        """See ``EvictionPolicy.insert_one``."""
        self._arrays.claim_one(slot)
        self._ring.push_one(slot)

    def touch(self, slots: I64) -> None:
        """See ``EvictionPolicy.touch``."""
        self._arrays.touch(slots)

    def remove(self, slots: I64) -> None:
        """See ``EvictionPolicy.remove``."""
        remove_slots(self._arrays, slots, (self._ring,))

    def evict(self, slot: int) -> None:
        """See ``EvictionPolicy.evict``."""
        if not self._ring.remove_one(slot):
            raise ValueError(f"slot {slot} is not a member")

    def victim(
        self, evictable: Callable[[int], bool], passed: Callable[[], None] = nothing_passed
    ) -> int | None:
        """See ``EvictionPolicy.victim``."""
        freq = self._arrays.freq
        # Two rounds suffice: the first clears every mark it meets.
        for _ in range(2 * self._ring.live):
            slot = self._ring.peek_hand()
            assert slot is not None
            if freq.item(slot):
                freq[slot] = 0
                self._ring.step_hand()
                passed()
            elif evictable(slot):
                return slot
            else:
                self._ring.step_hand()
        return None

    def age_rank(self) -> int | None:
        """See ``EvictionPolicy.age_rank``: the cold end is where the hand stands."""
        slot = self._ring.peek_hand()
        return None if slot is None else self._arrays.tick_of(slot)

    def slots(self) -> I64:
        """See ``EvictionPolicy.slots``: the oldest first, wherever the hand stands."""
        return self._ring.slots()

    def check(self) -> None:
        """See ``EvictionPolicy.check``."""
        self._ring.check()
        highest = int(self._arrays.freq[self.slots()].max(initial=0))
        if highest > FREQ_MAX:
            raise ValueError(f"a slot has {highest} uses, at most {FREQ_MAX} are counted")

"""The leases of one group: which slots each of them keeps."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping

import numpy as np

from kvhearth.model import I64, U32


class Leases(MutableMapping[int, I64]):
    """Lease id to slots, in the order in which the leases were granted.

    Slots are given and taken as I64, as all of the core does, but kept in 4 bytes each: a lease
    names every slot that it keeps, and many leases may keep the same ones.
    """

    def __init__(self) -> None:
        self._slots: dict[int, U32 | int] = {}
        """A lease on one slot may stand here as its number: an array costs more to make."""

    def __getitem__(self, lease_id: int) -> I64:
        slots = self._slots[lease_id]
        return np.array([slots], np.int64) if isinstance(slots, int) else slots.astype(np.int64)

    def __setitem__(self, lease_id: int, slots: I64) -> None:
        self._slots[lease_id] = slots.astype(np.uint32)

    def enter_one(self, lease_id: int, slot: int) -> None:
        """As ``self[lease_id] = slots``, of one slot."""
        self._slots[lease_id] = slot

    def __delitem__(self, lease_id: int) -> None:
        del self._slots[lease_id]

    def __contains__(self, lease_id: object) -> bool:
        return lease_id in self._slots

    def __iter__(self) -> Iterator[int]:
        return iter(self._slots)

    def __len__(self) -> int:
        return len(self._slots)

    def all_slots(self) -> U32:
        """The slots of all leases, one after the other; shape (slots held,)."""
        each = self._slots.values()
        ones = np.array([slots for slots in each if isinstance(slots, int)], np.uint32)
        return np.concatenate([ones, *(slots for slots in each if not isinstance(slots, int))])

    @property
    def slot_count(self) -> int:
        """Slots held, each once for every lease on it."""
        return self.nbytes // 4

    @property
    def nbytes(self) -> int:
        """What the lists take."""
        return sum(4 if isinstance(slots, int) else slots.nbytes for slots in self._slots.values())

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
        self._slots: dict[int, U32] = {}

    def __getitem__(self, lease_id: int) -> I64:
        return self._slots[lease_id].astype(np.int64)

    def __setitem__(self, lease_id: int, slots: I64) -> None:
        self._slots[lease_id] = slots.astype(np.uint32)

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
        return np.concatenate([np.zeros(0, np.uint32), *self._slots.values()])

    @property
    def slot_count(self) -> int:
        """Slots held, each once for every lease on it."""
        return sum(map(len, self._slots.values()))

    @property
    def nbytes(self) -> int:
        """What the lists take."""
        return sum(slots.nbytes for slots in self._slots.values())

"""A ghost: a small memory of which keys came lately."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvhearth_server.core.eviction.arrays import U32

_ENTRIES_MIN = 64
_TAG_BITS = 24
_TAG_SHIFT = np.uint32(_TAG_BITS)


class Ghost:
    """Direct-mapped table of fingerprints: their low bits are the place, the top eight are kept.

    An exact queue needs a dict of keys; this costs one byte a key. The price: about one
    unknown key in 256 seems known, and a key is forgotten after as many others as there are places
    on average, not exactly.
    """

    def __init__(self) -> None:
        self._keep(np.zeros(_ENTRIES_MIN, np.uint8))

    def __len__(self) -> int:
        """Places, a power of two."""
        return len(self._tags)

    def _keep(self, tags: npt.NDArray[np.uint8]) -> None:
        self._tags, self._places = tags, tags.data

    def fit(self, member_count: int) -> None:
        """Keep the number of places within 2/3 and 4 times the members, once there are some."""
        while member_count * 2 > len(self._tags) * 3:
            # A key's place in the larger table is one of two; the copy in the other one is noise
            # that the tag keeps out and later keys overwrite.
            self._keep(np.tile(self._tags, 2))
        while len(self._tags) > _ENTRIES_MIN and member_count * 4 < len(self._tags):
            low, high = np.split(self._tags, 2)
            self._keep(np.maximum(low, high))

    def take_known(self, fingerprints: U32) -> npt.NDArray[np.bool_]:
        """Which fingerprints of shape (n,) are known; forgets those and remembers the others."""
        places = fingerprints & np.uint32(len(self._tags) - 1)
        tags = np.maximum(fingerprints >> _TAG_SHIFT, 1).astype(np.uint8)
        known = self._tags[places] == tags
        self._tags[places] = np.where(known, np.uint8(0), tags)
        return np.asarray(known)

    def take_known_one(self, fingerprint: int) -> bool:
        """As ``take_known``, of one."""
        place = fingerprint & (len(self._places) - 1)
        tag = fingerprint >> _TAG_BITS or 1
        known: bool = self._places[place] == tag
        self._places[place] = 0 if known else tag
        return known

"""Existence cache of a remote: which blocks it has, as far as is known, in 16 bytes an entry.

A table in arrays, in which each key has two places. A wrong answer costs a read that misses, or a
block that is computed again, never a wrong byte: every record is verified when it is read.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvhearth.keys import PackedKeys
from kvhearth.model import I64, Bools

ENTRIES_MAX = 1 << 20
"""Most entries: 16 MiB."""
POSITIVE_S, NEGATIVE_S = 60.0, 5.0
JITTER = 0.2
"""Part of a negative entry's time that is left to chance: hosts do not ask again in step."""
_TICKS = 16
"""Ticks of a second."""
_WORD_BYTES = 8

_U64 = npt.NDArray[np.uint64]
States = npt.NDArray[np.int8]
"""``YES``, ``NO`` or ``UNKNOWN`` for each key, shape (n,)."""
UNKNOWN, YES, NO = 0, 1, -1


class Hasher:
    """Hashes keys to 64 bits, with a secret: clients cannot make keys collide."""

    def __init__(self) -> None:
        self._by = np.frombuffer(secrets.token_bytes(9 * _WORD_BYTES), np.uint64) | np.uint64(1)

    def hashes(self, keys: Sequence[bytes], start: int) -> _U64:
        """Return the hashes of keys of one length, never 0, shape (n,); another 64-bit ``start``
        gives others.
        """
        words = _words(keys)
        mixed: _U64 = words @ self._by[: words.shape[1]]
        mixed += np.uint64(start)
        mixed ^= mixed >> np.uint64(32)
        mixed *= self._by[-1]
        mixed ^= mixed >> np.uint64(29)
        mixed |= np.uint64(1)
        return mixed


class ExistenceCache:
    """Bounded knowledge of what a remote has.

    Args:
        entries_max: most entries, rounded down to a power of two, at least ``WAYS``.
        positive_s, negative_s: seconds for which an entry holds.
    """

    def __init__(
        self,
        entries_max: int = ENTRIES_MAX,
        positive_s: float = POSITIVE_S,
        negative_s: float = NEGATIVE_S,
    ) -> None:
        size = 1 << max(2, entries_max).bit_length() - 1
        self._positive_s, self._negative_s = positive_s, negative_s
        self._mask = np.uint64(size - 1)
        self._tags = np.zeros(size, np.uint64)
        # The time in ticks at which an entry ends; negative for a negative entry, 0 for none.
        self._ends = np.zeros(size, np.int64)
        self._began: float | None = None

    @property
    def entries_max(self) -> int:
        """Most entries."""
        return self._tags.size

    def entries(self, now: float) -> int:
        """Return the number of entries that hold now."""
        return int(np.count_nonzero(np.abs(self._ends) > self._tick(now)))

    def look(self, hashes: _U64, now: float) -> States:
        """Return what is known of blocks, by the hashes of their keys."""
        one, tick = self._places(hashes), self._tick(now)
        other = one ^ 1
        # One place at most has the tag.
        ends = self._ends.take(one) * (self._tags.take(one) == hashes)
        ends += self._ends.take(other) * (self._tags.take(other) == hashes)
        found: States = (ends > tick).view(np.int8)
        found -= (ends < -tick).view(np.int8)
        return found

    def note(self, hashes: _U64, present: Bools | bool, now: float, *, for_s: float = 0.0) -> None:
        """Enter blocks as present or absent, in place of the entry that ends first.

        Args:
            for_s: seconds for which the entries hold; 0 for the cache's own times.
        """
        if not len(hashes):
            return
        tick, yes = self._tick(now), np.broadcast_to(np.asarray(present), hashes.shape)
        shorter = 1 - JITTER * random.random()
        positive_s, negative_s = for_s or self._positive_s, for_s or self._negative_s * shorter
        ends = np.where(
            yes, tick + max(1, int(positive_s * _TICKS)), -tick - max(1, int(negative_s * _TICKS))
        )
        for _ in range(2):  # keys of one call may want the same place
            one = self._places(hashes)
            places = one ^ self._takes_other(one, hashes)
            self._tags[places] = hashes
            mine = self._tags[places] == hashes
            self._ends[places[mine]] = ends[mine]
            if mine.all():
                break
            hashes, ends = hashes[~mine], ends[~mine]

    def _takes_other(self, one: I64, hashes: _U64) -> Bools:
        """Return which keys are to be entered in their second places."""
        other = one ^ 1
        here, there = self._tags[one] == hashes, self._tags[other] == hashes
        later = np.abs(self._ends[one]) > np.abs(self._ends[other])
        taken: Bools = there | (~here & later)
        return taken

    def _places(self, hashes: _U64) -> I64:
        """Return the first place of each key; the second one is beside it."""
        places: I64 = ((hashes >> np.uint64(20)) & self._mask).view(np.int64)
        return places

    def _tick(self, now: float) -> int:
        """Return the ticks since the first call, from 1."""
        if self._began is None:
            self._began = now
        return 1 + int((now - self._began) * _TICKS)


def _words(keys: Sequence[bytes]) -> _U64:
    """Return keys as rows of words, padded with zeros."""
    size, count = len(keys[0]), len(keys)
    blob = keys.blob if isinstance(keys, PackedKeys) else b"".join(keys)
    if size % _WORD_BYTES == 0:
        return np.frombuffer(blob, np.uint64).reshape(count, size // _WORD_BYTES)
    padded = np.zeros((count, -(-size // _WORD_BYTES) * _WORD_BYTES), np.uint8)
    padded[:, :size] = np.frombuffer(blob, np.uint8).reshape(count, size)
    return padded.view(np.uint64)

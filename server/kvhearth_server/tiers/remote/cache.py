"""Existence cache of a remote: which blocks it has, as far as is known, in 16 bytes an entry.

A set-associative table in arrays. A wrong answer costs a read that misses, or a block that is
computed again, never a wrong byte: every record is verified when it is read.
"""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvhearth.keys import PackedKeys
from kvhearth.model import Bools

WAYS = 4
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
        self._by = np.frombuffer(secrets.token_bytes(16 * _WORD_BYTES), np.uint64) | np.uint64(1)

    def hashes(self, keys: Sequence[bytes], start: int) -> _U64:
        """Return the hashes of keys of one length, never 0, shape (n,); another 64-bit ``start``
        gives others.
        """
        words = _words(keys)
        mixed = np.full(len(words), start, np.uint64)
        for column in range(words.shape[1]):
            mixed += words[:, column]
            mixed *= self._by[2 * column]
            mixed ^= mixed >> np.uint64(32)
            mixed *= self._by[2 * column + 1]
        mixed ^= mixed >> np.uint64(29)
        return mixed | np.uint64(1)


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
        buckets = 1 << (max(WAYS, entries_max) // WAYS).bit_length() - 1
        self._positive_s, self._negative_s = positive_s, negative_s
        self._mask = np.uint64(buckets - 1)
        self._tags = np.zeros((buckets, WAYS), np.uint64)
        # The time in ticks at which an entry ends; negative for a negative entry, 0 for none.
        self._ends = np.zeros((buckets, WAYS), np.int64)
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
        found = np.zeros(len(hashes), np.int8)
        buckets = self._buckets(hashes)
        tags, ends = self._tags[buckets], self._ends[buckets]
        ends *= tags == hashes[:, None]
        tick = self._tick(now)
        # An entry is either positive or negative, and one way at most has the tag.
        found += (ends > tick).any(axis=1)
        found -= (ends < -tick).any(axis=1)
        return found

    def note(self, hashes: _U64, present: Bools | bool, now: float, *, for_s: float = 0.0) -> None:
        """Enter blocks as present or absent. A full set loses the entry that ends first.

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
        buckets = self._buckets(hashes)
        # Several keys of one call may fall into one set: a round enters one of each.
        left = np.arange(len(hashes))
        while len(left):
            _, first = np.unique(buckets[left], return_index=True)
            rows = left[first]
            self._enter(buckets[rows], hashes[rows], ends[rows])
            left = np.delete(left, first)

    def _enter(self, buckets: _U64, hashes: _U64, ends: npt.NDArray[np.int64]) -> None:
        same = self._tags[buckets] == hashes[:, None]
        ways = np.where(
            same.any(axis=1), same.argmax(axis=1), np.abs(self._ends[buckets]).argmin(axis=1)
        )
        self._tags[buckets, ways] = hashes
        self._ends[buckets, ways] = ends

    def _buckets(self, hashes: _U64) -> _U64:
        buckets: _U64 = (hashes >> np.uint64(20)) & self._mask
        return buckets

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

"""Existence cache of a remote: which blocks it has, as far as is known, in 16 bytes an entry.

A table in arrays, in which each key has four places. A wrong answer costs a read that misses, or a
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
_WAYS = 4
_OTHER_WAYS = np.arange(1, _WAYS)
_HIGH = np.uint64(40)
"""The upper bits of a product depend on all bits of its factors."""
_SIZE_MIN, _SPARE = 1 << 16, 4
"""Smallest table, and its places for each entry."""
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
        mixed |= np.uint64(1)
        return mixed


class ExistenceCache:
    """Bounded knowledge of what a remote has.

    Args:
        entries_max: most entries, rounded down to a power of two.
        positive_s, negative_s: seconds for which an entry holds.
    """

    def __init__(
        self,
        entries_max: int = ENTRIES_MAX,
        positive_s: float = POSITIVE_S,
        negative_s: float = NEGATIVE_S,
    ) -> None:
        self._positive_s, self._negative_s = positive_s, negative_s
        self._size_max = 1 << max(_WAYS, entries_max).bit_length() - 1
        # It grows with its entries: a lookup waits for memory at each key of a large table.
        self._make(min(_SIZE_MIN, self._size_max))
        self._entered = 0
        self._began: float | None = None

    @property
    def entries_max(self) -> int:
        """Most entries."""
        return self._size_max

    def entries(self, now: float) -> int:
        """Return the number of entries that hold now."""
        return int(np.count_nonzero(np.abs(self._ends) > self._tick(now)))

    def look(self, hashes: _U64, now: float) -> States:
        """Return what is known of blocks, by the hashes of their keys."""
        places, tick = self._places(hashes), self._tick(now)
        here, ends = self._tags.take(places) == hashes, self._ends.take(places)
        if np.count_nonzero(here) < len(here):
            ends *= here
            rows = np.flatnonzero(~here)
            others = places[rows][:, None] ^ _OTHER_WAYS
            there = self._tags.take(others) == hashes[rows][:, None]
            ends[rows] = (self._ends.take(others) * there).sum(axis=1)
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
        self._entered += len(hashes)
        if _SPARE * self._entered > len(self._tags):
            self._grow(tick)
        self._enter(hashes, ends)

    def _make(self, size: int) -> None:
        """Make an empty table."""
        self._tags = np.zeros(size, np.uint64)
        # The time in ticks at which an entry ends; negative for a negative entry, 0 for none.
        self._ends = np.zeros(size, np.int64)

    def _grow(self, tick: int) -> None:
        """Enlarge the table for the entries that hold now."""
        live = np.abs(self._ends) > tick
        tags, ends = self._tags[live], self._ends[live]
        size = len(self._tags)
        while _SPARE * len(tags) > size and size < self._size_max:
            size *= 2
        self._entered = len(tags)
        if size > len(self._tags):
            self._make(size)
            self._enter(tags, ends)
        elif size == self._size_max:
            self._entered = 0  # look again only after as many more

    def _enter(self, hashes: _U64, ends: I64) -> None:
        ways = np.arange(_WAYS)
        for _ in range(_WAYS):  # keys of one call may want the same place
            around = self._places(hashes)[:, None] ^ ways
            # The key's own entry, else the one that ends first, its first place before others.
            rank = np.abs(self._ends[around]) + 1
            rank[self._tags[around] == hashes[:, None]] = 0
            places = around[np.arange(len(around)), rank.argmin(axis=1)]
            self._tags[places] = hashes
            mine = self._tags[places] == hashes
            self._ends[places[mine]] = ends[mine]
            if mine.all():
                break
            hashes, ends = hashes[~mine], ends[~mine]

    def _places(self, hashes: _U64) -> I64:
        """Return the first place of each key; its others are beside it."""
        mask = np.uint64(len(self._tags) - 1)
        places: I64 = ((hashes >> _HIGH) & mask).view(np.int64)
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

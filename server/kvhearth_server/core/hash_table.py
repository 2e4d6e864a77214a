"""Hash table of buckets in arrays: maps 32 bits of a hash to a slot number, many at a time.

See ``index`` for its use. A search, a growth or a removal needs only a key's cell: the bucket is
derived from the same 32 bits.

The table grows by splitting buckets in their order, some at each call that adds keys (linear
hashing). With ``size`` a power of two, the buckets before ``_split`` have been split: a key whose
hash modulo ``size`` is below ``_split`` is at home in its hash modulo ``2 * size``. The memory for
all buckets is reserved at once and is not resident until a bucket is used, so no call copies or
frees a table.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from kvhearth.model import I64, U32, Bools

_U64 = npt.NDArray[np.uint64]
Hashes = npt.NDArray[np.uint64]
"""Hashes of keys, 32 bits each, never 0, shape (n,)."""
Same = Callable[[I64, I64], Bools]
"""Tests whether heads belong to keys: positions among the requested keys, a head for each."""

_CELLS = 8
_FEW = 8
"""Number of keys up to which a walk one by one is cheaper than an array a bucket."""
_BUCKETS_MIN = 1
_LOAD_CELLS = 4
"""Keys per bucket at which splitting begins. One bucket is split for each further key, so all are
split at five keys per bucket, and no call that adds n keys splits many more than n buckets.
"""
_SPLIT_MIN, _SPLIT_PART = 64, 8
"""Buckets that are split at once: ``_SPLIT_MIN`` cost hardly more than one. A small table splits
one in ``_SPLIT_PART`` of its buckets.
"""
_HIGH = np.uint64(32)
_LOW = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
_WORD = (1 << 64) - 1
_WORDS = tuple(struct.Struct(f"<{words}Q").unpack for words in range(9))
"""Unpackers by the number of words; a key has at most eight."""
_ROW = struct.Struct(f"<{_CELLS}Q")
_CELL = struct.Struct("<Q")
_STEP = 6364136223846793005
# Leading bits of the golden ratio and of square roots: numbers without a pattern.
_CONSTANTS = (
    0x9E3779B97F4A7C15,
    0xBB67AE8584CAA73B,
    0x3C6EF372FE94F82B,
    0xA54FF53A5F1D36F1,
    0x510E527FADE682D1,
    0x9B05688C2B3E6C1F,
    0x1F83D9ABFB41BD6B,
    0x5BE0CD19137E2179,
)


def multipliers(seed: int) -> _U64:
    """Multipliers of the hash, two per word of a key.

    A secret seed prevents clients from making keys collide.
    """
    numbers = []
    for constant in (*_CONSTANTS, *_CONSTANTS):
        seed = (seed * _STEP + constant) & _WORD
        numbers.append(seed ^ seed >> 31 | 1)
    return np.array(numbers, np.uint64)


def hash_words(words: _U64, by: _U64, start: int = 0) -> Hashes:
    """Hash keys given as rows of words, shape (n, words); for ``by`` see ``multipliers``.

    Another 64-bit ``start`` gives other hashes.
    """
    mixed: Hashes = np.full(len(words), start, np.uint64)
    for column in range(words.shape[1]):
        mixed += words[:, column]
        mixed *= by[2 * column]
        mixed ^= mixed >> _HIGH
        # Without a second secret, a difference in one word could be cancelled by the next one.
        mixed *= by[2 * column + 1]
    mixed >>= _HIGH
    mixed |= _ONE
    return mixed


def hash_one(key: bytes, by: list[int], start: int = 0) -> int:
    """Hash one key padded to whole words, as ``hash_words``, without numpy's cost per call."""
    mixed, column = start, 0
    for word in _WORDS[len(key) // 8](key):
        mixed = (mixed + word) * by[column] & _WORD
        mixed = (mixed ^ mixed >> 32) * by[column + 1] & _WORD
        column += 2
    return mixed >> 32 | 1


class Buckets:
    """One table for at most ``keys_max`` keys, with hashes from ``hash_words``."""

    def __init__(self, keys_max: int) -> None:
        self._count = 0
        self.moved = 0
        """Keys that growth has moved to another bucket so far."""
        most = _BUCKETS_MIN
        while most * _LOAD_CELLS < keys_max:
            most *= 2
        self._last = most - 1
        self._stand_at(_BUCKETS_MIN, 0)
        self._cells = np.zeros((most, _CELLS), np.uint64)
        self._memory = self._cells.data
        self._bytes = self._cells.reshape(-1).view(np.uint8).data
        self._passed: U32 = np.zeros(most, np.uint32)
        self._passes = self._passed.data

    def __len__(self) -> int:
        return self._count

    @property
    def growing(self) -> bool:
        """Whether some buckets are split and some are not yet."""
        return self._split > 0

    def _home(self, hashes: Hashes) -> I64:
        # The lowest bit is always set and carries no information.
        numbers = (hashes >> _ONE).view(np.int64)
        home: I64 = numbers & (self._size - 1)
        if self._split:
            home = np.where(home < self._split, numbers & (2 * self._size - 1), home)
        return home

    def _home_one(self, value: int) -> int:
        home = (value >> 1) & (self._size - 1)
        return home if home >= self._split else (value >> 1) & (2 * self._size - 1)

    def find(self, hashes: Hashes, same: Same) -> I64:
        """Heads of keys, shape (n,); -1 where there is none."""
        bucket = self._home(hashes)
        rows = self._cells[bucket]
        at = (rows >> _HIGH == hashes[:, None]).argmax(axis=1)
        every = np.arange(len(hashes))
        cells = rows[every, at]
        like = cells >> _HIGH == hashes
        heads: I64 = (cells & _LOW).view(np.int64) - 1
        if like.all():
            good = same(every, heads)
        else:
            good = np.zeros(len(hashes), np.bool_)
            some = np.flatnonzero(like)
            good[some] = same(some, heads[some])
        if good.all():
            return heads
        heads[~good] = -1
        # Few: other keys with the same 32 bits, and keys that passed a full bucket.
        for position in np.flatnonzero(~good & like).tolist():
            heads[position] = self._search(position, int(hashes[position]), same)
        passed = np.flatnonzero(~like & (self._passed[bucket] > 0))
        if len(passed):
            heads[passed] = self._find_behind(passed, bucket[passed], hashes[passed], same)
        return heads

    def _find_behind(self, positions: I64, bucket: I64, hashes: Hashes, same: Same) -> I64:
        """Find keys that are not in these buckets, but may have passed them."""
        heads = np.full(len(positions), -1, np.int64)
        rest = np.arange(len(positions))
        while len(rest) > _FEW:
            bucket = (bucket + 1) & self._last
            rows, values = self._cells[bucket], hashes[rest]
            at = (rows >> _HIGH == values[:, None]).argmax(axis=1)
            cells = rows[np.arange(len(rest)), at]
            like = cells >> _HIGH == values
            found = (cells & _LOW).view(np.int64) - 1
            good = like.copy()
            good[like] = same(positions[rest[like]], found[like])
            heads[rest[good]] = found[good]
            for row in np.flatnonzero(like & ~good).tolist():
                value, position = int(values[row]), int(positions[rest[row]])
                heads[rest[row]] = self._search(position, value, same)
            on = ~like & (self._passed[bucket] > 0)
            rest, bucket = rest[on], bucket[on]
        for row in rest.tolist():
            heads[row] = self._search(int(positions[row]), int(hashes[row]), same)
        return heads

    def _search(self, position: int, value: int, same: Same) -> int:
        asked = np.array([position], np.int64)
        found = self.like(value)
        return next((at for at in found if same(asked, np.array([at], np.int64))[0]), -1)

    def like(self, value: int) -> list[int]:
        """Heads of all keys with this hash."""
        bucket = self._home_one(value)
        heads: list[int] = []
        wanted = value.to_bytes(4, "little")
        while True:
            start = bucket * _ROW.size
            # Mostly there is none: a search in the bytes shows that at a tenth of the cost of a
            # look at each cell.
            if wanted in self._bytes[start : start + _ROW.size].tobytes():
                cells = _ROW.unpack_from(self._memory, start)
                heads += [(cell & 0xFFFFFFFF) - 1 for cell in cells if cell >> 32 == value]
            if not self._passes[bucket]:
                return heads
            bucket = (bucket + 1) & self._last

    def add(self, hashes: Hashes, heads: I64) -> None:
        """Bind keys that are not bound."""
        if not self._count:
            size = self._size
            while size * _LOAD_CELLS < len(heads) and size <= self._last:
                size *= 2
            self._stand_at(size, 0)
        self._count += len(heads)
        self._grow()
        self._place(hashes << _HIGH | (heads + 1).view(np.uint64))

    def add_one(self, value: int, head: int) -> None:
        """Bind one key whose hash is ``value``."""
        self._count += 1
        if self._count >= self._due_at:
            self._grow()
        self._place_from(value << 32 | head + 1, self._home_one(value))

    def _grow(self) -> None:
        """Split the buckets that are due; keys already counted are about to be placed."""
        while self._count >= self._due_at:
            self._split_until(min(self._count - self._size * _LOAD_CELLS, self._size))

    def _stand_at(self, size: int, split: int) -> None:
        """Set the number of buckets, of which those before ``split`` are split."""
        self._size, self._split = size, split
        step = min(_SPLIT_MIN, max(1, size // _SPLIT_PART))
        self._due_at = size * _LOAD_CELLS + split + min(step, size - split)
        if size > self._last:
            self._due_at = _WORD  # no more keys arrive than the buckets were made for

    def _split_until(self, end: int) -> None:
        """Split the buckets before ``end``; those before ``_split`` are done."""
        first, size = self._split, self._size
        reach = end
        while self._passes[(reach - 1) & self._last]:
            reach += 1
        span = np.arange(first, reach) & self._last
        cells = self._cells[span]
        numbers = (cells >> _HIGH >> _ONE).view(np.int64)
        home = numbers & (size - 1)
        mine = (cells != 0) & (home >= first) & (home < end)
        at_home = mine & (home == span[:, None])
        # Few: keys that found their bucket full are placed again.
        displaced = cells[mine & ~at_home]
        self._take_out(displaced)
        goes = at_home[: end - first] & ((numbers[: end - first] & size) > 0)
        moving = np.where(goes, cells[: end - first], np.uint64(0))
        self._cells[first:end][goes] = 0
        above = self._cells[first + size : end + size]
        taken: Bools = (above != 0).any(axis=1)
        if taken.any():
            displaced = np.concatenate([displaced, moving[taken][goes[taken]]])
            moving = np.where(taken[:, None], above, moving)
        above[:] = moving
        self.moved += int(np.count_nonzero(goes)) + len(displaced)
        self._stand_at(*((size, end) if end < size else (2 * size, 0)))
        self._place(displaced)

    def _place(self, cells: _U64) -> None:
        bucket = self._home(cells >> _HIGH)
        while len(cells) > _FEW:
            order = np.argsort(bucket, kind="stable")
            cells, bucket = cells[order], bucket[order]
            rank = _ranks(bucket)
            room = (self._cells[bucket] == 0).cumsum(axis=1)
            fits = room[:, -1] > rank
            column = (room == rank[:, None] + 1).argmax(axis=1)
            self._cells[bucket[fits], column[fits]] = cells[fits]
            cells, bucket = cells[~fits], bucket[~fits]
            np.add.at(self._passed, bucket, np.uint32(1))
            bucket = (bucket + 1) & self._last
        for cell, at in zip(cells.tolist(), bucket.tolist(), strict=True):
            self._place_from(cell, at)

    def _place_from(self, cell: int, bucket: int) -> None:
        """Place a cell in the first bucket with room, from ``bucket`` on."""
        while True:
            start = bucket * _ROW.size
            cells = _ROW.unpack_from(self._memory, start)
            if 0 in cells:
                _CELL.pack_into(self._memory, start + cells.index(0) * _CELL.size, cell)
                return
            self._passes[bucket] += 1
            bucket = (bucket + 1) & self._last

    def remove(self, hashes: Hashes, heads: I64) -> None:
        """Forget bound keys.

        Raises:
            ValueError: one is not bound.
        """
        self._count -= len(heads)
        self._take_out(hashes << _HIGH | (heads + 1).view(np.uint64))

    def _take_out(self, wanted: _U64) -> None:
        bucket = self._home(wanted >> _HIGH)
        while len(wanted) > _FEW:
            match = self._cells[bucket] == wanted[:, None]
            there = match.any(axis=1)
            self._cells[bucket[there], match[there].argmax(axis=1)] = 0
            wanted, bucket = wanted[~there], bucket[~there]
            if not (self._passed[bucket] > 0).all():
                raise ValueError("a slot is not in the index")
            np.subtract.at(self._passed, bucket, np.uint32(1))
            bucket = (bucket + 1) & self._last
        for cell, at in zip(wanted.tolist(), bucket.tolist(), strict=True):
            self._take_from(cell, at)

    def _take_from(self, cell: int, bucket: int) -> None:
        """Take a cell out of the first bucket that has it, from ``bucket`` on."""
        while True:
            start = bucket * _ROW.size
            cells = _ROW.unpack_from(self._memory, start)
            if cell in cells:
                _CELL.pack_into(self._memory, start + cells.index(cell) * _CELL.size, 0)
                return
            if not self._passes[bucket]:
                raise ValueError("a slot is not in the index")
            self._passes[bucket] -= 1
            bucket = (bucket + 1) & self._last

    def heads(self) -> I64:
        """All bound heads."""
        cells = self._used()
        heads: I64 = (cells[cells != 0] & _LOW).view(np.int64) - 1
        return heads

    def _used(self) -> _U64:
        """Buckets that may have keys; a look at the others would make them resident."""
        end = self._size + self._split
        while end <= self._last and self._passes[end - 1]:
            end += 1
        return self._cells[:end]

    def check(self) -> None:
        """Raise ValueError unless the counts agree with the cells."""
        cells = self._used()
        full = cells != 0
        if int(full.sum()) != self._count:
            raise ValueError(f"{int(full.sum())} cells in use, {self._count} counted")
        at = np.nonzero(full)[0]
        home = self._home(cells[full] >> _HIGH)
        passed = np.zeros(len(cells), np.uint32)
        while True:
            away = home != at
            if not away.any():
                break
            home, at = home[away], at[away]
            np.add.at(passed, home, np.uint32(1))
            home = (home + 1) & self._last
        if (passed != self._passed[: len(cells)]).any():
            raise ValueError("a bucket miscounts the keys that passed it")


def _ranks(ordered: I64) -> I64:
    """Number of equal values before each element of a sorted array."""
    places = np.arange(len(ordered))
    first = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=first[1:])
    return places - np.maximum.accumulate(np.where(first, places, 0))

"""Keys to entries, in several dicts: one that grows does so in one piece, and the loop waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

import numpy as np

from kvhearth.model import I64

_PARTS = 256
"""A dict of 90,000 keys takes 5 ms to grow; that is reached at 16 million in all."""
_NUMBERS = 1 << 12
_SHIFT = 51
"""A dict looks at the lowest bits of a hash, so that parts are chosen by a number of high ones."""


class KeyMap:
    """A dict of keys to entries, numbers from 0 on."""

    def __init__(self) -> None:
        self._parts: list[dict[bytes, int]] = [{} for _ in range(_PARTS)]
        self._by_number = np.empty(_NUMBERS, np.object_)
        # Each part gets a little more than the one before it, the last one twice as much as the
        # first: of dicts of one size all would grow at the same time.
        shares = np.log2(1 + np.arange(_NUMBERS) / _NUMBERS) * _PARTS
        self._by_number[:] = [self._parts[part] for part in shares.astype(int).tolist()]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __getitem__(self, key: bytes) -> int:
        return self._part(key)[key]

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Keys and their entries, in no order."""
        return chain.from_iterable(part.items() for part in self._parts)

    def find(self, keys: Sequence[bytes]) -> I64:
        """Entries, shape (n,); -1 where there is none."""
        found = map(dict.get, self._homes(keys), keys, repeat(-1))
        return np.fromiter(found, np.int64, len(keys))

    def add(self, keys: Sequence[bytes], entries: range) -> bool:
        """Set the entries of keys; false, with nothing done, if one of them is there already or
        named twice.
        """
        numbers = np.arange(entries.start, entries.stop, entries.step)
        found = map(dict.setdefault, self._homes(keys), keys, entries)
        new = np.fromiter(found, np.int64, len(keys)) == numbers
        if new.all():
            return True
        for row in np.flatnonzero(new).tolist():
            self.pop(keys[row])
        return False

    def put(self, keys: Sequence[bytes], entries: range) -> None:
        """Set the entries of keys, of one that is named twice the last."""
        for home, key, entry in zip(self._homes(keys), keys, entries, strict=True):
            home[key] = entry

    def pop(self, key: bytes) -> int:
        """Forget a key; its entry, -1 if it was not there."""
        return self._part(key).pop(key, -1)

    def take(self, count: int) -> list[tuple[bytes, int]]:
        """Forget up to ``count`` keys, whichever cost the least; they and their entries."""
        taken: list[tuple[bytes, int]] = []
        for part in self._parts:
            while part and len(taken) < count:
                taken.append(part.popitem())
        return taken

    def _homes(self, keys: Sequence[bytes]) -> list[dict[bytes, int]]:
        """The dict of each. At a restart there are millions of keys, so no line of Python is run
        for each.
        """
        numbers = np.fromiter(map(hash, keys), np.int64, len(keys)) >> _SHIFT & _NUMBERS - 1
        homes: list[dict[bytes, int]] = self._by_number[numbers].tolist()
        return homes

    def _part(self, key: bytes) -> dict[bytes, int]:
        part: dict[bytes, int] = self._by_number[hash(key) >> _SHIFT & _NUMBERS - 1]
        return part

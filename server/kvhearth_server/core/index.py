"""The index: key to head slot, one dict per (namespace, group); per slot only a reference to its
key.

A dict of bytes to int holds nothing that the garbage collector tracks, so a million blocks cost no
pauses.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import repeat

import numpy as np

from kvhearth.model import I64

_Map = dict[bytes, int]


class Index:
    """Which block has which head slot."""

    def __init__(self, stride: int) -> None:
        self._stride = stride
        self._maps: dict[tuple[int, int], _Map] = {}
        self._keys: dict[int, list[bytes | None]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._maps.values()))

    def find(self, namespace: int, group: int, keys: list[bytes]) -> I64:
        """Head slots of keys, shape (n,); -1 where there is none."""
        found = self._maps.get((namespace, group))
        if not found:
            return np.full(len(keys), -1, np.int64)
        return np.fromiter(map(found.get, keys, repeat(-1)), np.int64, len(keys))

    def bind(self, namespace: int, group: int, keys: list[bytes], heads: I64) -> None:
        """Bind keys that are not bound to heads, in order."""
        self._maps.setdefault((namespace, group), {}).update(zip(keys, heads.tolist(), strict=True))
        slabs, inside = heads // self._stride, heads % self._stride
        tops = np.full(int(slabs.max(initial=-1)) + 1, -1, np.int64)
        np.maximum.at(tops, slabs, inside)
        for slab in np.flatnonzero(tops >= 0).tolist():
            self._grow(slab, int(tops[slab]))
        columns = map(self._keys.__getitem__, slabs.tolist())
        for column, row, key in zip(columns, inside.tolist(), keys, strict=True):
            column[row] = key

    def _grow(self, slab: int, inside: int) -> None:
        """Lengthen a slab's column of keys; a slab has as many as it has slots, rarely the whole
        stride.
        """
        column = self._keys.setdefault(slab, [])
        if inside >= len(column):
            size = min(self._stride, max(2 * len(column), inside + 1, 32))
            column.extend([None] * (size - len(column)))

    def key(self, head: int) -> bytes:
        """The key of a bound head."""
        slab, inside = divmod(head, self._stride)
        key = self._keys[slab][inside]
        if key is None:
            raise ValueError(f"slot {head} is bound to no key")
        return key

    def unbind(self, namespace: int, group: int, heads: list[int]) -> list[bytes]:
        """Forget bound heads; returns their keys."""
        found = self._maps[namespace, group]
        keys = []
        for head in heads:
            slab, inside = divmod(head, self._stride)
            column = self._keys[slab]
            key = column[inside]
            if key is None:
                raise ValueError(f"slot {head} is bound to no key")
            column[inside] = None
            del found[key]
            keys.append(key)
        if not found:
            del self._maps[namespace, group]
        return keys

    def forget_slab(self, slab: int) -> None:
        """Drop the column of a slab that lost its slot size."""
        self._keys.pop(slab, None)

    def items(self) -> Iterator[tuple[int, int, _Map]]:
        """(namespace, group, map) of all that is bound; the map must not be changed."""
        for (namespace, group), found in self._maps.items():
            yield namespace, group, found

    def check(self) -> None:
        """Raise ValueError unless both directions agree."""
        forward = 0
        for _, _, found in self.items():
            forward += len(found)
            for key, head in found.items():
                if self.key(head) != key:
                    raise ValueError(f"slot {head}: index and key column disagree")
        backward = sum(key is not None for column in self._keys.values() for key in column)
        if forward != backward:
            raise ValueError(f"{forward} keys in the index, {backward} in the columns")

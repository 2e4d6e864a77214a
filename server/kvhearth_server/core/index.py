"""The index: key to head slot, in arrays, so that thousands of keys cost a few numpy calls and no
block costs a Python object.

A key's bytes stand in a row per slot. For each (namespace, KV group) a hash table of buckets finds
the slot: a bucket is a cache line of eight cells, a cell is 32 bits of the key's hash above the
slot's number + 1, 0 is empty. A key that finds its bucket full goes to the next one, and each
bucket counts the keys that passed it, so that a search knows when to stop and nothing is left
behind by a removal.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvhearth.model import I64, Bools
from kvhearth_server.core.buckets import Buckets, Hashes, Same, hash_one, hash_words, multipliers

_U64 = npt.NDArray[np.uint64]
_WORD_BYTES = 8
_FEW = 4
"""So many keys cost less one by one."""


class Index:
    """Which block has which head slot.

    Args:
        slot_count: slots are numbered below this.
        seed: of the hash; a secret one where keys come from strangers.
    """

    def __init__(self, slot_count: int, seed: int = 0) -> None:
        self._by = multipliers(seed)
        self._by_numbers = self._by.tolist()
        self._tables: dict[tuple[int, int], Buckets] = {}
        self._key_bytes = np.zeros(slot_count, np.uint8)
        # By words of a key; most daemons see one width. Rows that no slot used take no memory.
        self._rows: dict[int, _U64] = {}

    def __len__(self) -> int:
        return sum(map(len, self._tables.values()))

    def find(self, namespace: int, group: int, keys: list[bytes]) -> I64:
        """Head slots of keys, shape (n,); -1 where there is none. Keys are of one length."""
        table = self._tables.get((namespace, group))
        if not table or not keys or len(keys[0]) != table.key_bytes:
            return np.full(len(keys), -1, np.int64)
        if len(keys) <= _FEW:
            rows = self._rows[_width(table.key_bytes)]
            return np.array([self._find_one(table, rows, key) for key in keys], np.int64)
        words = _words(keys)
        return table.find(hash_words(words, self._by), self._asked(words))

    def _find_one(self, table: Buckets, rows: _U64, key: bytes) -> int:
        padded = key.ljust(rows.shape[1] * _WORD_BYTES, b"\0")
        value = hash_one(padded, self._by_numbers)
        return next((at for at in table.like(value) if rows[at].tobytes() == padded), -1)

    def bind(self, namespace: int, group: int, keys: list[bytes], heads: I64) -> None:
        """Bind distinct keys of one length, none of them bound, to heads."""
        if not keys:
            return
        words = _words(keys)
        width = words.shape[1]
        if width not in self._rows:
            self._rows[width] = np.zeros((len(self._key_bytes), width), np.uint64)
        self._rows[width][heads] = words
        self._key_bytes[heads] = len(keys[0])
        table = self._tables.get((namespace, group))
        if table is None:
            table = self._tables[namespace, group] = Buckets(len(keys[0]))
        if table.key_bytes != len(keys[0]):
            raise ValueError(f"a key of {len(keys[0])} bytes among keys of {table.key_bytes}")
        table.add(self._hashes(words), heads)

    def key(self, head: int) -> bytes:
        """The key of a bound head."""
        (key,) = self.keys(np.array([head], np.int64))
        return key

    def keys(self, heads: I64) -> list[bytes]:
        """The keys of bound heads of one group."""
        if not len(heads):
            return []
        size = int(self._key_bytes[heads[0]])
        if not size or not (self._key_bytes[heads] == size).all():
            raise ValueError(f"a slot of {heads[:8].tolist()} is bound to no key of this group")
        rows = self._rows[_width(size)][heads].view(np.uint8).reshape(len(heads), -1)
        blob = np.ascontiguousarray(rows[:, :size]).tobytes()
        return [blob[at : at + size] for at in range(0, len(blob), size)]

    def unbind(self, namespace: int, group: int, heads: list[int]) -> list[bytes]:
        """Forget bound heads of one group; returns their keys."""
        slots = np.array(heads, np.int64)
        if not len(slots):
            return []
        keys = self.keys(slots)
        table = self._tables[namespace, group]
        words = self._rows[_width(table.key_bytes)][slots]
        table.remove(self._hashes(words), slots)
        self._key_bytes[slots] = 0
        if not len(table):
            del self._tables[namespace, group]
        return keys

    def spaces(self) -> Iterator[tuple[int, int, I64]]:
        """(namespace, group, bound heads in ascending order) of all that is bound."""
        for (namespace, group), table in self._tables.items():
            yield namespace, group, np.sort(table.heads())

    def items(self) -> Iterator[tuple[int, int, dict[bytes, int]]]:
        """(namespace, group, head by key) of all that is bound: for tests and small cores."""
        for namespace, group, heads in self.spaces():
            yield namespace, group, dict(zip(self.keys(heads), heads.tolist(), strict=True))

    def check(self) -> None:
        """Raise ValueError unless every bound slot is found by its key, and nothing else is."""
        bound = 0
        for (namespace, group), table in self._tables.items():
            heads = table.heads()
            bound += len(heads)
            table.check()
            if not (self._key_bytes[heads] == table.key_bytes).all():
                raise ValueError(f"namespace {namespace}, group {group}: a slot has another key")
            words = self._rows[_width(table.key_bytes)][heads]
            found = table.find(hash_words(words, self._by), self._asked(words))
            if (found != heads).any():
                raise ValueError(f"namespace {namespace}, group {group}: a slot is not found")
        slots = int(np.count_nonzero(self._key_bytes))
        if slots != bound:
            raise ValueError(f"{bound} slots in the index, {slots} with a key")

    def _asked(self, words: _U64) -> Same:
        """Whether slots have the keys that are asked for."""
        rows = self._rows[words.shape[1]]

        def same(some: I64, heads: I64) -> Bools:
            equal: Bools = (rows[heads] == words[some]).all(axis=1)
            return equal

        return same

    def _hashes(self, words: _U64) -> Hashes:
        if len(words) <= _FEW:
            return np.array([hash_one(row.tobytes(), self._by_numbers) for row in words], np.uint64)
        return hash_words(words, self._by)


def _width(key_bytes: int) -> int:
    return -(-key_bytes // _WORD_BYTES)


def _words(keys: list[bytes]) -> _U64:
    """Keys as rows of words, shape (n, words), padded with zeros."""
    size = len(keys[0])
    blob = b"".join(keys)
    if len(blob) != len(keys) * size:
        raise ValueError("keys of different lengths in one call")
    if not size % _WORD_BYTES:
        return np.frombuffer(blob, np.uint64).reshape(len(keys), -1)
    padded = np.zeros((len(keys), _width(size) * _WORD_BYTES), np.uint8)
    padded[:, :size] = np.frombuffer(blob, np.uint8).reshape(len(keys), size)
    return padded.view(np.uint64)

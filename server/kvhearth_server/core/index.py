"""The index: key to head slot, in arrays, so that thousands of keys cost a few numpy calls and no
block costs a Python object.

A key's bytes stand in a row per slot. For each (namespace, KV group) a hash table of buckets finds
the slot: a bucket is a cache line of eight cells, a cell is 32 bits of the key's hash above the
slot's number + 1, 0 is empty. A key that finds its bucket full goes to the next one, and each
bucket counts the keys that passed it, so that a search knows when to stop and nothing is left
behind by a removal.

Keys mostly come in chain order, and the blocks of a chain mostly lie side by side. So a search
looks for the first key, follows the chain as long as its next block is the next slot, and compares
the keys there; only what is left over is hashed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvhearth.keys import PackedKeys
from kvhearth.model import I64, U32, Bools
from kvhearth_server.core.buckets import Buckets, Hashes, Same, hash_one, hash_words, multipliers
from kvhearth_server.core.table import Pick

_U64 = npt.NDArray[np.uint64]
_WORD_BYTES = 8
_FEW = 4
"""So many keys cost less one by one."""
_RUN_MIN = 64
"""Keys found side by side that make it worth to look for another run behind them."""


class Index:
    """Which block has which head slot.

    Args:
        slot_count: slots are numbered below this.
        seed: of the hash; a secret one where keys come from strangers.
        after: for each slot the head that continues it, plus one, or 0; shape (slot_count,). A
            bound head is continued by bound heads of its namespace and group. None: nothing is
            known of chains.
    """

    def __init__(self, slot_count: int, seed: int = 0, after: U32 | None = None) -> None:
        self._by = multipliers(seed)
        self._by_numbers = self._by.tolist()
        self._tables: dict[tuple[int, int], Buckets] = {}
        self._key_bytes = np.zeros(slot_count, np.uint8)
        self._sizes = self._key_bytes.data
        # By words of a key; most daemons see one width. Rows that no slot used take no memory.
        self._rows: dict[int, _U64] = {}
        # The same as bytes, by bytes of a row: for one key numpy costs more than the search.
        self._blobs: dict[int, memoryview] = {}
        self._after = after

    def __len__(self) -> int:
        return sum(map(len, self._tables.values()))

    def find(self, namespace: int, group: int, keys: Sequence[bytes]) -> I64:
        """Head slots of keys, shape (n,); -1 where there is none. Keys are of one length."""
        table = self._tables.get((namespace, group))
        if table is None or not keys or len(keys[0]) != table.key_bytes:
            return np.full(len(keys), -1, np.int64)
        if len(keys) <= _FEW:
            return np.array([self._find_one(table, key) for key in keys], np.int64)
        return self._find_runs(table, _words(keys))

    def find_rows(self, namespace: int, group: int, keys: Sequence[bytes]) -> Pick | None:
        """As ``find``, of at least one key, for those who want all or nothing: None if the first
        key or the last is not bound.

        A slice if the keys stand side by side from the first one's slot on. The caller must see
        that all of those slots hold blocks of this namespace and group: a slot keeps its last
        block's key.
        """
        table = self._tables.get((namespace, group))
        first = keys[0]
        if table is None or len(first) != table.key_bytes:
            return None
        head = self._find_one(table, first)
        if head < 0:
            return None
        rows = slice(head, head + len(keys))
        if self._rows[_width(table.key_bytes)][rows].tobytes() == _packed(keys):
            return rows
        if len(last := keys[-1]) == len(first) and self._find_one(table, last) < 0:
            return None
        return self.find(namespace, group, keys)

    def find_one(self, namespace: int, group: int, key: bytes) -> int:
        """As ``find``, of one key."""
        table = self._tables.get((namespace, group))
        if table is None or len(key) != table.key_bytes:
            return -1
        return self._find_one(table, key)

    def _find_one(self, table: Buckets, key: bytes) -> int:
        padded = _padded(key) if len(key) % _WORD_BYTES else key
        like = table.like(hash_one(padded, self._by_numbers))
        return _among(like, self._blobs[len(padded)], padded) if like else -1

    def _find_runs(self, table: Buckets, words: _U64) -> I64:
        """Heads of keys; those of a chain whose blocks lie side by side are not hashed."""
        parts, done = list[I64](), 0
        while done < len(words):
            run = self._run(table, words[done:])
            if run is not None:
                parts.append(run)
                done += len(run)
            if run is None or len(run) < _RUN_MIN:
                if done < len(words):
                    rest = words[done:]
                    parts.append(table.find(hash_words(rest, self._by), self._asked(rest)))
                break
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _run(self, table: Buckets, words: _U64) -> I64 | None:
        """Heads of the first keys, as far as they follow each other in a chain and in memory; None
        if the first is not bound, or nothing is known of chains.
        """
        if self._after is None:
            return None
        head = self._find_one(table, words[0].tobytes()[: table.key_bytes])
        if head < 0:
            return None
        # The slots of a block lie side by side too, so heads are as far apart as it has shards.
        step = max(self._after.item(head) - 1 - head, 1)
        links = self._after[head : head + step * (len(words) - 1) : step]
        heads = np.arange(head, head + step * (len(links) + 1), step)
        follows = links == heads[1:] + 1
        length = len(heads)
        if np.count_nonzero(follows) < len(follows):
            length = int(follows.argmin()) + 1
        rows = self._rows[words.shape[1]][head : head + step * length : step]
        if rows.tobytes() != words[:length].tobytes():
            length = int((rows == words[:length]).all(axis=1).argmin())
        return heads[:length]

    def bind(self, namespace: int, group: int, keys: Sequence[bytes], heads: I64) -> None:
        """Bind distinct keys of one length, none of them bound, to heads."""
        if not keys:
            return
        words = _words(keys)
        table = self._table_for(namespace, group, len(keys[0]))
        self._rows[words.shape[1]][heads] = words
        self._key_bytes[heads] = len(keys[0])
        table.add(self._hashes(words), heads)

    def bind_new(self, namespace: int, group: int, key: bytes, head: int) -> bool:
        """As ``bind``, of one key; False, with nothing changed, if it is bound already."""
        table = self._tables.get((namespace, group))
        if table is None or table.key_bytes != len(key):
            table = self._table_for(namespace, group, len(key))
        padded = _padded(key) if len(key) % _WORD_BYTES else key
        size, value = len(padded), hash_one(padded, self._by_numbers)
        blob, like = self._blobs[size], table.like(value)
        if like and _among(like, blob, padded) >= 0:
            return False
        blob[head * size : (head + 1) * size] = padded
        self._sizes[head] = len(key)
        table.add_one(value, head)
        return True

    def _table_for(self, namespace: int, group: int, key_bytes: int) -> Buckets:
        table = self._tables.get((namespace, group))
        if table is None:
            table = self._tables[namespace, group] = Buckets(key_bytes)
        if table.key_bytes != key_bytes:
            raise ValueError(f"a key of {key_bytes} bytes among keys of {table.key_bytes}")
        width = _width(key_bytes)
        if width not in self._rows:
            rows = self._rows[width] = np.zeros((len(self._key_bytes), width), np.uint64)
            self._blobs[width * _WORD_BYTES] = rows.reshape(-1).view(np.uint8).data
        return table

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


def _among(heads: list[int], blob: memoryview, padded: bytes) -> int:
    """The one of these heads that has the key; -1 if none does."""
    size = len(padded)
    for head in heads:
        if blob[head * size : (head + 1) * size].tobytes() == padded:
            return head
    return -1


def _padded(key: bytes) -> bytes:
    rest = len(key) % _WORD_BYTES
    return key.ljust(len(key) + _WORD_BYTES - rest, b"\0") if rest else key


def _packed(keys: Sequence[bytes]) -> bytes:
    """Keys as ``_words`` has them, in one piece."""
    if isinstance(keys, PackedKeys) and not keys.key_bytes % _WORD_BYTES:
        return keys.blob
    return _words(keys).tobytes()


def _words(keys: Sequence[bytes]) -> _U64:
    """Keys as rows of words, shape (n, words), padded with zeros."""
    size = len(keys[0])
    blob = keys.blob if isinstance(keys, PackedKeys) else b"".join(keys)
    if len(blob) != len(keys) * size:
        raise ValueError("keys of different lengths in one call")
    if not size % _WORD_BYTES:
        return np.frombuffer(blob, np.uint64).reshape(len(keys), -1)
    padded = np.zeros((len(keys), _width(size) * _WORD_BYTES), np.uint8)
    padded[:, :size] = np.frombuffer(blob, np.uint8).reshape(len(keys), size)
    return padded.view(np.uint64)

"""Index of blocks: maps keys to head slots in arrays, and links the blocks of a chain.

Thousands of keys cost a few numpy calls, and no block costs a Python object.

A key's bytes stand in a row per slot, beside the number of its space: the namespace and KV group
that it is bound in. One hash table of buckets finds the slots of all spaces. A bucket is a cache
line of eight cells; a cell is 32 bits of the hash of space and key above the slot's number + 1, and
0 is empty. A key that finds its bucket full goes to the next one. Each bucket counts the keys that
passed it, so that a search knows when to stop and a removal leaves nothing behind.

Keys mostly come in chain order, and the blocks of a chain mostly lie side by side. Therefore a
search looks for the first key, follows the chain while its next block is the next slot, and
compares the keys there; only the remaining keys are hashed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvhearth.model import I64, U32, Bools, PackedKeys
from kvhearth_server.core.hash_table import Buckets, Hashes, Same, hash_one, hash_words, multipliers
from kvhearth_server.core.slot_table import Pick, SlotTable

_U64 = npt.NDArray[np.uint64]
_WORD_BYTES = 8
_FEW = 4
"""Number of keys up to which handling them one by one is cheaper."""
_RUN_MIN = 64
"""Length of a run from which it pays to look for another run behind it."""


@dataclass(slots=True)
class _Space:
    """The bound keys of a namespace and KV group.

    ``number`` stands in the row of each of their slots; ``start`` is the start value of their
    hashes.
    """

    number: int
    start: int
    key_bytes: int
    count: int = 0


class Index:
    """Maps keys to head slots.

    Args:
        slot_count: slots are numbered below this.
        seed: seed of the hash; a secret one where keys come from strangers.
        after: for each slot the head that continues it, plus one, or 0; shape (slot_count,). A
            bound head is continued by bound heads of its namespace and group. None: chains are
            unknown.
    """

    def __init__(self, slot_count: int, seed: int = 0, after: U32 | None = None) -> None:
        self._by = multipliers(seed)
        self._by_numbers = self._by.tolist()
        self._table = Buckets(slot_count)
        self._spaces: dict[tuple[int, int], _Space] = {}
        self._space = np.zeros(slot_count, np.uint32)
        """Number of the space that each slot is bound in; 0 is none."""
        self._space_places = self._space.data
        # Keyed by the words of a key; most daemons see one width. Rows that no slot used take no
        # memory.
        self._rows: dict[int, _U64] = {}
        # The same memory as bytes, keyed by the bytes of a row: for one key numpy costs more than
        # the search.
        self._blobs: dict[int, memoryview] = {}
        self._after = after

    def __len__(self) -> int:
        return len(self._table)

    @property
    def moved(self) -> int:
        """Keys that growth has moved so far; binding n keys moves not many more than n."""
        return self._table.moved

    @property
    def growing(self) -> bool:
        """Whether the table is growing: part of it is split, the rest is not yet."""
        return self._table.growing

    def find(self, namespace: int, group: int, keys: Sequence[bytes]) -> I64:
        """Head slots of keys, shape (n,); -1 where there is none. Keys have one length."""
        space = self._spaces.get((namespace, group))
        if space is None or not keys or len(keys[0]) != space.key_bytes:
            return np.full(len(keys), -1, np.int64)
        if len(keys) <= _FEW:
            return np.array([self._find_one(space, key) for key in keys], np.int64)
        return self._find_runs(space, _words(keys))

    def find_rows(self, namespace: int, group: int, keys: Sequence[bytes]) -> Pick | None:
        """Heads of one or more keys; None if the first or the last key is not bound.

        Returns a slice if the keys stand side by side from the first one's slot on. The caller must
        check that all of those slots hold blocks of this namespace and group: a slot keeps its last
        block's key. For callers that need all keys or none.
        """
        space = self._spaces.get((namespace, group))
        first = keys[0]
        if space is None or len(first) != space.key_bytes:
            return None
        head = self._find_one(space, first)
        if head < 0:
            return None
        rows = slice(head, head + len(keys))
        if self._rows[_width(space.key_bytes)][rows].tobytes() == _packed(keys):
            return rows
        if len(last := keys[-1]) == len(first) and self._find_one(space, last) < 0:
            return None
        return self.find(namespace, group, keys)

    def find_one(self, namespace: int, group: int, key: bytes) -> int:
        """Head slot of one key, or -1."""
        space = self._spaces.get((namespace, group))
        if space is None or len(key) != space.key_bytes:
            return -1
        return self._find_one(space, key)

    def _find_one(self, space: _Space, key: bytes) -> int:
        padded = _padded(key) if len(key) % _WORD_BYTES else key
        like = self._table.like(hash_one(padded, self._by_numbers, space.start))
        return self._among(like, space, padded) if like else -1

    def _among(self, heads: list[int], space: _Space, padded: bytes) -> int:
        """The one of these heads that has the key in the space; -1 if none does."""
        size = len(padded)
        blob, spaces, number = self._blobs[size], self._space_places, space.number
        for head in heads:
            if spaces[head] == number and blob[head * size : (head + 1) * size] == padded:
                return head
        return -1

    def _find_runs(self, space: _Space, words: _U64) -> I64:
        """Heads of keys; those of a chain whose blocks lie side by side are not hashed."""
        parts, done = list[I64](), 0
        while done < len(words):
            run = self._run(space, words[done:])
            if run is not None:
                parts.append(run)
                done += len(run)
            if run is None or len(run) < _RUN_MIN:
                if done < len(words):
                    rest = words[done:]
                    hashes = hash_words(rest, self._by, space.start)
                    parts.append(self._table.find(hashes, self._asked(space, rest)))
                break
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _run(self, space: _Space, words: _U64) -> I64 | None:
        """Heads of the first keys, as far as they follow each other in a chain and in memory.

        None if the first key is not bound, or chains are unknown.
        """
        if self._after is None:
            return None
        head = self._find_one(space, words[0].tobytes()[: space.key_bytes])
        if head < 0:
            return None
        # The slots of a block lie side by side too, so the distance of heads is the number of
        # shards.
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
        space = self._space_for(namespace, group, len(keys[0]))
        self._rows[words.shape[1]][heads] = words
        self._space[heads] = space.number
        space.count += len(keys)
        self._table.add(self._hashes(space, words), heads)

    def bind_new(self, namespace: int, group: int, key: bytes, head: int) -> bool:
        """Bind one key; False, with nothing changed, if it is bound already."""
        space = self._spaces.get((namespace, group))
        if space is None or space.key_bytes != len(key):
            space = self._space_for(namespace, group, len(key))
        padded = _padded(key) if len(key) % _WORD_BYTES else key
        size, value = len(padded), hash_one(padded, self._by_numbers, space.start)
        like = self._table.like(value)
        if like and self._among(like, space, padded) >= 0:
            return False
        self._blobs[size][head * size : (head + 1) * size] = padded
        self._space_places[head] = space.number
        space.count += 1
        self._table.add_one(value, head)
        return True

    def _space_for(self, namespace: int, group: int, key_bytes: int) -> _Space:
        space = self._spaces.get((namespace, group))
        if space is None:
            number = (namespace << 8 | group) + 1
            # Without it, a key in many spaces would have as many blocks in one bucket.
            start = hash_one(number.to_bytes(8, "little"), self._by_numbers)
            space = self._spaces[namespace, group] = _Space(number, start, key_bytes)
        if space.key_bytes != key_bytes:
            raise ValueError(f"a key of {key_bytes} bytes among keys of {space.key_bytes}")
        width = _width(key_bytes)
        if width not in self._rows:
            rows = self._rows[width] = np.zeros((len(self._space), width), np.uint64)
            self._blobs[width * _WORD_BYTES] = rows.reshape(-1).view(np.uint8).data
        return space

    def key(self, head: int) -> bytes:
        """The key of a bound head."""
        (key,) = self.keys(np.array([head], np.int64))
        return key

    def keys(self, heads: I64) -> list[bytes]:
        """The keys of bound heads of one group."""
        if not len(heads):
            return []
        numbers = self._space[heads]
        number = int(numbers[0])
        if not number or not (numbers == number).all():
            raise ValueError(f"a slot of {heads[:8].tolist()} is bound to no key of this group")
        size = self._spaces[divmod(number - 1, 256)].key_bytes
        rows = self._rows[_width(size)][heads].view(np.uint8).reshape(len(heads), -1)
        blob = np.ascontiguousarray(rows[:, :size]).tobytes()
        return [blob[at : at + size] for at in range(0, len(blob), size)]

    def unbind(self, namespace: int, group: int, heads: I64) -> list[bytes]:
        """Forget bound heads of one group; returns their keys."""
        if not len(heads):
            return []
        keys = self.keys(heads)
        space = self._spaces[namespace, group]
        words = self._rows[_width(space.key_bytes)][heads]
        self._table.remove(self._hashes(space, words), heads)
        self._space[heads] = 0
        space.count -= len(heads)
        if not space.count:
            del self._spaces[namespace, group]
        return keys

    def spaces(self) -> Iterator[tuple[int, int, I64]]:
        """Yield (namespace, group, bound heads in ascending order) for each space."""
        heads = np.sort(self._table.heads())
        numbers = self._space[heads]
        for (namespace, group), space in self._spaces.items():
            yield namespace, group, heads[numbers == space.number]

    def items(self) -> Iterator[tuple[int, int, dict[bytes, int]]]:
        """Yield (namespace, group, head by key) for each space: for tests and small cores."""
        for namespace, group, heads in self.spaces():
            yield namespace, group, dict(zip(self.keys(heads), heads.tolist(), strict=True))

    def check(self) -> None:
        """Raise ValueError unless every bound slot, and nothing else, is found by its key."""
        self._table.check()
        bound = 0
        for namespace, group, heads in self.spaces():
            space = self._spaces[namespace, group]
            bound += len(heads)
            if len(heads) != space.count:
                counts = f"{len(heads)} slots, {space.count} counted"
                raise ValueError(f"namespace {namespace}, group {group}: {counts}")
            words = self._rows[_width(space.key_bytes)][heads]
            found = self._table.find(self._hashes(space, words), self._asked(space, words))
            if (found != heads).any():
                raise ValueError(f"namespace {namespace}, group {group}: a slot is not found")
        slots = int(np.count_nonzero(self._space))
        if not slots == bound == len(self._table):
            raise ValueError(f"{bound} slots in the index, {slots} with a key")

    def _asked(self, space: _Space, words: _U64) -> Same:
        """Make a test whether slots have the keys requested in a space."""
        rows, spaces = self._rows[words.shape[1]], self._space
        alone = len(self._spaces) == 1

        def same(some: I64, heads: I64) -> Bools:
            equal: Bools = (rows[heads] == words[some]).all(axis=1)
            if not alone:
                equal &= spaces[heads] == space.number
            return equal

        return same

    def _hashes(self, space: _Space, words: _U64) -> Hashes:
        if len(words) <= _FEW:
            by, start = self._by_numbers, space.start
            return np.array([hash_one(row.tobytes(), by, start) for row in words], np.uint64)
        return hash_words(words, self._by, space.start)


def _width(key_bytes: int) -> int:
    return -(-key_bytes // _WORD_BYTES)


def _padded(key: bytes) -> bytes:
    rest = len(key) % _WORD_BYTES
    return key.ljust(len(key) + _WORD_BYTES - rest, b"\0") if rest else key


def _packed(keys: Sequence[bytes]) -> bytes:
    """Keys in the form of ``_words``, as one bytes object."""
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


class Chains:
    """A forest over the heads of one namespace and group; four u32 links per slot.

    Eviction takes a chain from its end, because a prefix is usable up to its first hole. Without
    links, a chain that grew over many commits is oldest, and therefore coldest, at its root.
    """

    def __init__(self, table: SlotTable) -> None:
        self._parent = table.parent.data
        self._child = table.child.data
        self._older = table.older.data
        self._younger = table.younger.data
        self._table = table
        self.cuts = 0
        """Number of heads unlinked so far; a remembered place in a chain is stale once it moves."""

    def link_run(self, heads: I64) -> None:
        """Link fresh heads that follow each other, each as the only child of the one before it."""
        table = self._table
        links = heads.astype(np.uint32) + np.uint32(1)
        table.parent[heads[1:]] = links[:-1]
        table.child[heads[:-1]] = links[1:]

    def link_many(self, heads: I64, parents: I64) -> None:
        """Link fresh heads, oldest first, to parents (-1: none) that have no children yet."""
        known = parents >= 0
        order = np.argsort(parents[known], kind="stable")
        child, parent = heads[known][order], parents[known][order]
        links = child.astype(np.uint32) + np.uint32(1)
        table = self._table
        table.parent[child] = parent + 1
        same = parent[1:] == parent[:-1]
        table.older[child[1:][same]] = links[:-1][same]
        table.younger[child[:-1][same]] = links[1:][same]
        last = np.append(~same, True)[: len(child)]
        table.child[parent[last]] = links[last]

    def link(self, parent: int, head: int) -> None:
        """Make a fresh head the youngest child of ``parent``."""
        elder = self._child[parent]
        self._parent[head] = parent + 1
        self._older[head] = elder
        if elder:
            self._younger[elder - 1] = head + 1
        self._child[parent] = head + 1

    def unlink(self, head: int) -> None:
        """Take a head out; its children become roots."""
        self.cuts += 1
        self._leave_siblings(head)
        self._make_roots(self._child[head])
        self._parent[head] = self._child[head] = self._older[head] = self._younger[head] = 0

    def unlink_many(self, heads: I64) -> None:
        """Unlink distinct heads; see ``unlink``."""
        table = self._table
        self.cuts += len(heads)
        # All children become roots, one child of each head per round.
        links = table.child[heads]
        while len(links := links[links > 0]) > _FEW:
            children = _slots(links)
            links = table.older[children]
            table.parent[children] = table.older[children] = table.younger[children] = 0
        for link in links.tolist():
            self._make_roots(link)
        left = heads[table.parent[heads] > 0]
        siblings = (table.older[left] > 0) | (table.younger[left] > 0)
        table.child[_slots(table.parent[left[~siblings]])] = 0
        for head in left[siblings].tolist():
            self._leave_siblings(head)
        for column in (table.parent, table.child, table.older, table.younger):
            column[heads] = 0

    def _make_roots(self, link: int) -> None:
        while link:
            child = link - 1
            link = self._older[child]
            self._parent[child] = self._older[child] = self._younger[child] = 0

    def _leave_siblings(self, head: int) -> None:
        parent, older, younger = self._parent[head], self._older[head], self._younger[head]
        if older:
            self._younger[older - 1] = younger
        if younger:
            self._older[younger - 1] = older
        elif parent:
            self._child[parent - 1] = older

    def leaf(self, head: int) -> int:
        """Follow the youngest children from ``head`` to the end of the line."""
        while link := self._child[head]:
            head = link - 1
        return head

    def parent_of(self, head: int) -> int:
        """The parent's head, or -1."""
        return self._parent[head] - 1

    def is_leaf(self, head: int) -> bool:
        """Whether no resident block continues this one."""
        return not self._child[head]

    def check(self, heads: I64) -> None:
        """Raise ValueError unless links agree in both directions and join only these heads."""
        self.check_links(heads, lambda slots: np.isin(slots, heads))
        self.check_siblings(heads)

    def check_links(self, heads: I64, bound: Callable[[I64], Bools]) -> None:
        """Raise ValueError unless the links of some heads agree with their counterparts.

        ``bound`` tells which slots are heads that are bound to keys. Array work, O(n).
        """
        table = self._table
        parent, child = table.parent[heads], table.child[heads]
        older, younger = table.older[heads], table.younger[heads]
        wrong = (parent == 0) & ((older > 0) | (younger > 0))
        _none(heads[wrong], "has siblings but no parent")
        for links, what in ((parent, "parent"), (child, "child"), (older, "older sibling")):
            there = links > 0
            dangling = ~bound(_slots(links[there]))
            _none(heads[there][dangling], f"has a {what} that is bound to no key")
        last = (parent > 0) & (younger == 0)
        wrong = table.child[_slots(parent[last])] != heads[last] + 1
        _none(heads[last][wrong], "is a youngest child that its parent does not name")
        there = child > 0
        children = _slots(child[there])
        wrong = (table.parent[children] != heads[there] + 1) | (table.younger[children] > 0)
        _none(heads[there][wrong], "names a youngest child that says otherwise")
        for links, column, what in (
            (older, table.younger, "older"),
            (younger, table.older, "younger"),
        ):
            there = links > 0
            others = _slots(links[there])
            wrong = (column[others] != heads[there] + 1) | (table.parent[others] != parent[there])
            _none(heads[there][wrong], f"names an {what} sibling that says otherwise")

    def check_siblings(self, heads: I64) -> None:
        """Raise ValueError if siblings among all heads of an arena form a ring.

        Requires heads whose links agree. Uses pointer doubling over the heads that have a younger
        sibling: the number of steps is the logarithm of the largest number of children.
        """
        followers = np.sort(heads[self._table.younger[heads] > 0])
        count = len(followers)
        if not count:
            return
        younger = _slots(self._table.younger[followers])
        place = np.minimum(np.searchsorted(followers, younger), count - 1)
        # The last entry stands for a youngest child, and leads to itself.
        after = np.append(np.where(followers[place] == younger, place, count), count)
        for _ in range(count.bit_length()):
            after = after[after]
            if (after == count).all():
                return
        _none(followers[after[:-1] != count], "is in a ring of siblings")


def _slots(links: U32) -> I64:
    return links.astype(np.int64) - 1


def _none(slots: I64, what: str) -> None:
    if len(slots):
        raise ValueError(f"slot {slots[0]} {what}, and {len(slots) - 1} more")

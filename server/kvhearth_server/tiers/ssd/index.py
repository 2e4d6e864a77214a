"""Index of the log: maps keys to places by (namespace, group), with each segment's rows in arrays.

A segment's rows live and die with it, so nothing is ever compacted. A block consists of its shards'
rows, one after another; its entry is the number of the first: segment * 2**32 + row. The key is the
only Python object of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, repeat

import numpy as np
import numpy.ma  # np.unique would load it at its first call, on the loop

from kvhearth.model import CHECKSUM_BYTES, I64, Bools, Records
from kvhearth_server.tiers.base import BlockSpec, Evicted
from kvhearth_server.tiers.ssd.format import PAGE_BYTES

_PARTS = 256
"""Parts of a ``KeyMap``. A dict of 90,000 keys takes 5 ms to grow; each part reaches that size at
16 million keys in all.
"""
_NUMBERS = 1 << 12
_SHIFT = 51
"""A dict uses the lowest bits of a hash, so the part is chosen by the highest ones."""
_PLACES = 256
"""Places of a part in a list of all keys."""


class KeyMap:
    """A dict of keys to entries, which are numbers from 0 on."""

    def __init__(self) -> None:
        self._parts: list[dict[bytes, int]] = [{} for _ in range(_PARTS)]
        self._by_number = np.empty(_NUMBERS, np.object_)
        # Each part gets slightly more keys than the one before it, and the last one twice as many
        # as the first: parts of equal size would all grow at the same time.
        shares = np.log2(1 + np.arange(_NUMBERS) / _NUMBERS) * _PARTS
        self._by_number[:] = [self._parts[part] for part in shares.astype(int).tolist()]

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __getitem__(self, key: bytes) -> int:
        return self._part(key)[key]

    def items(self) -> Iterator[tuple[bytes, int]]:
        """Return keys and their entries, in no order."""
        return chain.from_iterable(part.items() for part in self._parts)

    def find(self, keys: Sequence[bytes]) -> I64:
        """Return entries, shape (n,); -1 for absent keys."""
        found = map(dict.get, self._homes(keys), keys, repeat(-1))
        return np.fromiter(found, np.int64, len(keys))

    def add(self, keys: Sequence[bytes], entries: range) -> bool:
        """Set the entries of keys; false, with nothing done, if one is present or named twice."""
        numbers = np.arange(entries.start, entries.stop, entries.step)
        found = map(dict.setdefault, self._homes(keys), keys, entries)
        new = np.fromiter(found, np.int64, len(keys)) == numbers
        if new.all():
            return True
        for row in np.flatnonzero(new).tolist():
            self.pop(keys[row])
        return False

    def put(self, keys: Sequence[bytes], entries: range) -> None:
        """Set the entries of keys. The last entry counts for a key that is named twice."""
        for home, key, entry in zip(self._homes(keys), keys, entries, strict=True):
            home[key] = entry

    def pop(self, key: bytes) -> int:
        """Forget a key. Return its entry, or -1 if it was absent."""
        return self._part(key).pop(key, -1)

    def take(self, count: int) -> list[tuple[bytes, int]]:
        """Forget up to ``count`` keys, the cheapest to find. Return them with their entries."""
        taken: list[tuple[bytes, int]] = []
        for part in self._parts:
            while part and len(taken) < count:
                taken.append(part.popitem())
        return taken

    def list_parts(self, place: int, count: int) -> tuple[list[bytes], int]:
        """List the keys of as many places as have ``count`` keys, but of one at least; return them
        with the next place, -1 after the last one. A key never changes its place.
        """
        keys = list[bytes]()
        while place < _PARTS * _PLACES:
            number, first = divmod(place, _PLACES)
            part = self._parts[number]
            if not first and len(keys) + len(part) <= count:
                keys += part
                place += _PLACES
                continue
            if keys:
                break
            places: list[list[bytes]] = [[] for _ in range(_PLACES)]
            for key in part:
                places[hash(key) % _PLACES].append(key)
            for some in places[first:]:
                if keys and len(keys) + len(some) > count:
                    break
                keys += some
                place += 1
        return keys, -1 if place >= _PARTS * _PLACES else place

    def _homes(self, keys: Sequence[bytes]) -> list[dict[bytes, int]]:
        """Return the dict of each key; no line of Python runs for each of a restart's millions."""
        numbers = np.fromiter(map(hash, keys), np.int64, len(keys)) >> _SHIFT & _NUMBERS - 1
        homes: list[dict[bytes, int]] = self._by_number[numbers].tolist()
        return homes

    def _part(self, key: bytes) -> dict[bytes, int]:
        part: dict[bytes, int] = self._by_number[hash(key) >> _SHIFT & _NUMBERS - 1]
        return part


ROW_DTYPE = np.dtype(
    [
        ("sequence", "<u8"),
        ("parent", "<u8"),
        ("checksum", f"V{CHECKSUM_BYTES}"),
        ("position", "<u4"),
        ("length", "<u4"),
        ("family", "<u4"),
        ("epoch", "<u4"),
        ("shard", "<u2"),
        ("shards", "<u2"),
        ("live", "u1"),
        ("hits", "u1"),
        ("version", "<u2"),
    ]
)
"""One record in memory. ``family`` is the namespace's number in this index * 256 + group; ``hits``
counts loads up to 255.
"""

Keys = np.ndarray[tuple[int], np.dtype[np.object_]]
"""Array of keys; each is ``bytes`` or None."""

NAMESPACES_MAX = 1 << 16
SEGMENT_ENTRIES = 1 << 32
"""Number of entries reserved for each segment."""

_ROWS_FIRST = 64

_RECORD_FIELDS = ("version", "position", "length", "epoch", "sequence", "checksum")
"""Fields that a row has as the record's header has them."""


def disk_pages(heads: Records) -> I64:
    """Return the pages that blocks take on the disk, by their first rows."""
    pages = 1 + -(-heads["length"].astype(np.int64) // PAGE_BYTES)
    return np.asarray(pages * heads["shards"], np.int64)


def rows_of(records: Records) -> Records:
    """Convert record headers to rows of the index, same shape."""
    rows = np.zeros(records.shape, ROW_DTYPE)
    for name in _RECORD_FIELDS:
        rows[name] = records[name]
    rows["parent"] = records["parent_sequence"]
    return rows


class SegmentRows:
    """Rows of one segment, and the keys of the live blocks that begin at them.

    Attributes:
        live_blocks, live_bytes: bound blocks, and bytes of their payload.
        hot_pages: pages on the disk of the live blocks that were loaded since they were written.
    """

    def __init__(self) -> None:
        self._count = 0
        self._rows = np.zeros(_ROWS_FIRST, ROW_DTYPE)
        # Not a list: the garbage collector would visit all keys, and the loop would wait.
        self._keys: Keys = np.full(_ROWS_FIRST, None, np.object_)
        self.live_blocks = 0
        self.live_bytes = 0
        self.hot_pages = 0

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> Records:
        """All rows, including dead ones; a view."""
        return self._rows[: self._count]

    @property
    def keys(self) -> Keys:
        """Keys by row: the key of the live block that begins there, else None; a view."""
        return self._keys[: self._count]

    def make_room(self, size: int) -> None:
        """Grow the arrays to at least ``size`` rows."""
        size = max(size, len(self._rows))
        old_rows, self._rows = self.rows, np.zeros(size, ROW_DTYPE)
        old_keys, self._keys = self.keys, np.full(size, None, np.object_)
        self._rows[: len(self)], self._keys[: len(self)] = old_rows, old_keys

    def append(self, rows: Records, keys: Sequence[bytes]) -> int:
        """Add the rows (n, shards) of n blocks. Return the number of the first row."""
        count, shards = rows.shape
        first, need = self._count, self._count + count * shards
        if need > len(self._rows):
            self.make_room(max(need, 2 * len(self._rows)))
        self._rows[first:need] = rows.reshape(-1)
        self._keys[first:need:shards] = keys
        self._count = need
        return first

    def live_heads(self, start: int = 0, end: int | None = None) -> I64:
        """Return the rows from ``start`` to ``end`` at which live blocks begin."""
        rows = self.rows[start:end]
        return start + np.flatnonzero((rows["live"] > 0) & (rows["shard"] == 0))

    def bury(self, heads: I64) -> None:
        """Mark the blocks that begin at ``heads`` as dead."""
        shards = self.rows["shards"][heads].astype(np.int64)
        ends = np.cumsum(shards)
        every = np.repeat(heads - (ends - shards), shards) + np.arange(shards.sum())
        self.rows["live"][every] = 0
        self.live_blocks -= len(heads)
        self.live_bytes -= int(self.rows["length"][every].sum(dtype=np.int64))
        self.hot_pages -= self._hot(heads)

    def bury_one(self, head: int) -> None:
        """Mark one block as dead and drop its key, without most of numpy's cost of ``bury``."""
        span = slice(head, head + int(self.rows["shards"][head]))
        self.rows["live"][span] = 0
        self.keys[head] = None
        self.live_blocks -= 1
        self.live_bytes -= int(self.rows["length"][span].sum(dtype=np.int64))
        if self.rows["hits"][head]:
            self.hot_pages -= int(disk_pages(self.rows[head : head + 1])[0])

    def used(self, heads: I64) -> None:
        """Count a use of each live block; a block that is listed twice counts once."""
        hits = self.rows["hits"]
        before = hits[heads]
        hits[heads] = before + (before < 255)
        if not before.all():
            self.hot_pages += self._hot(np.unique(heads[before == 0]))

    def _hot(self, heads: I64) -> int:
        rows = self.rows[heads]
        return int(disk_pages(rows[rows["hits"] > 0]).sum())


class SsdIndex:
    """Places of all live blocks."""

    def __init__(self) -> None:
        self._maps: dict[tuple[int, int], KeyMap] = {}
        self._numbers: dict[bytes, int] = {}
        self._namespaces: list[bytes] = []
        self.segments: dict[int, SegmentRows] = {}

    def __len__(self) -> int:
        return sum(map(len, self._maps.values()))

    @property
    def live_bytes(self) -> int:
        """Payload bytes of all live blocks."""
        return sum(each.live_bytes for each in self.segments.values())

    def number_of(self, namespace: bytes) -> int:
        """Return the namespace's number here, assigned at first use; -1 if there are too many."""
        number = self._numbers.get(namespace, -1)
        if number < 0 and len(self._namespaces) < NAMESPACES_MAX:
            number = self._numbers[namespace] = len(self._namespaces)
            self._namespaces.append(namespace)
        return number

    def find(self, namespace: bytes, group: int, keys: Sequence[bytes]) -> I64:
        """Return the entries of keys, shape (n,); -1 for absent keys."""
        found = self._maps.get((self._numbers.get(namespace, -1), group))
        return np.full(len(keys), -1, np.int64) if found is None else found.find(keys)

    def list_keys(
        self, namespace: bytes, group: int, place: int, count: int
    ) -> tuple[list[bytes], int]:
        """List the keys of a namespace's group from a place on; see ``Tier.list_keys``."""
        found = self._maps.get((self._numbers.get(namespace, -1), group))
        return ([], -1) if found is None else found.list_parts(place, count)

    def rows(self, entries: I64, shards: int = 1) -> Records:
        """Return a copy of existing entries' rows (n, shards). Each block must have ``shards``."""
        numbers, firsts = np.divmod(entries, SEGMENT_ENTRIES)
        wanted = firsts[:, None] + np.arange(shards)
        one = _only(numbers)
        if one is not None:
            found: Records = self.segments[one].rows[wanted]
            return found
        out = np.zeros((len(entries), shards), ROW_DTYPE)
        for number in np.unique(numbers).tolist():
            mine = numbers == number
            out[mine] = self.segments[number].rows[wanted[mine]]
        return out

    def heads(self, entries: I64) -> Records:
        """Return the first rows of entries as a copy, shape (n,); rows of -1 are zero."""
        out = np.zeros(len(entries), ROW_DTYPE)
        there = entries >= 0
        if there.any():
            out[there] = self.rows(entries[there])[:, 0]
        return out

    def present(self, family: BlockSpec, keys: Sequence[bytes]) -> tuple[Bools, I64]:
        """Return which blocks of a family are present, (n,), with the right epoch, length and shard
        count; and the entries of all keys.
        """
        entries = self.find(family.namespace, family.group, keys)
        good = entries >= 0
        if good.any():
            heads = self.heads(entries)
            good &= (heads["epoch"] == family.epoch) & (heads["length"] == family.length)
            good &= heads["shards"] == family.shards
        return good, entries

    def used(self, entries: I64) -> None:
        """Count a use of each entry; an entry that is listed twice counts once."""
        numbers, rows = np.divmod(entries, SEGMENT_ENTRIES)
        one = _only(numbers)
        for number in np.unique(numbers).tolist() if one is None else [one]:
            mine = rows if one is not None else rows[numbers == number]
            self.segments[number].used(mine)

    def bind(
        self, namespace: bytes, group: int, keys: list[bytes], segment: int, rows: Records
    ) -> None:
        """Bind blocks that ``segment`` now holds. Blocks that their keys were bound to are dead.

        Args:
            rows: (n, shards); ``family``, ``shard``, ``shards`` and ``live`` are set here.

        Raises:
            ValueError: ``number_of`` gave the namespace no number.
        """
        if self.bind_new(namespace, group, keys, segment, rows):
            return
        self.unbind(namespace, group, keys)
        found = self._maps[self._numbers[namespace], group]
        count, before = len(keys), len(found)
        found.put(keys, self._entries(segment, rows))
        first = self._append(namespace, group, keys, segment, rows)
        # If one call names a key twice, the later row holds it.
        if len(found) - before < count:
            self._bury_losers(found, self.segments[segment], segment, first)

    def bind_new(
        self, namespace: bytes, group: int, keys: list[bytes], segment: int, rows: Records
    ) -> bool:
        """Bind blocks; return false, with nothing done, if a key is bound or named twice."""
        number = self.number_of(namespace)
        if number < 0:
            raise ValueError("a namespace without a number")
        found = self._maps.get((number, group))
        if found is None:
            found = self._maps[number, group] = KeyMap()
        if not found.add(keys, self._entries(segment, rows)):
            return False
        self._append(namespace, group, keys, segment, rows)
        return True

    def expect(self, segment: int, rows: int) -> None:
        """Reserve room for the rows of a segment about to be bound: repeated growth takes time."""
        self.segments.setdefault(segment, SegmentRows()).make_room(rows)

    def _entries(self, segment: int, rows: Records) -> range:
        """Return the entries of blocks that are appended to a segment next."""
        table = self.segments.get(segment)
        first = segment * SEGMENT_ENTRIES + (0 if table is None else len(table))
        return range(first, first + rows.size, rows.shape[1])

    def _append(
        self, namespace: bytes, group: int, keys: list[bytes], segment: int, rows: Records
    ) -> int:
        """Add the rows of blocks whose keys are bound. Return the number of the first."""
        rows["family"] = self._numbers[namespace] * 256 + group
        rows["shard"], rows["shards"], rows["live"] = np.arange(rows.shape[1]), rows.shape[1], 1
        table = self.segments.setdefault(segment, SegmentRows())
        table.live_blocks += len(rows)
        table.live_bytes += int(rows["length"].sum(dtype=np.int64))
        return table.append(rows, keys)

    def _bury_losers(self, found: KeyMap, table: SegmentRows, segment: int, first: int) -> None:
        for row in table.live_heads().tolist():
            key = table.keys[row]
            if row >= first and key is not None and found[key] != segment * SEGMENT_ENTRIES + row:
                table.bury_one(row)

    def unbind(self, namespace: bytes, group: int, keys: Sequence[bytes]) -> int:
        """Forget keys that are bound. Return how many were."""
        pair = (self._numbers.get(namespace, -1), group)
        found = self._maps.get(pair)
        if found is None:
            return 0
        gone = 0
        for key in keys:
            entry = found.pop(key)
            if entry >= 0:
                number, row = divmod(entry, SEGMENT_ENTRIES)
                self.segments[number].bury_one(row)
                gone += 1
        return gone

    def forget_of(self, namespace: bytes, count: int) -> Evicted | None:
        """Forget and return up to ``count`` blocks of a namespace, all of one KV group, or None."""
        wanted = self._numbers.get(namespace, -1)
        for (number, group), found in self._maps.items():
            if number == wanted and (pairs := found.take(count)):
                for _, entry in pairs:
                    segment, row = divmod(entry, SEGMENT_ENTRIES)
                    self.segments[segment].bury_one(row)
                return Evicted(namespace, group, [key for key, _ in pairs], "asked")
        return None

    def forget_some(self, segment: int, count: int) -> list[Evicted]:
        """Forget and return up to ``count`` blocks of a segment; its rows go with the last."""
        table = self.segments.get(segment)
        if table is None:
            return []
        heads = table.live_heads()[:count]
        gone: dict[int, list[bytes]] = {}
        families = table.rows["family"][heads].tolist()
        for key, family in zip(table.keys[heads].tolist(), families, strict=True):
            if key is not None:
                gone.setdefault(family, []).append(key)
        table.keys[heads] = None
        evicted = []
        for family, keys in gone.items():
            number, group = divmod(family, 256)
            found = self._maps[number, group]
            for key in keys:
                found.pop(key)
            evicted.append(Evicted(self._namespaces[number], group, keys))
        table.bury(heads)
        if not table.live_blocks:
            del self.segments[segment]
        return evicted

    def by_family(self, table: SegmentRows, heads: I64) -> Iterator[tuple[BlockSpec, I64]]:
        """Yield each family of the blocks that begin at ``heads``, and which of these it has."""
        names = table.rows[["family", "epoch", "length", "shards"]][heads]
        # Sorting takes ten times as long, and the blocks are mostly alike.
        for name in names[:1] if (names == names[:1]).all() else np.unique(names):
            family, epoch, length, shards = map(int, name)
            number, group = divmod(family, 256)
            spec = BlockSpec(self._namespaces[number], group, epoch, length, shards)
            yield spec, heads[names == name]

    def check(self) -> None:
        """Raise ValueError unless maps, rows and totals agree."""
        bound = 0
        for (number, group), found in self._maps.items():
            for key, entry in found.items():
                segment, row = divmod(entry, SEGMENT_ENTRIES)
                table = self.segments[segment]
                if table.keys[row] != key or not _live(table, row, number * 256 + group):
                    raise ValueError(f"segment {segment}, row {row}: index and rows disagree")
            bound += len(found)
        for segment, table in self.segments.items():
            rows = table.rows
            first = rows[table.live_heads()]
            heads, hot = len(first), int(disk_pages(first[first["hits"] > 0]).sum())
            size = int(rows["length"][rows["live"] > 0].sum(dtype=np.int64))
            named = sum(key is not None for key in table.keys.tolist())
            totals = (table.live_blocks, table.live_bytes, heads, table.hot_pages)
            if (heads, size, named, hot) != totals:
                raise ValueError(f"segment {segment}: {heads} blocks of {size} bytes are live")
        live = sum(table.live_blocks for table in self.segments.values())
        if live != bound:
            raise ValueError(f"{bound} keys are bound, {live} blocks are live")


def _live(table: SegmentRows, head: int, family: int) -> bool:
    span = table.rows[head : head + int(table.rows["shards"][head])]
    good: Bools = (span["live"] == 1) & (span["family"] == family)
    return bool(good.all()) and len(span) == int(table.rows["shards"][head])


def _only(numbers: I64) -> int | None:
    """Return the number that all elements equal; None if they differ, or if there is none."""
    if len(numbers) and np.count_nonzero(numbers == numbers[0]) == len(numbers):
        return int(numbers[0])
    return None

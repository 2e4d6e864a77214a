"""Scan of an earlier run's journal: complete blocks are adopted, other slots freed or quarantined.

All of it is array work; a million headers take well under a second.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from kvhearth.model import CHECKSUM_BYTES, I64, U8, Bools, Records
from kvhearth_server.core.adoption import AdoptedBlocks, Adoption, DropCause
from kvhearth_server.core.namespaces import Namespaces
from kvhearth_server.core.slot_table import KERNEL, Geometry, State
from kvhearth_server.memory.journal import (
    BOUND_WORDS,
    HEADER_BYTES,
    HEADER_DTYPE,
    MAGIC,
    READERS,
    STATE_WORDS,
    VERSION,
    Journal,
    identity_check,
    owner_check,
    sum_check,
)

_CHUNK_ROWS = 1 << 15
_DENSE_ROWS = 1 << 12
_KEY_AT = HEADER_DTYPE.fields["key"][1]  # type: ignore[index]
_SUM_AT = HEADER_DTYPE.fields["checksum"][1]  # type: ignore[index]
_BUSY = (STATE_WORDS[State.RESERVED], STATE_WORDS[State.LOADING])


class _Columns:
    """Fields of good headers, column by column.

    Adoption is bound by the speed of touching fresh memory, so no header is copied whole and
    nothing is joined afterwards: columns are as long as there are slots, and touched as they fill.
    """

    def __init__(self, capacity: int, key_bytes_max: int) -> None:
        self.count = 0
        self.slot = np.empty(capacity, np.int64)
        self.pair = np.empty(capacity, np.int32)
        self.sequence = np.empty(capacity, np.uint64)
        self.parent_sequence = np.empty(capacity, np.uint64)
        self.shard = np.empty(capacity, np.uint16)
        self.summed = np.empty(capacity, np.bool_)
        self.checksum = np.empty((capacity, CHECKSUM_BYTES), np.uint8)
        self.key = np.empty((capacity, key_bytes_max), np.uint8)

    def add(self, rows: Records, slots: I64) -> None:
        """Keep headers of slots; their keys are cut to the longest that the catalogue allows."""
        span = slice(self.count, self.count + len(rows))
        self.count = span.stop
        self.slot[span] = slots
        self.pair[span] = _pairs(rows)
        self.sequence[span] = rows["sequence"]
        self.parent_sequence[span] = rows["parent_sequence"]
        self.shard[span] = rows["shard"]
        self.summed[span] = rows["state"] == STATE_WORDS[State.SUMMED]
        raw = rows.view(np.uint8).reshape(len(rows), HEADER_BYTES)
        self.checksum[span] = raw[:, _SUM_AT : _SUM_AT + CHECKSUM_BYTES]
        self.key[span] = raw[:, _KEY_AT : _KEY_AT + self.key.shape[1]]


_Rows = I64 | slice
"""Selection of rows of the columns, in order."""


class _Specs:
    """Catalogue data of each (namespace, group) pair, as arrays indexed by pair code."""

    def __init__(self, namespaces: Namespaces, geometry: Geometry) -> None:
        count = 1 + max((space.number for space in namespaces), default=0)
        self.known = np.zeros(count * 256, np.bool_)
        self.epoch = np.zeros(count * 256, np.int64)
        self.length = np.zeros(count * 256, np.int64)
        self.shards = np.zeros(count * 256, np.int64)
        self.key_bytes = np.zeros(count * 256, np.int64)
        self.slot_bytes = np.zeros(count * 256, np.int64)
        self.segment = np.zeros(count * 256, np.int64)
        self.key_bytes_max = max((s.contract.hash_bytes for s in namespaces), default=8)
        segments = {s.tenant: i for i, s in enumerate(geometry.segments)}
        for space in namespaces:
            for kv_group, spec in enumerate(space.contract.groups):
                pair = space.number * 256 + kv_group
                self.known[pair] = space.tenant in segments
                self.segment[pair] = segments.get(space.tenant, -1)
                self.epoch[pair] = space.epoch
                self.length[pair] = spec.page_bytes
                self.shards[pair] = spec.shards
                self.key_bytes[pair] = space.contract.hash_bytes
                self.slot_bytes[pair] = geometry.slot_bytes_for(spec.page_bytes)


def read_journal(journal: Journal, geometry: Geometry, namespaces: Namespaces) -> Adoption:
    """Collect everything that can be adopted from the journal; nothing is changed."""
    found = Adoption()
    specs = _Specs(namespaces, geometry)
    held: dict[int, list[I64]] = defaultdict(list)
    for slab, size in enumerate(journal.slab_sizes()):
        if size > geometry.slab_bytes or size < 0 or size % geometry.slot_bytes_min:
            _damaged_slab(found, held, journal, geometry, slab)
        elif size:
            found.slabs.append((slab, size))
    capacity = sum(geometry.slab_bytes // size for _, size in found.slabs)
    columns = _Columns(capacity, specs.key_bytes_max)
    reader = _Reader(found, held, columns, specs, geometry)
    for slots, sizes in _chunks(found.slabs, geometry):
        span = slice(int(slots[0]), int(slots[-1]) + 1)
        dense = span.stop - span.start == len(slots)
        rows = journal.headers[span if dense else slots]
        used = rows["state"] != STATE_WORDS[State.FREE]
        if used.all():
            reader.sort_out(rows, slots, sizes)
        elif used.any():
            reader.sort_out(rows[used], slots[used], sizes[used])
    for number, parts in held.items():
        found.held[number] = np.concatenate(parts)
    found.orphaned_loads = found.held.pop(KERNEL, found.orphaned_loads)
    found.slabs.extend((slab, geometry.slab_bytes) for slab in found.damaged)
    _blocks(found, specs, columns)
    return found


def _damaged_slab(
    found: Adoption,
    held: dict[int, list[I64]],
    journal: Journal,
    geometry: Geometry,
    slab: int,
) -> None:
    """Hold all of a damaged slab as one slot, and drop its old headers.

    Its slot boundaries and possible writers are unknown. The headers are dropped because a later
    run would believe them.
    """
    found.damaged.append(slab)
    first = slab * geometry.stride
    rows = np.arange(first + 1, first + geometry.stride, dtype=np.int64)
    used = journal.headers["state"][rows] != STATE_WORDS[State.FREE]
    _drop(found, DropCause.SLAB, rows[used])
    held[0].append(np.array([first], np.int64))


def _chunks(slabs: list[tuple[int, int]], geometry: Geometry) -> Iterator[tuple[I64, I64]]:
    """Yield (slots, slot sizes) of all slots in assigned slabs, some ten thousand at a time."""
    parts: list[I64] = []
    sizes: list[I64] = []
    rows = 0
    for slab, size in slabs:
        count = geometry.slab_bytes // size
        parts.append(slab * geometry.stride + np.arange(count, dtype=np.int64))
        sizes.append(np.full(count, size, np.int64))
        rows += count
        # A slab of many slots is a chunk of its own: its headers are used in place.
        if rows >= _CHUNK_ROWS or count >= _DENSE_ROWS:
            yield np.concatenate(parts), np.concatenate(sizes)
            parts, sizes, rows = [], [], 0
    if parts:
        yield np.concatenate(parts), np.concatenate(sizes)


class _Reader:
    """Sorts the used headers, one chunk after the other."""

    def __init__(
        self,
        found: Adoption,
        held: dict[int, list[I64]],
        columns: _Columns,
        specs: _Specs,
        geometry: Geometry,
    ) -> None:
        self._found = found
        self._held = held
        self._columns = columns
        self._specs = specs
        self._geometry = geometry

    def sort_out(self, rows: Records, slots: I64, sizes: I64) -> None:
        """Sort headers that are not free, given their slots and slot sizes."""
        found, words = self._found, rows["state"]
        bound = np.isin(words, BOUND_WORDS)
        if not bound.all():
            quarantined = words == STATE_WORDS[State.QUARANTINED]
            # A damaged owner may look like a group that is drained already: wait for all groups.
            known = rows["owner_check"] == owner_check(rows["owner"])
            owners = np.where(known, rows["owner"], 0)
            read_only = quarantined & (owners == READERS)
            busy = np.isin(words, _BUSY) | (quarantined & ~read_only)
            if (orphaned_loads := int((busy & ~known).sum())) > 0:
                found.causes[DropCause.OWNER] += orphaned_loads
            _drop(found, DropCause.READERS, slots[read_only])
            for owner in np.unique(owners[busy]).tolist():
                self._held[int(owner)].append(slots[busy & (owners == owner)])
            # An unknown state word was damaged: the slot may have been reserved, so no assumption
            # about it is safe.
            strange = ~(bound | busy | read_only)
            if strange.any():
                found.causes[DropCause.STATE_WORD] += int(strange.sum())
                self._held[0].append(slots[strange])
            rows, slots, sizes = rows[bound], slots[bound], sizes[bound]
        if len(rows):
            self._keep(rows, slots, sizes)

    def _keep(self, rows: Records, slots: I64, sizes: I64) -> None:
        whole = self._whole(rows, slots, sizes)
        if not whole.all():
            rows, slots = rows[whole], slots[whole]
        # Not from damaged headers: one flipped bit would use up all numbers at once.
        self._found.sequence = max(self._found.sequence, int(rows["sequence"].max(initial=0)))
        self._columns.add(rows, slots)

    def _whole(self, rows: Records, slots: I64, sizes: I64) -> Bools:
        """Tell which committed headers are undamaged and fit the catalogue; drop the others."""
        found, specs = self._found, self._specs
        good = (rows["magic"] == MAGIC) & (rows["version"] == VERSION)
        good &= rows["identity_check"] == identity_check(rows)
        summed = rows["state"] == STATE_WORDS[State.SUMMED]
        good &= ~summed | (rows["sum_check"] == sum_check(rows))
        _drop(found, DropCause.HEADER, slots[~good])
        pairs = _pairs(rows)
        inside = pairs < len(specs.known)
        pairs = np.where(inside, pairs, 0)
        fits = inside & specs.known[pairs] & (rows["length"] == specs.length[pairs])
        fits &= (rows["shard_count"] == specs.shards[pairs]) & (rows["shard"] < rows["shard_count"])
        fits &= (rows["key_bytes"] == specs.key_bytes[pairs]) & (sizes == specs.slot_bytes[pairs])
        fits &= _segments(self._geometry, slots) == specs.segment[pairs]
        _drop(found, DropCause.CONTRACT, slots[good & ~fits])
        current = rows["epoch"] == specs.epoch[pairs]
        _drop(found, DropCause.EPOCH, slots[good & fits & ~current])
        return np.asarray(good & fits & current)


def _pairs(rows: Records) -> I64:
    pairs: I64 = rows["namespace"].astype(np.int64) * 256 + rows["group"]
    return pairs


def _segments(geometry: Geometry, slots: I64) -> I64:
    starts = [segment.first_slab * geometry.stride for segment in geometry.segments]
    return np.searchsorted(starts, slots, side="right").astype(np.int64) - 1


def _drop(found: Adoption, cause: DropCause, slots: I64) -> None:
    if len(slots):
        found.dropped.append(slots)
        found.causes[cause] += len(slots)


def _blocks(found: Adoption, specs: _Specs, columns: _Columns) -> None:
    """Join shards to blocks: complete when all agree in count, sequence and key."""
    pairs = columns.pair[: columns.count]
    counts = np.bincount(pairs)
    for pair in np.flatnonzero(counts).tolist():
        alone = counts[pair] == columns.count
        rows: _Rows = slice(0, columns.count) if alone else np.flatnonzero(pairs == pair)
        shards = int(specs.shards[pair])
        rank = columns.sequence[rows] * np.uint64(shards) + columns.shard[rows]
        if (rank[1:] <= rank[:-1]).any():
            numbers = np.arange(columns.count)[rows]
            rows = numbers[np.argsort(rank, kind="stable")]
        if shards > 1:
            rows = _complete(found, columns, np.arange(columns.count)[rows], shards)
        _adopt_pair(found, columns, rows, pair, specs)


def _complete(found: Adoption, columns: _Columns, rows: I64, shards: int) -> I64:
    """The rows of blocks that have all their shards; rows are ordered by sequence and shard."""
    _, starts, counts = np.unique(columns.sequence[rows], return_index=True, return_counts=True)
    runs = rows[starts[counts == shards][:, None] + np.arange(shards)]
    agree = (columns.shard[runs] == np.arange(shards)).all(axis=1)
    keys = columns.key[runs]
    agree &= (keys == keys[:, :1]).all(axis=(1, 2))
    kept = runs[agree].reshape(-1)
    _drop(found, DropCause.INCOMPLETE, columns.slot[np.setdiff1d(rows, kept)])
    return np.asarray(kept)


def _adopt_pair(found: Adoption, columns: _Columns, rows: _Rows, pair: int, specs: _Specs) -> None:
    """Adopt blocks of one namespace and group; ``rows`` hold all shards, oldest block first."""
    shards, width = int(specs.shards[pair]), int(specs.key_bytes[pair])
    slots = columns.slot[rows].reshape(-1, shards)
    if not len(slots):
        return
    names = np.ascontiguousarray(columns.key[rows][::shards, :width])
    keys: list[bytes] = names.view(f"V{width}").reshape(-1).tolist()
    kept = _newest(names, keys)
    if kept is not None:
        others = np.setdiff1d(np.arange(len(keys)), kept)
        _drop(found, DropCause.DUPLICATE, slots[others].reshape(-1))
    sequences = columns.sequence[rows][::shards]
    wanted = columns.parent_sequence[rows][::shards]
    place = np.minimum(np.searchsorted(sequences, wanted), len(sequences) - 1)
    parents = np.where(sequences[place] == wanted, slots[place, 0], -1)
    summed: Bools = np.asarray(columns.summed[rows].reshape(-1, shards).all(axis=1))
    sums = columns.checksum[rows].view(f"V{CHECKSUM_BYTES}").reshape(-1, shards)
    if kept is not None:
        gone = slots[others, 0]
        parents = np.where(np.isin(parents, gone), -1, parents)[kept]
        slots, summed, sums = slots[kept], summed[kept], sums[kept]
        sequences = sequences[kept]
        keys = [keys[i] for i in kept.tolist()]
    found.blocks.append(
        AdoptedBlocks(pair // 256, pair % 256, slots, parents, keys, summed, sums, sequences)
    )


def _newest(names: U8, keys: list[bytes]) -> I64 | None:
    """Rows of the newest block of each key, or None if no key occurs twice.

    After a crash an older block of a key may still exist. Keys are hashes, so one word of each
    tells a million apart; only if two words agree are the keys themselves compared.
    """
    if names.shape[1] % 8 == 0:
        words = np.sort(names.view(np.uint64)[:, 0])
        if not (words[1:] == words[:-1]).any():
            return None
    last = dict(zip(keys, range(len(keys)), strict=True))
    if len(last) == len(keys):
        return None
    return np.sort(np.fromiter(last.values(), np.int64, len(last)))

"""Journal: a header per slot in a file beside the segments, and its adoption by a successor.

The file never leaves the daemon. It must survive the death of the process at any instruction, not
the death of the machine (the arena does not either). Therefore no flush is needed: writes of a
process to a shared mapping stay. Order is needed: the fields first, the state word last, and a
check over the fields that tells a torn or flipped header from a good one. The state words are far
apart, so that no flipped bit turns one into another.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvhearth.errors import KVHearthError, Reason
from kvhearth.failpoints import hit
from kvhearth.model import CHECKSUM_BYTES, I64, U8, U32, Bools, Records
from kvhearth_server.core.actions import Bind, BindOne, Mark, SlabSized, Summed
from kvhearth_server.core.adoption import AdoptedBlocks, Adoption, DropCause
from kvhearth_server.core.namespaces import Namespaces
from kvhearth_server.core.slot_table import KERNEL, Geometry, SlotTable, State
from kvhearth_server.memory.mapping import Segment

MAGIC = 0x4B56484A
VERSION = 2
KEY_FIELD_BYTES = 64

HEADER_DTYPE = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("group", "u1"),
        ("key_bytes", "u1"),
        ("namespace", "<u4"),
        ("epoch", "<u4"),
        ("shard", "<u2"),
        ("shard_count", "<u2"),
        ("length", "<u4"),
        ("sequence", "<u8"),
        ("parent_sequence", "<u8"),
        ("key", f"V{KEY_FIELD_BYTES}"),
        ("generation", "<u4"),
        ("owner", "<u4"),
        ("identity_check", "<u8"),
        ("checksum", f"V{CHECKSUM_BYTES}"),
        ("sum_check", "<u8"),
        ("owner_check", "<u4"),
        ("state", "<u4"),
    ]
)
"""One header. Its first 14 words except the owner are its identity, guarded by ``identity_check``;
the owner changes alone and has a check of its own.
"""

_IDENTITY = struct.Struct(f"<IHBBIIHHIQQ{KEY_FIELD_BYTES}sI")
"""The fields before the owner."""
_OWNER_END = HEADER_DTYPE.fields["identity_check"][1]  # type: ignore[index]
_CHECKS = struct.Struct(f"<Q{CHECKSUM_BYTES}sQ")
"""The fields from the identity's check to the checksum's."""
_SEQUENCE_AT = HEADER_DTYPE.fields["sequence"][1]  # type: ignore[index]
_STATE_AT = HEADER_DTYPE.fields["state"][1]  # type: ignore[index]

IDENTITY_WORDS = 14
HEADER_BYTES = HEADER_DTYPE.itemsize

STATE_WORDS: dict[State, int] = {
    State.FREE: 0,
    State.RESERVED: 0x74C9_DF6A,
    State.COMMITTED: 0x119A_72D1,
    State.SUMMED: 0xD708_20FE,
    State.QUARANTINED: 0x17F5_E837,
    State.LOADING: 0xF1D6_9ED6,
}
"""Encoding of states; a new file is all zeros, so FREE is zero."""

BOUND_WORDS = (STATE_WORDS[State.COMMITTED], STATE_WORDS[State.SUMMED])
"""States of slots that hold a shard of a block."""

READERS = 0xFFFF_FFFF
"""Owner of a slot that only readers keep from reuse; differs from a group's number in many bits."""

# Each access to an enumeration member by name costs a search, and more as a key.
_SUMMED, _SUMMED_WORD = State.SUMMED, STATE_WORDS[State.SUMMED]
_COMMITTED_WORD = STATE_WORDS[State.COMMITTED]
_NO_SUM, _NO_OWNER = bytes(CHECKSUM_BYTES), bytes(4)

_PRIME_NUMBER = 0x9E3779B97F4A7C15
_PRIME = np.uint64(_PRIME_NUMBER)
_SEED_NUMBER = 0x51_7CC1_B727_220A
_SEED = np.uint64(_SEED_NUMBER)
_WORDS = struct.Struct(f"<{IDENTITY_WORDS}Q")
_SUM_WORDS = struct.Struct("<2Q")
_LOW = np.uint64(0xFFFF_FFFF)
_HALF = np.uint64(32)
_WORD = (1 << 64) - 1
_FEW = 4
"""Number of rows up to which handling them one by one is cheaper."""


def mix(
    words: npt.NDArray[np.uint64], seed: npt.NDArray[np.uint64] | np.uint64
) -> npt.NDArray[np.uint64]:
    """Compute a 64-bit check of each row of words, shape (n, w) to (n,).

    Every bit of a row affects every bit of its check. Vectorised over rows, unlike a table-driven
    CRC: a million headers take some 0.1 s.
    """
    if len(words) <= _FEW:
        seeds = np.broadcast_to(seed, len(words)).tolist()
        rows = zip(words.tolist(), seeds, strict=True)
        return np.array([_mix_row(row, start) for row, start in rows], np.uint64)
    value = np.full(len(words), seed, np.uint64) if np.isscalar(seed) else np.array(seed, np.uint64)
    for column in range(words.shape[1]):
        value ^= words[:, column]
        value *= _PRIME
        value ^= value >> np.uint64(29)
    return value


def _mix_row(row: Sequence[int], value: int) -> int:
    for word in row:
        value = (value ^ word) * _PRIME_NUMBER & _WORD
        value ^= value >> 29
    return value


def identity_check(headers: Records) -> npt.NDArray[np.uint64]:
    """The check over the identity of contiguous headers."""
    words = headers.view(np.uint64).reshape(len(headers), -1)
    last = IDENTITY_WORDS - 1
    # The upper half of the last word is the owner.
    return mix(words[:, last : last + 1] & _LOW, mix(words[:, :last], _SEED))


def sum_check(headers: Records) -> npt.NDArray[np.uint64]:
    """The check over identity and checksum of contiguous headers."""
    words = headers.view(np.uint64).reshape(len(headers), -1)
    first = IDENTITY_WORDS + 1
    return mix(words[:, first : first + 2], headers["identity_check"])


def owner_check(owners: U32) -> U32:
    """The check over owners, shape (n,); the zeros of a new file do not match it."""
    return (mix(owners.astype(np.uint64).reshape(-1, 1), _SEED) >> _HALF).astype(np.uint32)


def journal_bytes(geometry: Geometry, page_bytes: int) -> int:
    """Size of the journal's file, in bytes of whole pages."""
    size = geometry.slab_count * 8 + geometry.slot_count * HEADER_BYTES
    return -(-size // page_bytes) * page_bytes


def rows_of(geometry: Geometry, slab: int) -> slice:
    """The bytes of a journal that must have pages before the slab is assigned: its slots' headers;
    those of slab 0 with the words of all slabs.
    """
    size = geometry.stride * HEADER_BYTES
    end = geometry.slab_count * 8 + (slab + 1) * size
    return slice(end - size if slab else 0, end)


def slab_word(slot_bytes: int) -> int:
    """Encoding of a slab's slot size: with its complement above it, 0 for none."""
    return slot_bytes | (~slot_bytes & 0xFFFF_FFFF) << 32 if slot_bytes else 0


def tables(view: U8, geometry: Geometry) -> tuple[npt.NDArray[np.uint64], Records]:
    """The slab words and the slot headers in a journal's bytes."""
    slabs = geometry.slab_count * 8
    end = slabs + geometry.slot_count * HEADER_BYTES
    return view[:slabs].view(np.uint64), view[slabs:end].view(HEADER_DTYPE)


def slab_sizes(slab_words: npt.NDArray[np.uint64]) -> list[int]:
    """The slot size of each slab: 0 for none, -1 where the word is damaged."""
    found = slab_words.tolist()
    sizes = [word & 0xFFFF_FFFF for word in found]
    pairs = zip(sizes, map(slab_word, sizes), found, strict=True)
    return [size if right == word else -1 for size, right, word in pairs]


class Journal:
    """Slot headers in a mapped file: slab sizes first, then a header for each slot number."""

    def __init__(self, segment: Segment, geometry: Geometry, table: SlotTable) -> None:
        if segment.bytes < journal_bytes(geometry, 1):
            raise KVHearthError(Reason.ARENA_UNUSABLE, f"the journal {segment.path} is too short")
        self._segment = segment
        self._table = table
        self.slab_words, self.headers = tables(segment.view, geometry)
        self._bytes = self.headers.view(np.uint8).data
        self._halves = self._bytes.cast("I")
        """View of 32-bit words: stores into it are atomic, as a state's must be."""

    def mark(self, action: Mark) -> None:
        """Write new states of slots; owner and generation first."""
        slots = action.slots
        if action.state is not State.FREE:
            owner = np.array([action.owner or READERS], np.uint32)
            self.headers["owner"][slots] = owner
            self.headers["owner_check"][slots] = owner_check(owner)
            hit("journal.mark_owner")
        self.headers["state"][slots] = STATE_WORDS[action.state]
        hit("journal.mark_state")

    def bind(self, action: Bind) -> None:
        """Write headers of newly committed blocks.

        The owner stays until the state changes: a crash in between leaves the slots reserved.
        """
        slots = action.slots.reshape(-1)
        count, shards = action.slots.shape
        rows = np.zeros((count, shards), HEADER_DTYPE)
        rows["magic"], rows["version"] = MAGIC, VERSION
        rows["group"], rows["namespace"] = action.group, action.namespace
        rows["epoch"], rows["length"] = action.epoch, action.length
        rows["shard_count"] = shards
        rows["shard"] = np.arange(shards)
        rows["sequence"] = action.sequences[:, None]
        rows["parent_sequence"] = self._parent_sequences(action)[:, None]
        rows["key_bytes"] = len(action.keys[0])
        padded = b"".join(key.ljust(KEY_FIELD_BYTES, b"\0") for key in action.keys)
        rows["key"] = np.frombuffer(padded, f"V{KEY_FIELD_BYTES}")[:, None]
        fresh = rows.reshape(-1)
        fresh["generation"] = self._table.generation[slots]
        fresh["identity_check"] = identity_check(fresh)
        if action.state is State.SUMMED:
            fresh["checksum"] = self._table.checksum[slots]
            fresh["sum_check"] = sum_check(fresh)
        before = self.headers[slots]
        for name in ("owner", "owner_check", "state"):
            fresh[name] = before[name]
        self.headers[slots] = fresh
        hit("journal.bind_fields")
        half = len(slots) // 2
        word = STATE_WORDS[action.state]
        self.headers["state"][slots[:half]] = word
        hit("journal.bind_half")
        self.headers["state"][slots[half:]] = word
        hit("journal.bind_state")

    def bind_one(self, action: BindOne) -> None:
        """Write the header of one slot: packing it costs a tenth of filling arrays."""
        slot, parent, key = action.slot, action.parent, action.key
        before = 0
        if parent >= 0:
            at = parent * HEADER_BYTES + _SEQUENCE_AT
            before = int.from_bytes(self._bytes[at : at + 8], "little")
        identity = _IDENTITY.pack(
            MAGIC,
            VERSION,
            action.group,
            len(key),
            action.namespace,
            action.epoch,
            0,
            1,
            action.length,
            action.sequence,
            before,
            key,
            action.generation,
        )
        # The upper half of the last word is the owner, which is not part of the identity.
        check = _mix_row(_WORDS.unpack(identity + _NO_OWNER), _SEED_NUMBER)
        checksum, summed, word = _NO_SUM, 0, _COMMITTED_WORD
        if action.state is _SUMMED:
            checksum, word = self._table.checksum[slot].tobytes(), _SUMMED_WORD
            summed = _mix_row(_SUM_WORDS.unpack(checksum), check)
        start = slot * HEADER_BYTES
        self._bytes[start : start + _IDENTITY.size] = identity
        start += _OWNER_END
        self._bytes[start : start + _CHECKS.size] = _CHECKS.pack(check, checksum, summed)
        hit("journal.bind_fields")
        hit("journal.bind_half")
        self._halves[(slot * HEADER_BYTES + _STATE_AT) // 4] = word
        hit("journal.bind_state")

    def _parent_sequences(self, action: Bind) -> I64:
        """Sequences of the blocks' parents; those inside this commit are not in the file yet."""
        parents = action.parents
        safe = np.maximum(parents, 0)
        sequences = np.where(parents >= 0, self.headers["sequence"][safe], 0).astype(np.int64)
        heads = action.slots[:, 0]
        inside = parents[1:] == heads[:-1]
        sequences[1:][inside] = action.sequences[:-1][inside]
        return sequences

    def summed(self, action: Summed) -> None:
        """Write checksums of committed slots, then their state."""
        slots = action.slots
        rows = self.headers[slots]
        rows["checksum"] = self._table.checksum[slots]
        self.headers["checksum"][slots] = rows["checksum"]
        hit("journal.sum_fields")
        self.headers["sum_check"][slots] = sum_check(rows)
        hit("journal.sum_check")
        self.headers["state"][slots] = STATE_WORDS[State.SUMMED]
        hit("journal.sum_state")

    def slab(self, action: SlabSized) -> None:
        """Write the slot size of a slab."""
        self.slab_words[action.slab] = slab_word(action.slot_bytes)
        hit("journal.slab")

    def close(self) -> None:
        """Unmap the file."""
        del self.headers, self.slab_words, self._bytes, self._halves
        self._segment.close()


def journal_path(folder: Path) -> Path:
    """The journal's file in an arena directory."""
    return folder / "journal"


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


_SPEC_DTYPE = np.dtype(
    [(name, "<i8") for name in ["segment", "epoch", "length", "shards", "key_bytes", "slot_bytes"]]
)


def _specs(namespaces: Namespaces, geometry: Geometry) -> Records:
    """Return the catalogue's data of each (namespace, group) pair, indexed by pair code; zeros, of
    which no header has any, where there is none.
    """
    count = 1 + max((space.number for space in namespaces), default=0)
    specs = np.zeros(count * 256, _SPEC_DTYPE)
    segments = {s.tenant: i for i, s in enumerate(geometry.segments)}
    for space in namespaces:
        segment = segments.get(space.tenant, -1)
        for kv_group, spec in enumerate(space.contract.groups):
            sizes = (space.contract.hash_bytes, geometry.slot_bytes_for(spec.page_bytes))
            row = (segment, space.epoch, spec.page_bytes, spec.shards, *sizes)
            specs[space.number * 256 + kv_group] = row
    return specs


def read_journal(journal: Journal, geometry: Geometry, namespaces: Namespaces) -> Adoption:
    """Collect everything that can be adopted from the journal; nothing is changed."""
    return _Reader(journal, geometry, namespaces).read()


class _Reader:
    """Sorts the used headers, one chunk after the other, and joins the good ones to blocks."""

    def __init__(self, journal: Journal, geometry: Geometry, namespaces: Namespaces) -> None:
        self._journal, self._geometry = journal, geometry
        self._found = Adoption()
        self._specs = _specs(namespaces, geometry)
        self._held: dict[int, list[I64]] = defaultdict(list)
        for slab, size in enumerate(slab_sizes(journal.slab_words)):
            if size > geometry.slab_bytes or size < 0 or size % geometry.slot_bytes_min:
                self._hold_damaged(slab)
            elif size:
                self._found.slabs.append((slab, size))
        capacity = sum(geometry.slab_bytes // size for _, size in self._found.slabs)
        key_bytes_max = max((space.contract.hash_bytes for space in namespaces), default=8)
        self._columns = _Columns(capacity, key_bytes_max)

    def read(self) -> Adoption:
        """Return all that can be adopted."""
        found = self._found
        for slots, sizes in _chunks(found.slabs, self._geometry):
            span = slice(int(slots[0]), int(slots[-1]) + 1)
            dense = span.stop - span.start == len(slots)
            rows = self._journal.headers[span if dense else slots]
            used = rows["state"] != STATE_WORDS[State.FREE]
            if used.all():
                self._sort_out(rows, slots, sizes)
            elif used.any():
                self._sort_out(rows[used], slots[used], sizes[used])
        for number, parts in self._held.items():
            found.held[number] = np.concatenate(parts)
        found.orphaned_loads = found.held.pop(KERNEL, found.orphaned_loads)
        found.slabs.extend((slab, self._geometry.slab_bytes) for slab in found.damaged)
        self._join()
        return found

    def _hold_damaged(self, slab: int) -> None:
        """Hold all of a damaged slab as one slot, and drop its old headers.

        Its slot boundaries and possible writers are unknown. The headers are dropped because a
        later run would believe them.
        """
        self._found.damaged.append(slab)
        first, stride = slab * self._geometry.stride, self._geometry.stride
        rows = np.arange(first + 1, first + stride, dtype=np.int64)
        used = self._journal.headers["state"][rows] != STATE_WORDS[State.FREE]
        self._drop(DropCause.SLAB, rows[used])
        self._held[0].append(np.array([first], np.int64))

    def _sort_out(self, rows: Records, slots: I64, sizes: I64) -> None:
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
            self._drop(DropCause.READERS, slots[read_only])
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
        good = (rows["magic"] == MAGIC) & (rows["version"] == VERSION)
        good &= rows["identity_check"] == identity_check(rows)
        summed = rows["state"] == STATE_WORDS[State.SUMMED]
        good &= ~summed | (rows["sum_check"] == sum_check(rows))
        self._drop(DropCause.HEADER, slots[~good])
        pairs = _pairs(rows)
        inside = pairs < len(self._specs)
        expected = self._specs.take(np.where(inside, pairs, 0))
        fits = inside & (rows["length"] == expected["length"])
        fits &= (rows["shard_count"] == expected["shards"]) & (rows["shard"] < expected["shards"])
        fits &= rows["key_bytes"] == expected["key_bytes"]
        fits &= sizes == expected["slot_bytes"]
        fits &= _segments(self._geometry, slots) == expected["segment"]
        self._drop(DropCause.CONTRACT, slots[good & ~fits])
        current = rows["epoch"] == expected["epoch"]
        self._drop(DropCause.EPOCH, slots[good & fits & ~current])
        return np.asarray(good & fits & current)

    def _drop(self, cause: DropCause, slots: I64) -> None:
        if len(slots):
            self._found.dropped.append(slots)
            self._found.causes[cause] += len(slots)

    def _join(self) -> None:
        """Join shards to blocks: complete when all agree in count, sequence and key."""
        columns = self._columns
        pairs = columns.pair[: columns.count]
        counts = np.bincount(pairs)
        for pair in np.flatnonzero(counts).tolist():
            alone = counts[pair] == columns.count
            rows: _Rows = slice(0, columns.count) if alone else np.flatnonzero(pairs == pair)
            shards = int(self._specs["shards"][pair])
            rank = columns.sequence[rows] * np.uint64(shards) + columns.shard[rows]
            if (rank[1:] <= rank[:-1]).any():
                numbers = np.arange(columns.count)[rows]
                rows = numbers[np.argsort(rank, kind="stable")]
            if shards > 1:
                rows = self._complete(np.arange(columns.count)[rows], shards)
            self._adopt_pair(rows, pair)

    def _complete(self, rows: I64, shards: int) -> I64:
        """The rows of blocks that have all their shards; rows are ordered by sequence and shard."""
        columns = self._columns
        _, starts, counts = np.unique(columns.sequence[rows], return_index=True, return_counts=True)
        runs = rows[starts[counts == shards][:, None] + np.arange(shards)]
        agree = (columns.shard[runs] == np.arange(shards)).all(axis=1)
        keys = columns.key[runs]
        agree &= (keys == keys[:, :1]).all(axis=(1, 2))
        kept = runs[agree].reshape(-1)
        self._drop(DropCause.INCOMPLETE, columns.slot[np.setdiff1d(rows, kept)])
        return np.asarray(kept)

    def _adopt_pair(self, rows: _Rows, pair: int) -> None:
        """Adopt blocks of one namespace and group; ``rows`` hold all shards, oldest block first."""
        columns, specs = self._columns, self._specs
        shards, width = int(specs["shards"][pair]), int(specs["key_bytes"][pair])
        slots = columns.slot[rows].reshape(-1, shards)
        if not len(slots):
            return
        names = np.ascontiguousarray(columns.key[rows][::shards, :width])
        keys: list[bytes] = names.view(f"V{width}").reshape(-1).tolist()
        kept = _newest(names, keys)
        if kept is not None:
            others = np.setdiff1d(np.arange(len(keys)), kept)
            self._drop(DropCause.DUPLICATE, slots[others].reshape(-1))
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
        self._found.blocks.append(
            AdoptedBlocks(pair // 256, pair % 256, slots, parents, keys, summed, sums, sequences)
        )


def _pairs(rows: Records) -> I64:
    pairs: I64 = rows["namespace"].astype(np.int64) * 256 + rows["group"]
    return pairs


def _segments(geometry: Geometry, slots: I64) -> I64:
    starts = [segment.first_slab * geometry.stride for segment in geometry.segments]
    return np.searchsorted(starts, slots, side="right").astype(np.int64) - 1


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

"""Journal: a header per slot in a file beside the segments, for adoption by a successor.

The file never leaves the daemon. It must survive the death of the process at any instruction, not
the death of the machine (the arena does not either). Therefore no flush is needed: writes of a
process to a shared mapping stay. Order is needed: the fields first, the state word last, and a
check over the fields that tells a torn or flipped header from a good one. The state words are far
apart, so that no flipped bit turns one into another.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvhearth.errors import KVHearthError, Reason
from kvhearth.failpoints import hit
from kvhearth.model import CHECKSUM_BYTES, I64, U8, U32, Records
from kvhearth_server.core.actions import Bind, BindOne, Mark, SlabSized, Summed
from kvhearth_server.core.slot_table import Geometry, SlotTable, State
from kvhearth_server.core.state import flat
from kvhearth_server.memory.segments import Segment

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
    """Compute the check of one row; see ``mix``."""
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
        if action.slots.size != 1:
            self._bind_many(action)
            return
        (key,), slot = action.keys, int(action.slots[0, 0])
        self.bind_one(
            BindOne(
                slot,
                self._table.generation.item(slot),
                int(action.sequences[0]),
                int(action.parents[0]),
                action.length,
                key,
                action.namespace,
                action.group,
                action.epoch,
                action.state,
            )
        )

    def _bind_many(self, action: Bind) -> None:
        slots = flat(action.slots)
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

    def slab_sizes(self) -> list[int]:
        """The slot size of each slab: 0 for none, -1 where the word is damaged."""
        return slab_sizes(self.slab_words)

    def close(self) -> None:
        """Unmap the file."""
        del self.headers, self.slab_words, self._bytes, self._halves
        self._segment.close()


def journal_path(folder: Path) -> Path:
    """The journal's file in an arena directory."""
    return folder / "journal"

"""Record of a block at a remote, version 1 (docs/on-disk-format.md): encoding and validation.

One object a block: a header of 256 bytes, the shards' checksums, padding to 64 bytes, the shards.
Everything is little endian. The header names the block, so that a wrong object is recognized.
"""

from __future__ import annotations

import enum
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvhearth.model import CHECKSUM_BYTES, U8, Records, checksum_of
from kvhearth_server.tiers.base import KEY_BYTES_MAX, BlockSpec, Corrupt, Missing
from kvhearth_server.tiers.remote.names import SPACE_BYTES

MAGIC = 0x4F56_4B48
_MAGIC = MAGIC.to_bytes(4, "little")
VERSION = 1
_ALIGN_BYTES = 64

_HEADER = struct.Struct(f"<IHBBII{SPACE_BYTES}s{KEY_BYTES_MAX}s{KEY_BYTES_MAX}sB79x")
"""Magic, version, group, bytes of the key, shards, length of one, space, key, key of the block that
this one continues, its bytes (0 for none). A check follows: the xxh3_128 of these and of the
checksums.
"""
_KEY_AT = struct.calcsize(f"<IHBBII{SPACE_BYTES}s")
_PARENT_AT = _KEY_AT + KEY_BYTES_MAX
_PARENT_BYTES_AT = _PARENT_AT + KEY_BYTES_MAX
_CHECKED_BYTES = _HEADER.size
HEADER_BYTES = _CHECKED_BYTES + CHECKSUM_BYTES


class Doubt(enum.StrEnum):
    """Reasons for not believing a record; the label of a counter."""

    FOREIGN = "foreign"
    """It has none of our headers."""
    VERSION = "version"
    DAMAGED = "damaged"
    """Its header's check fails, or its length does not fit the header."""
    MISPLACED = "misplaced"
    """It belongs to another block."""
    TORN = "torn"
    """A shard does not match its checksum."""

    @property
    def outcome(self) -> Missing | Corrupt:
        """Outcome of a load: others' objects are left alone, ours are to be removed."""
        return Missing() if self in (Doubt.FOREIGN, Doubt.VERSION) else Corrupt("remote")


@dataclass(frozen=True)
class Name:
    """Identity of a block, as its record has to state it."""

    space: str
    family: BlockSpec
    key: bytes


@dataclass(frozen=True)
class Head:
    """Content of a believed header.

    Attributes:
        checksums: xxh3_128 of each shard, one behind the other.
        parent: key of the block that this one continues; empty for none.
    """

    checksums: bytes
    parent: bytes


def payload_offset(shards: int) -> int:
    """Return the first shard's offset in a record."""
    return -(-(HEADER_BYTES + shards * CHECKSUM_BYTES) // _ALIGN_BYTES) * _ALIGN_BYTES


def record_bytes(family: BlockSpec) -> int:
    """Return the length of a block's record."""
    return payload_offset(family.shards) + family.shards * family.length


@functools.lru_cache(256)
def _start(space: str, group: int, shards: int, length: int, key_bytes: int) -> bytes:
    """Return what stands before the key in all headers of a family's blocks."""
    whole = _HEADER.pack(
        MAGIC, VERSION, group, key_bytes, shards, length, bytes.fromhex(space), b"", b"", 0
    )
    return whole[:_KEY_AT]


def heads_of(
    space: str,
    family: BlockSpec,
    keys: Sequence[bytes],
    checksums: Records,
    parents: Sequence[bytes],
) -> list[bytes]:
    """Return everything before the first shard, of n records.

    Args:
        checksums: ``V16`` (n, shards).
        parents: n keys; empty for none.
    """
    numbers = (space, family.group, family.shards, family.length)
    offset, size = payload_offset(family.shards), family.shards * CHECKSUM_BYTES
    every = np.ascontiguousarray(checksums).tobytes()
    heads = []
    for row, (key, parent) in enumerate(zip(keys, parents, strict=True)):
        names = key.ljust(KEY_BYTES_MAX, b"\0") + parent.ljust(KEY_BYTES_MAX, b"\0")
        start = _start(*numbers, len(key)) + names + bytes((len(parent),))
        checked = start.ljust(_CHECKED_BYTES, b"\0")
        sums = every[row * size : (row + 1) * size]
        heads.append((checked + checksum_of(checked + sums) + sums).ljust(offset, b"\0"))
    return heads


def read_heads(
    records: Sequence[U8], space: str, family: BlockSpec, keys: Sequence[bytes]
) -> list[Head | Doubt]:
    """Return the headers of whole records, as ``read_head`` does; what is as it should be is seen
    in fewer steps.
    """
    numbers = (space, family.group, family.shards, family.length)
    end, size = HEADER_BYTES + family.shards * CHECKSUM_BYTES, record_bytes(family)
    heads: list[Head | Doubt] = []
    for record, key in zip(records, keys, strict=True):
        start = record[:end].tobytes()
        checked, sums = start[:_CHECKED_BYTES], start[HEADER_BYTES:]
        wanted = _start(*numbers, len(key)) + key.ljust(KEY_BYTES_MAX, b"\0")
        parent_bytes = checked[_PARENT_BYTES_AT] if len(record) == size else KEY_BYTES_MAX + 1
        if (
            parent_bytes <= KEY_BYTES_MAX
            and checked.startswith(wanted)
            and checksum_of(checked + sums) == start[_CHECKED_BYTES:HEADER_BYTES]
        ):
            heads.append(Head(sums, checked[_PARENT_AT : _PARENT_AT + parent_bytes]))
        else:
            heads.append(read_head(record, Name(space, family, key)))
    return heads


def read_head(record: U8, name: Name) -> Head | Doubt:
    """Return the header of a whole record, if it is that of the named block."""
    start = record[:HEADER_BYTES].tobytes()
    if start[:4] != _MAGIC:
        return Doubt.FOREIGN
    if len(start) < HEADER_BYTES:
        return Doubt.DAMAGED
    _, version, group, key_bytes, shards, length, space, key, parent, parent_bytes = (
        _HEADER.unpack_from(start)
    )
    if version != VERSION:
        return Doubt.VERSION
    end = HEADER_BYTES + shards * CHECKSUM_BYTES
    if len(record) != payload_offset(shards) + shards * length:
        return Doubt.DAMAGED
    sums = record[HEADER_BYTES:end].tobytes()
    if checksum_of(start[:_CHECKED_BYTES] + sums) != start[_CHECKED_BYTES:]:
        return Doubt.DAMAGED
    family = name.family
    stated = (space.hex(), group, shards, length)
    if stated != (name.space, family.group, family.shards, family.length):
        return Doubt.MISPLACED
    if key[:key_bytes] != name.key or max(key_bytes, parent_bytes) > KEY_BYTES_MAX:
        return Doubt.MISPLACED
    return Head(sums, parent[:parent_bytes])

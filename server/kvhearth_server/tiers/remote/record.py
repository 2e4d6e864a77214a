"""Record of a block at a remote, version 1 (docs/on-disk-format.md): encoding and validation.

One object a block: a header of 256 bytes, the shards' checksums, padding to 64 bytes, the shards.
Everything is little endian. The header names the block, so that a wrong object is recognized.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import numpy as np

from kvhearth.model import CHECKSUM_BYTES, U8, Records, checksum_of
from kvhearth_server.tiers.base import KEY_BYTES_MAX, BlockSpec, Corrupt, Missing
from kvhearth_server.tiers.remote.names import SPACE_BYTES

MAGIC = 0x4F56_4B48
_MAGIC = MAGIC.to_bytes(4, "little")
VERSION = 1
_ALIGN_BYTES = 64
_SUM = np.dtype(f"V{CHECKSUM_BYTES}")

_HEADER = struct.Struct(f"<IHBBII{SPACE_BYTES}s{KEY_BYTES_MAX}s{KEY_BYTES_MAX}sB79x")
"""Magic, version, group, bytes of the key, shards, length of one, space, key, key of the block that
this one continues, its bytes (0 for none). A check follows: the xxh3_128 of these and of the
checksums.
"""
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
        checksums: ``V16`` (shards,).
        parent: key of the block that this one continues; empty for none.
    """

    checksums: Records
    parent: bytes


def payload_offset(shards: int) -> int:
    """Return the first shard's offset in a record."""
    return -(-(HEADER_BYTES + shards * CHECKSUM_BYTES) // _ALIGN_BYTES) * _ALIGN_BYTES


def record_bytes(family: BlockSpec) -> int:
    """Return the length of a block's record."""
    return payload_offset(family.shards) + family.shards * family.length


def write_head(into: U8, name: Name, head: Head) -> None:
    """Write everything before the first shard to the start of ``into``."""
    family, key, parent = name.family, name.key, head.parent
    space = bytes.fromhex(name.space)
    sizes = (len(key), family.shards, family.length)
    checked = _HEADER.pack(MAGIC, VERSION, family.group, *sizes, space, key, parent, len(parent))
    sums = head.checksums.tobytes()
    whole = checked + checksum_of(checked + sums) + sums
    offset = payload_offset(family.shards)
    into[:offset] = np.frombuffer(whole.ljust(offset, b"\0"), np.uint8)


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
    return Head(np.frombuffer(sums, _SUM), parent[:parent_bytes])

"""Record of a block at a remote, version 1 (docs/on-disk-format.md): encoding and validation.

One object a block: a header of 256 bytes, the shards' checksums, padding to 64 bytes, the shards.
Everything is little endian. The header names the block, so that a wrong object is recognized.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from kvhearth.model import CHECKSUM_BYTES, U8, Records, checksum_of
from kvhearth_server.tiers.base import KEY_BYTES_MAX, BlockSpec, Corrupt, Missing
from kvhearth_server.tiers.remote.names import SPACE_BYTES

MAGIC = 0x4F56_4B48
VERSION = 1
_ALIGN_BYTES = 64
_SUM = np.dtype(f"V{CHECKSUM_BYTES}")

HEADER_DTYPE = np.dtype(
    [
        ("magic", "<u4"),
        ("version", "<u2"),
        ("group", "u1"),
        ("key_bytes", "u1"),
        ("shards", "<u4"),
        ("length", "<u4"),
        ("space", f"V{SPACE_BYTES}"),
        ("key", f"V{KEY_BYTES_MAX}"),
        ("parent", f"V{KEY_BYTES_MAX}"),
        ("parent_bytes", "u1"),
        ("reserved", "V79"),
        ("check", _SUM),
    ]
)
"""``length`` is that of one shard; ``parent`` the key of the block that this one continues, of 0
bytes for none; ``check`` the xxh3_128 of the header's bytes before it and of the checksums.
"""
HEADER_BYTES = HEADER_DTYPE.itemsize
_CHECKED_BYTES = HEADER_BYTES - CHECKSUM_BYTES


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
    row = np.zeros((), HEADER_DTYPE)
    row["magic"], row["version"] = MAGIC, VERSION
    row["group"], row["key_bytes"] = name.family.group, len(name.key)
    row["shards"], row["length"] = name.family.shards, name.family.length
    row["space"] = bytes.fromhex(name.space)
    row["key"] = name.key.ljust(KEY_BYTES_MAX, b"\0")
    row["parent"], row["parent_bytes"] = head.parent.ljust(KEY_BYTES_MAX, b"\0"), len(head.parent)
    checked = row.tobytes()[:_CHECKED_BYTES]
    sums = head.checksums.tobytes()
    whole = checked + checksum_of(checked + sums) + sums
    offset = payload_offset(name.family.shards)
    into[:offset] = np.frombuffer(whole.ljust(offset, b"\0"), np.uint8)


def read_head(record: U8, name: Name) -> Head | Doubt:
    """Return the header of a whole record, if it is that of the named block."""
    if len(record) < 4 or int(record[:4].view("<u4")[0]) != MAGIC:
        return Doubt.FOREIGN
    if len(record) < HEADER_BYTES:
        return Doubt.DAMAGED
    row = record[:HEADER_BYTES].view(HEADER_DTYPE)[0]
    if row["version"] != VERSION:
        return Doubt.VERSION
    shards, end = int(row["shards"]), HEADER_BYTES + int(row["shards"]) * CHECKSUM_BYTES
    size = payload_offset(shards) + shards * int(row["length"])
    if len(record) != size:
        return Doubt.DAMAGED
    sums = record[HEADER_BYTES:end].tobytes()
    if checksum_of(record[:_CHECKED_BYTES].tobytes() + sums) != row["check"].tobytes():
        return Doubt.DAMAGED
    key, parent = int(row["key_bytes"]), int(row["parent_bytes"])
    stated = (row["space"].tobytes().hex(), int(row["group"]), shards, int(row["length"]))
    family = name.family
    if stated != (name.space, family.group, family.shards, family.length):
        return Doubt.MISPLACED
    if key != len(name.key) or row["key"].tobytes()[:key] != name.key or parent > KEY_BYTES_MAX:
        return Doubt.MISPLACED
    return Head(np.frombuffer(sums, _SUM), row["parent"].tobytes()[:parent])

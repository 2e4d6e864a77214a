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
from typing import Any

import numpy as np

from kvhearth.model import CHECKSUM_BYTES, U8, Records, checksum_of
from kvhearth.native.blocks import BlockMover, address_of, block_mover
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
_KEY = f"V{KEY_BYTES_MAX}"
_FIELDS: list[Any] = [
    ("magic", "<u4"),
    ("version", "<u2"),
    ("group", "u1"),
    ("key_bytes", "u1"),
    ("shards", "<u4"),
    ("length", "<u4"),
    ("space", f"V{SPACE_BYTES}"),
    ("key", _KEY),
    ("parent", _KEY),
    ("parent_bytes", "u1"),
    ("unused", "V79"),
    ("check", _SUM),
]
"""The same as columns, for many headers at once; the checksums and the padding follow."""


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


def heads_of(
    space: str,
    family: BlockSpec,
    keys: Sequence[bytes],
    checksums: Records,
    parents: Sequence[bytes],
) -> U8:
    """Return everything before the first shard, of n records: uint8 (n, ``payload_offset``).

    Args:
        checksums: ``V16`` (n, shards).
        parents: n keys; empty for none.
    """
    size = family.shards * CHECKSUM_BYTES
    rest_bytes = payload_offset(family.shards) - HEADER_BYTES
    heads = np.zeros(len(keys), [*_FIELDS, ("rest", "u1", rest_bytes)])
    heads["magic"], heads["version"] = MAGIC, VERSION
    heads["group"], heads["shards"], heads["length"] = family.group, family.shards, family.length
    heads["space"] = np.void(bytes.fromhex(space))
    for name, values in (("key", keys), ("parent", parents)):
        heads[name] = np.array(values, f"S{KEY_BYTES_MAX}").view(_KEY)
        heads[f"{name}_bytes"] = [len(each) for each in values]
    heads["rest"][:, :size] = np.ascontiguousarray(checksums).view(np.uint8).reshape(-1, size)
    whole = heads.view(np.uint8).reshape(len(heads), -1)
    check = whole[:, _CHECKED_BYTES:HEADER_BYTES]
    if (mover := _checker(size)) is not None:
        check[:] = mover.sum_pages(address_of(whole) + whole.shape[1] * np.arange(len(heads)))
        return whole
    for row, found in zip(whole, check, strict=True):
        made = checksum_of(row[:_CHECKED_BYTES].tobytes() + row[HEADER_BYTES:][:size].tobytes())
        found[:] = np.frombuffer(made, np.uint8)
    return whole


@functools.lru_cache(64)
def _checker(sums_bytes: int) -> BlockMover | None:
    # Pages one byte apart are addresses.
    return block_mover([(0, 1, _CHECKED_BYTES), (HEADER_BYTES, 1, sums_bytes)])


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

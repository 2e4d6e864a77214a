"""Record of a block at a remote, version 3 (docs/on-disk-format.md): its layout.

One object a block: 48 bytes in the open, then the key of the block that this one continues, the
shards' checksums, padding and the shards, all encrypted (``helper.sealing``). Nothing in it names
the block: whoever opens it has to know which one it is.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvhearth.model import CHECKSUM_BYTES
from kvhearth_server.tiers.base import BlockSpec

MAGIC = 0x4F56_4B48
VERSION = 3
HEADER_BYTES = 48
CHECKSUMS_AT = 128
_ALIGN_BYTES = 64


class Suspect(enum.StrEnum):
    """Reasons for not believing a record; the label of a counter."""

    ALTERED = "altered"
    """It is another block's or no record, changed, cut off, or sealed without the fleet's key."""
    TORN = "torn"
    """A shard does not match its checksum: its slot changed while the record was made."""


@dataclass(frozen=True)
class Name:
    """Identity of a block at a remote, and the name of its object there."""

    object: str
    space: str
    family: BlockSpec
    key: bytes


@dataclass(frozen=True)
class Head:
    """Content of a believed record before its shards.

    Attributes:
        checksums: xxh3_128 of each shard, one behind the other.
        parent: key of the block that this one continues; empty for none.
    """

    checksums: bytes
    parent: bytes


def payload_offset(shards: int) -> int:
    """Return the first shard's offset in a record."""
    return -(-(CHECKSUMS_AT + shards * CHECKSUM_BYTES) // _ALIGN_BYTES) * _ALIGN_BYTES


def record_bytes(family: BlockSpec) -> int:
    """Return the length of a block's record."""
    return payload_offset(family.shards) + family.shards * family.length

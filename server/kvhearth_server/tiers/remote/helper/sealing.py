"""Sealing of records: AES-256-GCM, each under a key of its own.

The key is made of the fleet's key, the object's name and random bytes: no number of records wears
one out. The associated data name the block, so a record opens under its own name only.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from kvhearth.model import CHECKSUM_BYTES, checksum_of
from kvhearth_server.tiers.base import KEY_BYTES_MAX
from kvhearth_server.tiers.remote.names import SPACE_BYTES, record_key
from kvhearth_server.tiers.remote.record import (
    CHECKSUMS_AT,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Head,
    Name,
    Suspect,
    payload_offset,
    record_bytes,
)

_START = struct.pack("<IH2x", MAGIC, VERSION)
_SALT_BYTES = _NONCE_BYTES = 12
_TAG_AT = len(_START) + _SALT_BYTES + _NONCE_BYTES
_NAME = struct.Struct(f"<{SPACE_BYTES}sBB2xII{KEY_BYTES_MAX}s")
"""Space, group, bytes of the key, shards, length of one, key."""
_PARENT = struct.Struct(f"<{KEY_BYTES_MAX}sB15x")


class Sealer:
    """Seals and opens the records of a fleet. Thread-safe.

    Args:
        fleet_key: the fleet's secret, of which all keys are made.
        random: makes salts and nonces; golden tests pass another source.
    """

    def __init__(self, fleet_key: bytes, random: Callable[[int], bytes] = os.urandom) -> None:
        self._fleet_key, self._random = fleet_key, random

    def seal(
        self,
        name: Name,
        parent: bytes,
        checksums: bytes,
        shards: Sequence[memoryview],
        into: memoryview,
    ) -> None:
        """Write the record of a block.

        Args:
            checksums: xxh3_128 of each shard, one behind the other.
            into: ``record_bytes`` of memory.
        """
        start = _START + self._random(_SALT_BYTES + _NONCE_BYTES)
        cipher = self._cipher(name, start).encryptor()
        cipher.authenticate_additional_data(start + _named(name))
        head = (_PARENT.pack(parent, len(parent)) + checksums).ljust(
            payload_offset(len(shards)) - HEADER_BYTES, b"\0"
        )
        at, parts = HEADER_BYTES, list[bytes | memoryview]([head, *shards])
        for plain in parts:
            at += cipher.update_into(plain, into[at : at + len(plain)])
        cipher.finalize()
        into[:HEADER_BYTES] = start + cipher.tag

    def open(self, name: Name, record: memoryview, shards: Sequence[memoryview]) -> Head | Suspect:
        """Verify a whole record and put its shards' bytes into ``shards``, where they are undefined
        after a suspicion.
        """
        if len(record) != record_bytes(name.family) or record[: len(_START)] != _START:
            return Suspect.ALTERED
        start, tag = bytes(record[:_TAG_AT]), bytes(record[_TAG_AT:HEADER_BYTES])
        cipher = self._cipher(name, start, tag).decryptor()
        cipher.authenticate_additional_data(start + _named(name))
        at = payload_offset(len(shards))
        head = cipher.update(record[HEADER_BYTES:at])
        for shard in shards:
            at += cipher.update_into(record[at : at + len(shard)], shard)
        try:
            cipher.finalize()
        except InvalidTag:
            return Suspect.ALTERED
        parent, parent_bytes = _PARENT.unpack_from(head)
        checksums = head[CHECKSUMS_AT - HEADER_BYTES :][: len(shards) * CHECKSUM_BYTES]
        if checksums != b"".join(map(checksum_of, shards)):
            return Suspect.TORN
        return Head(checksums, parent[:parent_bytes])

    def _cipher(self, name: Name, start: bytes, tag: bytes | None = None) -> Cipher[modes.GCM]:
        """Return the cipher of one record, which begins with ``start``."""
        salt, nonce = start[len(_START) : -_NONCE_BYTES], start[-_NONCE_BYTES:]
        key = record_key(self._fleet_key, name.object, salt)
        return Cipher(algorithms.AES(key), modes.GCM(nonce, tag))


def _named(name: Name) -> bytes:
    family = name.family
    numbers = family.group, len(name.key), family.shards, family.length
    return _NAME.pack(bytes.fromhex(name.space), *numbers, name.key)

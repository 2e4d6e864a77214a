"""Sealing of records: AES-256-GCM under a key of the block's space.

A space belongs to one tenant, contract, weights label and KV group, so a key of one opens nothing
of another's. The associated data name the block, so a record opens under its own name only.
"""

from __future__ import annotations

import functools
import os
import struct
from collections.abc import Callable, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from kvhearth.model import CHECKSUM_BYTES, checksum_of
from kvhearth_server.tiers.base import KEY_BYTES_MAX
from kvhearth_server.tiers.remote.names import SPACE_BYTES
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

_START = struct.pack("<IH10x", MAGIC, VERSION)
_NONCE_BYTES = 12
_NONCE_END = len(_START) + _NONCE_BYTES
_TAG_AT = 32
_NAME = struct.Struct(f"<{SPACE_BYTES}sBB2xII{KEY_BYTES_MAX}s")
"""Space, group, bytes of the key, shards, length of one, key."""
_PARENT = struct.Struct(f"<{KEY_BYTES_MAX}sB15x")
_INFO = b"kvhearth remote record 2 "
_KEYS_KEPT = 4096


class Sealer:
    """Seals and opens the records of a fleet. Thread-safe.

    Args:
        fleet_key: the fleet's secret, of which all keys are derived by HKDF-SHA256.
        random: makes nonces; golden tests pass another source.
    """

    def __init__(self, fleet_key: bytes, random: Callable[[int], bytes] = os.urandom) -> None:
        self._random = random

        @functools.lru_cache(_KEYS_KEPT)
        def key_of(space: str) -> algorithms.AES:
            info = _INFO + bytes.fromhex(space)
            return algorithms.AES(HKDF(SHA256(), 32, None, info).derive(fleet_key))

        self._key_of = key_of

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
        nonce = self._random(_NONCE_BYTES)
        start = (_START + nonce).ljust(_TAG_AT, b"\0")
        cipher = Cipher(self._key_of(name.space), modes.GCM(nonce)).encryptor()
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
        if len(record) != record_bytes(name.family):
            return Suspect.ALTERED
        if record[: len(_START)] != _START:
            return Suspect.FOREIGN
        nonce, tag = bytes(record[len(_START) : _NONCE_END]), bytes(record[_TAG_AT:HEADER_BYTES])
        cipher = Cipher(self._key_of(name.space), modes.GCM(nonce, tag)).decryptor()
        cipher.authenticate_additional_data(bytes(record[:_TAG_AT]) + _named(name))
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


def _named(name: Name) -> bytes:
    family = name.family
    numbers = family.group, len(name.key), family.shards, family.length
    return _NAME.pack(bytes.fromhex(name.space), *numbers, name.key)

"""Encryption of records: AES-256-GCM, a key for each life of a segment (docs/adr/0029).

A tenant's key encrypts nothing itself. Each life of a segment has two keys derived from it: one for
the payloads, one that masks the checksums in the headers.
"""

from __future__ import annotations

import hmac
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvhearth.model import U8, Records, checksum_of
from kvhearth_server.tiers.base import BlockSpec
from kvhearth_server.tiers.ssd.format import (
    NONCE_BYTES,
    PAGE_BYTES,
    RECORD_BYTES,
    RECORD_DTYPE,
    RECORD_MAGIC,
    SEAL_DTYPE,
    SEALED_VERSION,
    TAG_BYTES,
    Doubt,
    SegmentHead,
    crc_good,
    key_id,
    pages_of,
    parse_seal,
    record_pages,
    seal,
)

_LIVES_KEPT = 4096
_PAYLOAD = b"kvhearth ssd payload"
_CHECKSUM = b"kvhearth ssd checksum"


@dataclass(frozen=True)
class Life:
    """Keys of one life of a segment."""

    aead: AESGCM
    mask_key: bytes

    def write(self, records: Records, sources: Sequence[memoryview], length: int) -> SealedWrite:
        """Return the bounce of a write of these payloads under their closed headers."""
        return SealedWrite(records, sources, length, self)

    def masks(self, nonces: U8) -> U8:
        """Return 16 bytes for each nonce (n, 12), which XOR hides or shows a checksum with: the
        first block of AES in counter mode under that nonce.
        """
        blocks = np.zeros((len(nonces), 16), np.uint8)
        blocks[:, :NONCE_BYTES] = nonces
        cipher = Cipher(algorithms.AES(self.mask_key), modes.ECB()).encryptor()
        masked = cipher.update(blocks.tobytes())
        return np.frombuffer(masked, np.uint8).reshape(-1, 16)


class Keyring:
    """Keys by tenant: the first of each writes, all of them read. Thread-safe.

    Args:
        keys: at least one of 32 bytes for each tenant.
        random: makes nonces; golden tests pass another source.

    Attributes:
        owner_of: names the tenant of a namespace and weights epoch; "" for none.
    """

    def __init__(
        self, keys: Mapping[str, Sequence[bytes]], random: Callable[[int], bytes] = os.urandom
    ) -> None:
        self._random = random
        self._writers = {tenant: each[0] for tenant, each in keys.items()}
        self._keys = {key_id(key): key for each in keys.values() for key in each}
        self._lives: OrderedDict[tuple[int, int, int], Life] = OrderedDict()
        self._lock = threading.Lock()
        only = next(iter(keys)) if len(keys) == 1 else ""
        self.owner_of: Callable[[bytes, int], str] = lambda namespace, epoch: only

    def writer(self, family: BlockSpec) -> int | None:
        """Return the number of the key that encrypts new records of a family; None if no tenant
        owns it any more.
        """
        key = self._writers.get(self.owner_of(family.namespace, family.epoch))
        return None if key is None else key_id(key)

    def life(self, number: int, log_id: int, sequence: int) -> Life | None:
        """Return the keys of a life of a segment; None if the tenant's key is not here."""
        key = self._keys.get(number)
        if key is None:
            return None
        name = number, log_id, sequence
        with self._lock:
            found = self._lives.get(name)
            if found is None:
                place = log_id.to_bytes(8, "little") + sequence.to_bytes(8, "little")
                payload, mask = (
                    hmac.digest(key, p + place, "sha256") for p in (_PAYLOAD, _CHECKSUM)
                )
                found = self._lives[name] = Life(AESGCM(payload), mask)
                if len(self._lives) > _LIVES_KEPT:
                    self._lives.popitem(last=False)
            return found

    def read(
        self,
        wanted: Sequence[tuple[int, int, bytes, bytes, memoryview]],
        family: BlockSpec,
        head: SegmentHead,
    ) -> SealedRead:
        """Return the bounce of a read of neighbouring records; ``wanted`` has each one's page,
        shard, key, checksum, and the memory for its payload.
        """
        return SealedRead([Wanted(*each) for each in wanted], family, head, self)

    def close_headers(self, records: Records, number: int, head: SegmentHead) -> Life:
        """Turn headers of one life into those of encrypted records, with nonces and CRC set."""
        life = self.life(number, head.log_id, head.sequence)
        assert life is not None, "a writer's key is here"
        nonces = np.frombuffer(self._random(NONCE_BYTES * len(records)), np.uint8)
        nonces = nonces.reshape(-1, NONCE_BYTES)
        records["version"], records["key_id"] = SEALED_VERSION, number
        records["nonce"] = np.ascontiguousarray(nonces).view(f"V{NONCE_BYTES}").reshape(-1)
        records["checksum"] = _masked(records, life)
        seal(records)
        return life


def _masked(records: Records, life: Life) -> Records:
    """Return the checksums of headers, hidden or shown."""
    nonces = np.ascontiguousarray(records["nonce"]).view(np.uint8).reshape(-1, NONCE_BYTES)
    sums = np.ascontiguousarray(records["checksum"]).view(np.uint8).reshape(-1, 16)
    shown: Records = np.ascontiguousarray(sums ^ life.masks(nonces)).view("V16").reshape(-1)
    return shown


def readable(
    records: Records, keyring: Keyring | None, doubts: Counter[Doubt], keyless: Counter[int]
) -> Records:
    """Return the headers that can be read, as the index takes them: checksums are the payloads'.

    Args:
        records: believed headers of one life.
        keyless: records by the number of their key, which is not here; added to.
    """
    sealed = records["version"] == SEALED_VERSION
    if not sealed.any():
        return records
    records = records.copy()
    keep = np.ones(len(records), np.bool_)
    for number in np.unique(records["key_id"][sealed]).tolist():
        mine = np.flatnonzero(sealed & (records["key_id"] == number))
        first = records[mine[0]]
        log_id, sequence = int(first["log_id"]), int(first["segment_sequence"])
        life = keyring.life(number, log_id, sequence) if keyring is not None else None
        if life is None:
            keep[mine] = False
            keyless[number] += len(mine)
            doubts[Doubt.NO_KEY] += len(mine)
        else:
            rows = records[mine]
            rows["checksum"] = _masked(rows, life)
            records[mine] = rows
    return records[keep]


class SealedWrite:
    """Records of one request, as they lie on the disk once they are encrypted."""

    def __init__(
        self, records: Records, sources: Sequence[memoryview], length: int, life: Life
    ) -> None:
        self._records, self._sources = records, sources
        self._length, self._life = length, life
        self.records = len(records)
        self.size = len(records) * record_pages(length) * PAGE_BYTES

    def fill(self, image: memoryview) -> None:
        """Encrypt all payloads into ``image``, which has ``TAG_BYTES`` more than ``size``."""
        step, length = record_pages(self._length) * PAGE_BYTES, self._length
        padding = bytes(pages_of(length) * PAGE_BYTES - length)
        for index, source in enumerate(self._sources):
            row = self._records[index : index + 1]
            at, start = index * step, index * step + PAGE_BYTES
            end = start + length
            # The tag lands behind the payload: in the padding, or where the next header will be.
            nonce, into = row["nonce"][0].tobytes(), image[start : end + TAG_BYTES]
            self._life.aead.encrypt_into(nonce, source, row.tobytes(), into)
            line = np.zeros(1, SEAL_DTYPE)
            line["tag"] = np.frombuffer(image[end : end + TAG_BYTES], "V16")
            line["checksum"] = np.frombuffer(checksum_of(image[start:end]), "V16")
            seal(line)
            image[end : end + len(padding)] = padding
            image[at:start] = (row.tobytes() + line.tobytes()).ljust(PAGE_BYTES, b"\0")

    def drain(self, image: memoryview) -> list[int]:
        """Do nothing: a write ends with the device."""
        return []


@dataclass(frozen=True)
class Wanted:
    """A record to decrypt: its page, shard, key, checksum, and the memory for its payload."""

    position: int
    shard: int
    key: bytes
    checksum: bytes
    into: memoryview


class SealedRead:
    """Neighbouring records to decrypt after one request has read them."""

    def __init__(
        self, wanted: Sequence[Wanted], family: BlockSpec, head: SegmentHead, keyring: Keyring
    ) -> None:
        self._wanted, self._family = wanted, family
        self._head, self._keyring = head, keyring
        self.records = len(wanted)
        self.size = len(wanted) * record_pages(family.length) * PAGE_BYTES

    def fill(self, image: memoryview) -> None:
        """Do nothing: the device fills it."""

    def drain(self, image: memoryview) -> list[int]:
        """Decrypt all records into their memory; return the indices of the wrong ones."""
        # From the last one: a tag is put behind its payload, where the next header may be.
        return [i for i in reversed(range(self.records)) if not self._open(image, i)]

    def _open(self, image: memoryview, index: int) -> bool:
        wanted, length = self._wanted[index], self._family.length
        at = index * record_pages(length) * PAGE_BYTES
        start, end = at + PAGE_BYTES, at + PAGE_BYTES + length
        data = bytes(image[at : at + RECORD_BYTES])
        row = np.frombuffer(data, RECORD_DTYPE)
        found = parse_seal(image[at + RECORD_BYTES : start])
        if found is None or not self._meant(row, wanted):
            return False
        number = int(row["key_id"][0])
        life = self._keyring.life(number, self._head.log_id, self._head.sequence)
        if life is None:
            return False
        image[end : end + TAG_BYTES] = found.tag
        try:
            life.aead.decrypt_into(
                row["nonce"][0].tobytes(), image[start : end + TAG_BYTES], data, wanted.into
            )
        except InvalidTag:
            return False
        return checksum_of(wanted.into) == wanted.checksum

    def _meant(self, row: Records, wanted: Wanted) -> bool:
        """Whether a header is that of the wanted record, whatever lists said where it lies."""
        family, head = self._family, self._head
        key = row["key"][0].tobytes()[: int(row["key_bytes"][0])]
        numbers = tuple(
            int(row[name][0])
            for name in (
                *("magic", "version", "group", "log_id", "segment_sequence", "position"),
                *("length", "epoch", "shard", "shard_count"),
            )
        )
        return (
            crc_good(row[0])
            and key == wanted.key
            and row["namespace"][0].tobytes() == family.namespace
            and numbers
            == (
                *(RECORD_MAGIC, SEALED_VERSION, family.group, head.log_id, head.sequence),
                *(wanted.position, family.length, family.epoch, wanted.shard, family.shards),
            )
        )

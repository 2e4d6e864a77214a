"""Random ids, array types, packed keys, the extent record, the checksum: once for all parts."""

from __future__ import annotations

import enum
import secrets
import struct
from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import xxhash

from kvhearth.errors import KVHearthError, Reason
from kvhearth.native.blocks import address_of, sums_at

_AT_ONCE = struct.Struct("<64Q")
"""The 64 random numbers that one system call to the kernel brings."""


class Ids:
    """A source of random ids. Thread-safe; a forked child makes its own."""

    def __init__(self) -> None:
        self._drawn: list[int] = []

    def new_id(self) -> int:
        """Return a random id: not 0, and below 2^63 - 1, so that it fits any signed integer."""
        try:
            return self._drawn.pop()
        except IndexError:
            # Two threads may get here at once: the ids of one of them are then never used.
            numbers = _AT_ONCE.unpack(secrets.token_bytes(_AT_ONCE.size))
            drawn: list[int] = [(number >> 2) + 1 for number in numbers]
            self._drawn = drawn
            return drawn.pop()


U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Records = npt.NDArray[Any]
"""A structured array; its dtype is named where it is made."""

CHECKSUM_BYTES = 16

EXTENT_DTYPE = np.dtype(
    [
        ("slot", "<u4"),
        ("segment", "<u2"),
        ("flags", "<u2"),
        ("offset", "<u8"),
        ("length", "<u4"),
        ("generation", "<u4"),
        ("checksum", f"V{CHECKSUM_BYTES}"),
    ]
)
"""One extent: memory that a client may read or write. ``offset`` and ``length`` are bytes inside
``segment``.
"""

EXTENT_BYTES = EXTENT_DTYPE.itemsize
EXTENT_RECORD = struct.Struct(f"<IHHQII{CHECKSUM_BYTES}s")
"""``EXTENT_DTYPE`` for a single record, which numpy fills and reads several times slower."""

TOKENS_UNKNOWN, TOKENS_UNPUBLISHED = 0xFFFF_FFFF, 0xFFFF_FFFE
"""In place of a block's token ids: its key covers more than tokens; it is not to be published."""

FLAG_SUMMED = 1
"""The record's checksum is set."""
FLAG_VERIFY = 2
"""The bytes were adopted or crossed a tier and have not been verified since: the reader must
verify.
"""


def split_keys(blob: bytes, key_bytes: int) -> list[bytes]:
    """Cut a blob into its keys.

    Raises:
        KVHearthError: ``bad_keys`` if the blob is not whole keys.
    """
    if len(blob) % key_bytes:
        raise KVHearthError(
            Reason.BAD_KEYS, f"{len(blob)} bytes are not whole keys of {key_bytes} bytes"
        )
    # One call in C; slicing in Python takes five times as long.
    keys: list[bytes] = np.frombuffer(blob, f"V{key_bytes}").tolist()
    return keys


class PackedKeys(Sequence[bytes]):
    """Keys of one length, packed side by side as on the wire; split only when one is accessed.

    Args:
        blob: n keys.
        key_bytes: bytes of each key.

    Raises:
        KVHearthError: ``bad_keys`` if the blob is not whole keys.
    """

    __slots__ = ("_count", "blob", "key_bytes")

    def __init__(self, blob: bytes, key_bytes: int) -> None:
        self._count, rest = divmod(len(blob), key_bytes)
        if rest:
            raise KVHearthError(
                Reason.BAD_KEYS, f"{len(blob)} bytes are not whole keys of {key_bytes} bytes"
            )
        self.blob = blob
        self.key_bytes = key_bytes

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, slice):
            return split_keys(self.blob, self.key_bytes)[index]
        place = range(self._count)[index] * self.key_bytes
        return self.blob[place : place + self.key_bytes]

    def __iter__(self) -> Iterator[bytes]:
        return iter(split_keys(self.blob, self.key_bytes))


class Tier(enum.IntEnum):
    """Location of a block, as the byte in ``GroupPresence.tiers``.

    A block that is ``REMOTE`` but not present is being asked about: whether it is there is not
    known yet.
    """

    NOWHERE = 0
    DRAM = 1
    SSD = 2
    REMOTE = 3


def pack_bits(flags: Bools) -> bytes:
    """Pack booleans of shape (n,) into a bitmap of (n + 7) // 8 bytes, lowest bit first."""
    if len(flags) == 1:
        return b"\1" if flags[0] else b"\0"
    return np.packbits(flags, bitorder="little").tobytes()


def unpack_bits(data: bytes, count: int) -> Bools:
    """Unpack a bitmap of ``count`` bits into booleans of shape (count,).

    Raises:
        ValueError: if ``data`` is not the bitmap of ``count`` bits.
    """
    if len(data) != (count + 7) // 8:
        raise ValueError(f"{len(data)} bytes are not a bitmap of {count} bits")
    if count == 1:
        return np.array([data[0] & 1], np.bool_)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), count=count, bitorder="little")
    return bits.view(np.bool_)


checksum_of = xxhash.xxh3_128_digest
"""Return the checksum of a shard's bytes: xxh3_128 in its canonical, big-endian form, 16 bytes.
It releases the GIL while it runs.
"""

RunningChecksum = xxhash.xxh3_128
"""The same for bytes that come in pieces: ``update`` takes one, ``digest`` returns the checksum."""


def sum_extents(views: list[U8], extents: Records) -> U8:
    """Return the checksum of each extent, shape (n, 16); ``views`` are the segments' bytes.

    The native module takes one call for all: between two calls, a thread with a busy neighbour may
    wait milliseconds for the interpreter's lock.
    """
    segments, lengths = extents["segment"].tolist(), extents["length"].astype(np.int64)
    offsets = extents["offset"].astype(np.int64)
    bases = np.array([address_of(view) for view in views], np.int64)
    if (found := sums_at(bases[segments] + offsets, lengths)) is not None:
        return found
    digests = [
        checksum_of(memoryview(views[segment])[offset : offset + length])
        for segment, offset, length in zip(
            segments, offsets.tolist(), lengths.tolist(), strict=True
        )
    ]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(extents), CHECKSUM_BYTES)

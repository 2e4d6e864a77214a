"""Parts of XXH3 (128 bits, long input, no seed) that kernels leave to the CPU: keys and the end.

XXH3 reads 64 bytes (a stripe) into 8 lanes at a time. Within 1 KiB (a block of stripes) the lanes
only add up, so that all blocks of all shards are summed in parallel; between blocks the lanes are
mixed, one multiplication after another. The algorithm and its constants are those of the XXH3
specification of the xxHash project, version 0.8.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvhearth.model import CHECKSUM_BYTES, U8

LONG_BYTES_MIN = 241
"""Shorter inputs take other ways through XXH3."""

U64 = npt.NDArray[np.uint64]

_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32_1, _PRIME32_2, _PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
_PRIME64_1, _PRIME64_2, _PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_PRIME64_4, _PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_MASK = 0xFFFFFFFFFFFFFFFF


def _words(start: int, count: int) -> list[int]:
    words: list[int] = np.frombuffer(_SECRET, "<u8", count, start).tolist()
    return words


def constants() -> U64:
    """Return the kernels' constants: 24 words of the secret, 8 for the last stripe, 8 first lanes,
    and the factor between blocks; shape (41,).
    """
    first = [_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3]
    first += [_PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1]
    return np.array(_words(0, 24) + _words(121, 8) + first + [_PRIME32_1], np.uint64)


def checksums(lanes: U64, size: int) -> U8:
    """Return the checksums of shards from their 8 lanes.

    Args:
        lanes: shape (n, 8), as ``kernels.accumulate`` returns them.
        size: bytes of each shard.

    Returns:
        uint8 of shape (n, 16), equal to ``kvhearth.model.checksum_of`` the shards.
    """
    low = _merged(lanes, 11, size * _PRIME64_1 & _MASK)
    high = _merged(lanes, 117, ~(size * _PRIME64_2) & _MASK)
    return np.stack((high, low), axis=1).astype(">u8").view(np.uint8).reshape(-1, CHECKSUM_BYTES)


def _merged(lanes: U64, secret_at: int, start: int) -> U64:
    mixed = lanes ^ np.array(_words(secret_at, 8), np.uint64)
    total = np.full(len(lanes), start, np.uint64)
    for pair in range(0, 8, 2):
        total += _folded(mixed[:, pair], mixed[:, pair + 1])
    total ^= total >> np.uint64(37)
    total *= np.uint64(0x165667919E3779F9)
    return total ^ (total >> np.uint64(32))


def _folded(left: U64, right: U64) -> U64:
    """Return the two halves of 128-bit products, one xored with the other."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    a, b, c, d = left >> half, left & low, right >> half, right & low
    middle = (b * d >> half) + (a * d & low) + b * c
    high = a * c + (a * d >> half) + (middle >> half)
    folded: U64 = high ^ (left * right)
    return folded

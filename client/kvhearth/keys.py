"""Keys: the engine's chained hashes, packed into one blob per call."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Iterable, Sequence

import numpy as np

from kvhearth.errors import KVHearthError, Reason


@functools.lru_cache(maxsize=256)
def _splitter(count: int, key_bytes: int) -> struct.Struct:
    return struct.Struct(f"{key_bytes}s" * count)


_CHUNK_KEYS = 64


def split_keys(blob: bytes, key_bytes: int) -> list[bytes]:
    """Cut a blob into its keys.

    Chunks of a fixed count keep the number of compiled formats, and so the memory of their cache,
    bounded.

    Raises:
        KVHearthError: ``bad_keys`` if the blob is not whole keys.
    """
    if len(blob) % key_bytes:
        raise KVHearthError(
            Reason.BAD_KEYS, f"{len(blob)} bytes are not whole keys of {key_bytes} bytes"
        )
    count = len(blob) // key_bytes
    whole = count - count % _CHUNK_KEYS
    keys: list[bytes] = []
    if whole:
        end = whole * key_bytes
        for chunk in _splitter(_CHUNK_KEYS, key_bytes).iter_unpack(memoryview(blob)[:end]):
            keys.extend(chunk)
    if count - whole:
        keys.extend(_splitter(count - whole, key_bytes).unpack_from(blob, whole * key_bytes))
    return keys


def join_keys(keys: Iterable[bytes]) -> bytes:
    """The blob of keys, in order."""
    return b"".join(keys)


def chain_keys(
    tokens: Sequence[int], block_tokens: int, *, seed: str = "", extra: Sequence[bytes] = ()
) -> list[bytes]:
    """Chained SHA-256 keys of the full blocks of ``tokens``, for engines that bring none of their
    own.

    Args:
        tokens: token ids; a last block that is not full gets no key.
        block_tokens: tokens per block.
        seed: the chain's seed (the contract's ``hash_seed``).
        extra: content digests that the tokens do not show, folded into every key: a LoRA adapter's
            content, a cache salt. Pictures belong into the block that holds them: use ``fold_key``.
    """
    flat = np.asarray(tokens, dtype="<u4")
    previous = hashlib.sha256(b"kvhearth\0" + seed.encode()).digest()
    for part in extra:
        previous = fold_key(previous, part)
    keys = []
    for start in range(0, len(flat) - block_tokens + 1, block_tokens):
        previous = hashlib.sha256(previous + flat[start : start + block_tokens].tobytes()).digest()
        keys.append(previous)
    return keys


def fold_key(key: bytes, content: bytes) -> bytes:
    """A key of the same length that also stands for ``content`` (an adapter's or a picture's
    digest).
    """
    return hashlib.shake_256(len(key).to_bytes(2, "little") + key + content).digest(len(key))

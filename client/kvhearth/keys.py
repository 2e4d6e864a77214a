"""Block keys: the engine's chained hashes, packed into one blob per call."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from kvhearth.errors import KVHearthError, Reason


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


def chain_keys(
    tokens: Sequence[int], block_tokens: int, *, seed: str = "", extra: Sequence[bytes] = ()
) -> list[bytes]:
    """Return chained SHA-256 keys of the full blocks of ``tokens``, for engines without own keys.

    Args:
        tokens: token ids; a last block that is not full gets no key.
        block_tokens: tokens per block.
        seed: the chain's seed (the contract's ``hash_seed``).
        extra: digests of content that the tokens do not show, folded into every key: a LoRA
            adapter's content, a cache salt. Images belong in the block that holds them: use
            ``fold_key``.
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
    """Return a key of the same length that also stands for ``content``.

    The content is, for example, the digest of an adapter or an image.
    """
    return hashlib.shake_256(len(key).to_bytes(2, "little") + key + content).digest(len(key))

"""Chained hashes: block keys for engines without their own, and keys that cover more content."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


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

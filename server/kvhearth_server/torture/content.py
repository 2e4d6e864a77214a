"""What every block must hold: keys and bytes are functions of numbers."""

from __future__ import annotations

import hashlib

import numpy as np

from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.model import U8

BLOCK_TOKENS = 16


def contract_of(model: str, page_bytes: int, shards: int) -> Contract:
    """One full-attention group of blocks of ``shards`` x ``page_bytes``."""
    group = GroupSpec(GroupKind.FULL, BLOCK_TOKENS, page_bytes, shards=shards)
    return Contract(model, "torture", "uint8", (group,), tensor_parallel=shards)


def key_of(model: str, number: int) -> bytes:
    """The key of a model's block, 32 bytes."""
    return hashlib.sha256(f"{model} {number}".encode()).digest()


def content(key: bytes, shard: int, epoch: int, size: int) -> U8:
    """The bytes of one shard of a block under one weights epoch, shape (size,)."""
    seed = int.from_bytes(key[:16], "little") ^ (shard << 96) ^ (epoch << 104)
    return np.frombuffer(np.random.Generator(np.random.SFC64(seed)).bytes(size), np.uint8)

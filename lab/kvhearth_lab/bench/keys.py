"""Keys that any process of a run can derive from their number."""

from __future__ import annotations

import hashlib

KEY_BYTES = 32
CHAIN_KEYS = 8192
"""Number of keys in one chain, as of a long prompt."""


def keys_of(seed: bytes, start: int, count: int) -> list[bytes]:
    """Return keys ``start`` to ``start + count`` of a run; neighbours are neighbours in a chain."""
    return [
        hashlib.sha256(seed + number.to_bytes(8, "big")).digest()
        for number in range(start, start + count)
    ]

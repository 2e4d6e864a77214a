"""Checksums over slots, for background threads: xxh3_128 releases the GIL while it runs."""

from __future__ import annotations

import numpy as np
import xxhash

from kvhearth.model import CHECKSUM_BYTES, U8, Records


def sum_extents(views: list[U8], extents: Records) -> U8:
    """Return the xxh3_128 of each extent, shape (n, 16); ``views`` are the segments' bytes."""
    digests = [
        xxhash.xxh3_128_digest(memoryview(views[segment])[offset : offset + length])
        for segment, offset, length in zip(
            extents["segment"].tolist(),
            extents["offset"].tolist(),
            extents["length"].tolist(),
            strict=True,
        )
    ]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(extents), CHECKSUM_BYTES)

"""The checksum of a shard, defined once for clients, daemon, SSD tier and lab."""

from __future__ import annotations

import numpy as np
import xxhash

from kvhearth.model import CHECKSUM_BYTES, U8, Records

checksum_of = xxhash.xxh3_128_digest
"""Return the checksum of a shard's bytes: xxh3_128 in its canonical, big-endian form, 16 bytes.
It releases the GIL while it runs.
"""

RunningChecksum = xxhash.xxh3_128
"""The same for bytes that come in pieces: ``update`` takes one, ``digest`` returns the checksum."""


def sum_extents(views: list[U8], extents: Records) -> U8:
    """Return the checksum of each extent, shape (n, 16); ``views`` are the segments' bytes."""
    digests = [
        checksum_of(memoryview(views[segment])[offset : offset + length])
        for segment, offset, length in zip(
            extents["segment"].tolist(),
            extents["offset"].tolist(),
            extents["length"].tolist(),
            strict=True,
        )
    ]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(len(extents), CHECKSUM_BYTES)

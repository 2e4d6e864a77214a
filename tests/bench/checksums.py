"""Throughput of checksums on one CPU core: xxh3_128 beside what numpy can do for a GPU's.

``numpy`` stands for any 128-bit checksum of multiplications and additions of 64-bit words that is
parallel enough for a GPU: two inner products with fixed keys, without the mixing that a real one
needs. Prints GB/s and the ratio as JSON. docs/adr/0024 uses it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np

from kvhearth.model import checksum_of


def gbytes_per_s(run: Callable[[np.ndarray], object], shards: np.ndarray, seconds: float) -> float:
    """Return the throughput of ``run`` over shards, the best of five portions of ``seconds``."""
    best = 0.0
    for _ in range(5):
        done, begun = 0, time.perf_counter()
        while (passed := time.perf_counter() - begun) < seconds / 5:
            run(shards[done % len(shards)])
            done += 1
        best = max(best, done * shards.shape[1] / passed / 1e9)
    return best


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shard-mib", type=float, default=2.0)
    parser.add_argument("--shards", type=int, default=64, help="more than a cache holds")
    parser.add_argument("--seconds", type=float, default=5.0)
    given = parser.parse_args()
    random = np.random.default_rng(0)
    size = int(given.shard_mib * (1 << 20)) // 8 * 8
    shards = random.integers(0, 256, (given.shards, size), np.uint8)
    keys = random.integers(0, 1 << 63, (2, 4096), np.uint64)

    def products(shard: np.ndarray) -> list[np.uint64]:
        words = shard.view(np.uint64)
        pieces = [words[at : at + 4096] for at in range(0, len(words), 4096)]
        return [np.dot(piece, key[: len(piece)]) for piece in pieces for key in keys]

    found = {
        "xxh3_128": gbytes_per_s(checksum_of, shards, given.seconds),
        "numpy": gbytes_per_s(products, shards, given.seconds),
    }
    ratio = found["numpy"] / found["xxh3_128"]
    print(json.dumps({"gbytes_per_s": found, "numpy_to_xxh3": ratio}))


if __name__ == "__main__":
    main()

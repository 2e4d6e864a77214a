"""Sizes of a run of ``kvhearth bench local``."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.value_types import format_size

MIB = 1 << 20
PAGE_BYTES = 2 * MIB
"""Size of a block in the copies."""
BATCH = 128
SMALL_BYTES = 4096
"""Size of a block in the lookups; the index does not depend on it."""
SLAB_BYTES = 64 * MIB
KEYS = 512
KEYS_LONG = 4096
CROWD_KEYS = 128
CROWD_CLIENTS = 8
MEMORY_BYTES_MIN = 3 * BATCH * PAGE_BYTES
"""Room for a batch reserved, one leased, and one more to evict."""


@dataclass(frozen=True)
class Sizes:
    """Counts and seconds of one run.

    Attributes:
        memory_bytes: arena of the daemons of the copies and of the idle part.
        rounds: rounds of batches; each stores twice and loads twice.
        ones: single blocks stored and loaded.
        first_touches: clients that attach and store their first batch.
        blocks_small, blocks: blocks in the index at the first and at the second series of lookups.
        lookups: lookups of each series.
        lookups_long: lookups of ``KEYS_LONG`` keys.
        crowd_s: duration of the lookups of the concurrent clients.
        idle_s: how long the idle daemon is watched.
        scrapes: scrapes of ``/metrics``, at ``blocks`` blocks.
        scrape_pairs, scrape_lookups: pairs of portions, one with a scrape and one without, and the
            lookups of each portion.
    """

    memory_bytes: int
    rounds: int
    ones: int
    first_touches: int
    blocks_small: int
    blocks: int
    lookups: int
    lookups_long: int
    crowd_s: float
    idle_s: float
    scrapes: int
    scrape_pairs: int
    scrape_lookups: int


FULL = Sizes(
    memory_bytes=1024 * MIB,
    rounds=20,
    ones=400,
    first_touches=5,
    blocks_small=10_000,
    blocks=1_000_000,
    lookups=2000,
    lookups_long=100,
    crowd_s=5.0,
    idle_s=15.0,
    scrapes=100,
    scrape_pairs=300,
    scrape_lookups=40,
)
QUICK = Sizes(
    memory_bytes=MEMORY_BYTES_MIN,
    rounds=2,
    ones=20,
    first_touches=1,
    blocks_small=10_000,
    blocks=20_000,
    lookups=100,
    lookups_long=10,
    crowd_s=0.5,
    idle_s=1.0,
    scrapes=5,
    scrape_pairs=12,
    scrape_lookups=20,
)


def sizes_of(*, quick: bool, memory_bytes: int | None) -> Sizes:
    """Return the sizes of a run whose daemons take at most ``memory_bytes`` each.

    Raises:
        KVHearthError: ``config_invalid`` if that is too little.
    """
    sizes = QUICK if quick else FULL
    if memory_bytes is None:
        return sizes
    if memory_bytes < MEMORY_BYTES_MIN:
        raise KVHearthError(
            Reason.CONFIG_INVALID,
            f"--memory: {format_size(memory_bytes)} does not hold three batches of {BATCH} x "
            f"{format_size(PAGE_BYTES)}; give at least {format_size(MEMORY_BYTES_MIN)}",
        )
    return replace(
        sizes,
        memory_bytes=min(sizes.memory_bytes, memory_bytes),
        blocks=min(sizes.blocks, (memory_bytes - SLAB_BYTES) // SMALL_BYTES),
    )

"""Sizes and figures of ``kvhearth bench local``: targets, collection and plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.bench import report
from kvhearth_lab.bench.report import Figure, missed, picture, whiskers
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
        populate_bytes, populates: arena of the daemons whose start is measured, and their number.
        blocks_small, blocks: blocks in the index at the first and at the second series of lookups.
        lookups: lookups of each series.
        lookups_long: lookups of ``KEYS_LONG`` keys.
        crowd_s: duration of the lookups of the concurrent clients.
        idle_s: how long the idle daemon is watched.
        decode_rounds: rounds of commits as of decode steps.
        decode_reserves: reservations of a round, each used up.
        scrapes: scrapes of ``/metrics``, at ``blocks`` blocks.
        scrape_pairs, scrape_lookups: pairs of portions, one with a scrape and one without, and the
            lookups of each portion.
    """

    memory_bytes: int
    rounds: int
    ones: int
    first_touches: int
    populate_bytes: int
    populates: int
    blocks_small: int
    blocks: int
    lookups: int
    lookups_long: int
    crowd_s: float
    idle_s: float
    decode_rounds: int
    decode_reserves: int
    scrapes: int
    scrape_pairs: int
    scrape_lookups: int


FULL = Sizes(
    memory_bytes=1024 * MIB,
    rounds=20,
    ones=400,
    first_touches=5,
    populate_bytes=4096 * MIB,
    populates=5,
    blocks_small=10_000,
    blocks=1_000_000,
    lookups=2000,
    lookups_long=100,
    crowd_s=5.0,
    idle_s=15.0,
    decode_rounds=5,
    decode_reserves=8,
    scrapes=100,
    scrape_pairs=300,
    scrape_lookups=40,
)
QUICK = Sizes(
    memory_bytes=MEMORY_BYTES_MIN,
    rounds=2,
    ones=20,
    first_touches=1,
    populate_bytes=MEMORY_BYTES_MIN,
    populates=1,
    blocks_small=10_000,
    blocks=20_000,
    lookups=100,
    lookups_long=10,
    crowd_s=0.5,
    idle_s=1.0,
    decode_rounds=1,
    decode_reserves=2,
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
        populate_bytes=min(sizes.populate_bytes, memory_bytes),
        blocks=min(sizes.blocks, (memory_bytes - SLAB_BYTES) // SMALL_BYTES),
    )


FIGURES = (
    Figure("memcpy_gbs", "GB/s of a plain copy, one thread, block by block of 2 MiB"),
    Figure("store_ratio", "reserve, copy, commit of 128 x 2 MiB against memcpy", ">=", 0.8),
    Figure("store_sealed_ratio", "the same with the client's checksums", ">=", 0.65),
    Figure("load_ratio", "lookup, copy, verify against memcpy", ">=", 0.75),
    Figure("load_unverified_ratio", "lookup and copy against memcpy", ">=", 0.9),
    Figure("first_touch_ratio", "first store into a mapping that was never touched", ">=", 0.9),
    Figure(
        "populate_cpu_s_per_gib", "processor time to populate an arena, for each GiB", "<=", 0.3
    ),
    Figure("raw_populate_cpu_s_per_gib", "the same of private memory, right before"),
    Figure("populate_ready_s", "from the start of that daemon to ready", "<=", 1.0),
    Figure("memcpy_one_p50_us", "plain copy of one block of 2 MiB"),
    Figure("memcpy_one_cached_p50_us", "the same pair again and again: from the cache"),
    Figure("store_one_p50_us", "copy and commit of one block, slots in hand"),
    Figure("store_one_ratio", "that against memcpy of one block", "<=", 3.5),
    Figure("store_one_sealed_p50_us", "copy, checksum and commit of one block"),
    Figure("load_one_p50_us", "lookup, verify and copy of one block, release behind"),
    Figure("load_one_ratio", "that against memcpy of one block", "<=", 3.5),
    Figure("load_one_unverified_p50_us", "lookup and copy of one block"),
    Figure(
        "store_until_servable_ratio",
        "3 x 128 stores back to back until a lookup serves them, against memcpy",
        ">=",
        0.8,
    ),
    Figure("memcpy_one_paused_p50_us", "plain copy of one block after 10 ms without work"),
    Figure("store_one_paused_ratio", "copy, checksum, commit queued; so, against it", "<=", 2.0),
    Figure("load_one_paused_ratio", "lookup, copy, verify of one block; so", "<=", 1.5),
    Figure("store_one_served_paused_ratio", "that store until the block may be served"),
    Figure("store_one_paused_1ms_ratio", "with pauses of 1 ms", "<=", 2.0),
    Figure("load_one_paused_1ms_ratio", "with pauses of 1 ms", "<=", 1.5),
    Figure("store_one_paused_0ms_ratio", "without pauses", "<=", 2.0),
    Figure("load_one_paused_0ms_ratio", "without pauses", "<=", 1.5),
    Figure("rpc_one_p50_us", "an empty unary gRPC call after a plain copy"),
    Figure("frame_p50_us", "an empty call as a frame: what the client's calls are"),
    Figure("frame_p99_us", "an empty call as a frame"),
    Figure("lookup512_p50_us", "lookup and lease of 512 keys, 10 k blocks"),
    Figure("lookup512_p99_us", "lookup and lease of 512 keys, 10 k blocks"),
    Figure("lookup512_frame_ratio", "p50 against the empty frame", "<=", 1.5),
    Figure("lookup512_p99_ratio", "p99 against the empty frame's p99", "<=", 3.0),
    Figure("lookup512_1m_p50_us", "the same at all blocks, chain order"),
    Figure("lookup512_1m_ratio", "that against the empty frame", "<=", 2.5),
    Figure("lookup512_fragmented_ratio", "the same, no neighbours in memory", "<=", 2.5),
    Figure("lookup512_half_ratio", "the same, the second half unknown", "<=", 2.5),
    Figure("lookup512_miss_ratio", "the same, all keys unknown", "<=", 2.5),
    Figure("lookup512_shards8_ratio", "512 blocks of 8 shards, against the frame", "<=", 2.5),
    Figure("lookup512_groups2_ratio", "256 blocks of 2 groups, against the frame", "<=", 2.5),
    Figure("lookup4096_p50_us", "lookup and lease of 4096 keys at all blocks"),
    Figure("core_us_per_key", "the core alone, 512 keys in chain order", "<=", 0.5),
    Figure("clients8_lookups_per_s", "8 client processes, 128 keys a lookup", ">=", 3000),
    Figure("decode_commits_per_core_s", "blocks of 16 requests a step, daemon's CPU", ">=", 20000),
    Figure("decode_commits_sealed_per_core_s", "the same with the client's checksums"),
    Figure("dropped_stores", "blocks of all stores that were not kept", "<=", 0),
    Figure("index_bytes_per_block", "growth of the daemon's private memory", "<=", 250),
    Figure("idle_rss_mib", "resident memory without the arena, one engine attached", "<=", 120),
    Figure("idle_cpu", "of a core, one engine attached", "<=", 0.005),
    Figure("ready_s", "from the start of the process to ready", "<=", 3.0),
    Figure("metrics_p99_ms", "/metrics at all blocks", "<=", 20.0),
    Figure("metrics_cpu_ms", "the daemon's processor time for that; 10 ms a second are 1 %"),
    Figure("metrics_overhead", "of the daemon's core, for one scrape a second", "<=", 0.01),
    Figure("metrics_delay", "of their time, what lookups lose to one scrape a second"),
)


@dataclass
class Result(report.Result):
    """Results of a run, filled part by part.

    Attributes:
        values: figures by name, as described in ``FIGURES``.
        spread: least and greatest round of each ratio; for the metrics, the interval of
            ``median_of``.
        asked, kept: blocks of all stores.
        book_errors: books errors that the daemons reported at their end.
    """

    asked: int = 0
    kept: int = 0
    book_errors: list[str] = field(default_factory=list)

    def store(self, asked: int, kept: int) -> None:
        """Count a store."""
        self.asked += asked
        self.kept += kept

    def as_json(self) -> dict[str, Any]:
        """Return the object that the verb prints."""
        books = {"balanced": not self.book_errors, "errors": self.book_errors}
        values = {
            **self.values,
            "stored_blocks": self.kept,
            "dropped_stores": self.asked - self.kept,
        }
        return {**values, "books": books, "spread": self.spread, "missed": missed(values, FIGURES)}


_TIMES = (
    "frame_p50_us",
    "lookup512_p50_us",
    "lookup512_p99_us",
    "lookup512_1m_p50_us",
    "lookup4096_p50_us",
    "memcpy_one_p50_us",
    "store_one_p50_us",
    "load_one_p50_us",
)
_RATIOS = (
    "store_ratio",
    "store_sealed_ratio",
    "load_ratio",
    "load_unverified_ratio",
    "first_touch_ratio",
)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the plot: ratios with their spread and targets, and times; raises as ``picture``."""
    with picture(path, 11, 4) as (ratios, times):
        names = [name for name in _RATIOS if name in found]
        values = [found[name] for name in names]
        errors = whiskers(values, [found["spread"][name] for name in names])
        ratios.barh(names, values, xerr=errors, color="tab:orange", ecolor="grey")
        bounds = {each.name: each.bound for each in FIGURES if each.sign}
        for place, name in enumerate(names):
            if name in bounds:
                ratios.plot([bounds[name]] * 2, [place - 0.4, place + 0.4], color="black")
        ratios.set_title("speed against memcpy (bar: target, whisker: spread)")
        names = [name for name in _TIMES if name in found]
        times.barh(names, [found[name] for name in names], color="tab:blue")
        times.set_title("microseconds")
        for axes in (ratios, times):
            axes.invert_yaxis()

"""Sizes and figures of ``kvhearth bench ssd``: need of room, targets, collection and plot."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhearth.errors import KVHearthError, Reason
from kvhearth_lab.bench import report
from kvhearth_lab.bench.report import Figure, missed, picture, whiskers
from kvhearth_server.config.value_types import format_size
from kvhearth_server.tiers.ssd.format import PAGE_BYTES

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB
SLOTS = 160
"""Number of blocks that are stored from, and of blocks that are loaded into."""
BATCH = 64
BATCHES_OUT = 2
"""Number of batches under way, with room left for half of one: 128 MiB each and 256 MiB in all, as
the daemon's portions are.
"""
SMALL_BYTES = PAGE_BYTES
"""Size of a block in the restarts; the length of a block makes no difference to a footer."""
_SPARE_BYTES = 256 * MIB


@dataclass(frozen=True)
class Sizes:
    """Bytes and counts of one run.

    Attributes:
        tier_bytes, segment_bytes: capacity of the tier and size of its files.
        round_bytes: bytes written, read or both in each turn; also the size of the raw file.
        survey_rounds: turns of each way to reach the drive, to find the best.
        rounds: turns of each kind.
        depth: concurrent requests in the kernel, of the tier and raw.
        reads: single blocks that are read while the drive is full of writes.
        small_blocks, small_segment_bytes: blocks recovered at a restart, and size of their files.
        restarts: number of restarts.
        slots: slots of the arena whose journal is read.
        peer_rounds: stores and loads of each peer.
        windows, window_s: windows of lookups, as many quiet as with writes, and their length.
    """

    tier_bytes: int = 2816 * MIB
    segment_bytes: int = 256 * MIB
    round_bytes: int = 768 * MIB
    survey_rounds: int = 3
    rounds: int = 7
    depth: int = 32
    reads: int = 300
    small_blocks: int = 250_000
    small_segment_bytes: int = 64 * MIB
    restarts: int = 3
    slots: int = 1 << 20
    peer_rounds: int = 5
    windows: int = 8
    window_s: float = 1.5

    @property
    def small_tier_bytes(self) -> int:
        """Capacity for the small blocks: a header and a page each, and their lines in footers."""
        return self.small_blocks * 2 * SMALL_BYTES * 11 // 10 + 6 * self.small_segment_bytes

    @property
    def encryption_bytes(self) -> int:
        """Capacity of the tiers with and without keys together: two rounds each, and segments to
        make room in.
        """
        return 2 * (2 * self.round_bytes + 3 * self.segment_bytes)

    @property
    def needed_bytes(self) -> int:
        """Upper bound on the bytes on the drive at once; peers store as much as the slots hold, and
        a raw file has as much as a round.
        """
        first = self.tier_bytes + SLOTS * BLOCK_BYTES + self.round_bytes
        return max(first, self.small_tier_bytes, self.encryption_bytes) + _SPARE_BYTES


FULL = Sizes()
QUICK = Sizes(
    tier_bytes=1152 * MIB,
    segment_bytes=64 * MIB,
    round_bytes=256 * MIB,
    survey_rounds=1,
    rounds=2,
    reads=30,
    small_blocks=20_000,
    small_segment_bytes=32 * MIB,
    restarts=1,
    slots=1 << 16,
    peer_rounds=2,
    windows=2,
    window_s=0.5,
)


def check_room(folder: Path, sizes: Sizes) -> None:
    """Check the folder before anything is written.

    Raises:
        KVHearthError: ``config_invalid``: no such folder, or too little room.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--dir {folder}: {error.strerror}") from None
    if free < sizes.needed_bytes:
        raise KVHearthError(
            Reason.CONFIG_INVALID,
            f"--dir {folder}: {format_size(free)} are free, {format_size(sizes.needed_bytes)} are "
            "needed; give another folder, or --quick",
        )


GB = 1e9

FIGURES = (
    Figure("raw_write_gbs", "GB/s of writes of 2 MiB, no store in the way"),
    Figure("write_gbs", "GB/s of stores, verified and acknowledged"),
    Figure("write_of_best", "stores against the best raw way to write", ">=", 0.9),
    Figure("raw_read_gbs", "GB/s of reads of 2 MiB, no store in the way"),
    Figure("read_gbs", "GB/s of loads, every one verified"),
    Figure("read_of_best", "loads against the best raw way to read", ">=", 0.9),
    Figure("read_vs_lmcache", "loads against LMCache's fs_native, in turns", ">=", 1.0),
    Figure("read_vs_vllm_fs", "loads against vLLM's filesystem tier, in turns", ">=", 1.0),
    Figure("write_vs_lmcache", "stores against LMCache's fs_native, in turns"),
    Figure("write_vs_vllm_fs", "stores against vLLM's filesystem tier, in turns"),
    Figure("raw_mixed_gbs", "GB/s of reads and writes in turns"),
    Figure("mixed_gbs", "GB/s of loads and stores at the same time"),
    Figure("mixed_ratio", "that against raw"),
    Figure("raw_read_p99_ms", "one raw read while the drive is full of raw writes"),
    Figure("read_p50_ms", "one load while the tier is full of stores"),
    Figure("read_p99_ms", "one load while the tier is full of stores"),
    Figure(
        "loop_block_max_ms", "longest that the event loop stood still, tier saturated", "<=", 20
    ),
    Figure("loop_idle_max_ms", "the same of a loop with nothing to do: what the machine does"),
    Figure("tier_call_max_ms", "longest single call of the tier on the loop"),
    Figure("tier_call_cpu_max_ms", "most processor time of one: what is not the machine's doing"),
    Figure("cpu_s_per_gb", "processor time a GB of loads, checksums and loop included", "<=", 0.06),
    Figure("read_cpu_s_per_gb", "the same"),
    Figure("write_cpu_s_per_gb", "the same of stores", "<=", 0.1),
    Figure("raw_write_cpu_s_per_gb", "of raw writes"),
    Figure("raw_read_cpu_s_per_gb", "of raw reads"),
    Figure("write_amplification", "bytes written to the drive for each stored, only stores"),
    Figure("mixed_carried_blocks", "blocks that were read lately, written anew to make room"),
    Figure("recover_blocks_per_s", "read back from footers after a restart", ">=", 500_000),
    Figure("recover_cpu_s_per_million", "processor time of that, a million blocks"),
    Figure("recover_loop_block_max_ms", "longest that the event loop stood still meanwhile"),
    Figure("lookup_p99_while_writing", "p99 of lookups of 512 keys against quiet ones", "<=", 2),
    Figure("lookup_p50_while_writing", "p50 of the same"),
    Figure("lookup_quiet_p99_us", "lookup of 512 keys, the tier at rest"),
    Figure("lookup_writing_p99_us", "lookup of 512 keys while the tier writes"),
    Figure("lookup_written_gbs", "GB/s that the tier wrote meanwhile"),
    Figure("adopt_s_per_million_slots", "reading the arena's journal after a restart"),
    Figure("adopt_index_s_per_million_slots", "and making the core's index of it"),
)


class Result(report.Result):
    """Results of a run, filled part by part."""

    def as_json(self) -> dict[str, Any]:
        """Return the object that the verb prints."""
        return {**self.values, "spread": self.spread, "missed": missed(self.values, FIGURES)}


_KINDS = ("write", "read", "mixed")
_COLOURS = {"raw": "tab:grey", "kvhearth": "tab:orange", "lmcache": "tab:blue", "vllm": "tab:green"}


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the plot: GB/s and processor time, raw, ours, and peers' if there are any; raises as
    ``picture``.
    """
    with picture(path, 11, 4) as (speeds, costs):
        _bars(speeds, found, "gbs", _KINDS)
        speeds.set_title("GB/s at 2 MiB (whisker: spread)")
        _bars(costs, found, "cpu_s_per_gb", _KINDS[:2])
        costs.axhline(0.06, color="black")
        title = "processor seconds a GB (line: of reads)\nours verifies every byte, peers do not"
        costs.set_title(title)


def _bars(axes: Any, found: Mapping[str, Any], unit: str, kinds: tuple[str, ...]) -> None:
    contenders = {"raw": (found, "raw_"), "kvhearth": (found, "")}
    contenders |= {name: (peer, "") for name, peer in found["peers"].items()}
    width = 0.9 / len(contenders)
    for place, (side, (values, prefix)) in enumerate(contenders.items()):
        names = [f"{prefix}{kind}_{unit}" for kind in kinds]
        known = [(at, name) for at, name in enumerate(names) if name in values]
        middle = [values[name] for _, name in known]
        errors = whiskers(middle, [values["spread"][name] for _, name in known])
        at = [index + place * width for index, _ in known]
        axes.bar(at, middle, width, yerr=errors, color=_COLOURS[side], label=side, ecolor="black")
    axes.set_xticks([index + 0.4 for index in range(len(kinds))], kinds)
    axes.legend()

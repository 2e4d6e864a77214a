"""Figures of ``kvhearth bench ssd`` and their targets. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvhearth_lab.bench.local.figures import Figure, p50

GB = 1e9

FIGURES = (
    Figure("raw_write_gbs", "GB/s of writes of 2 MiB, no store in the way"),
    Figure("write_gbs", "GB/s of stores, verified and acknowledged"),
    Figure("write_ratio", "stores against raw writes", ">=", 0.9),
    Figure("raw_read_gbs", "GB/s of reads of 2 MiB, no store in the way"),
    Figure("read_gbs", "GB/s of loads, every one verified"),
    Figure("read_ratio", "loads against raw reads", ">=", 0.9),
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
    Figure("cpu_s_per_gb", "processor time a GB, the larger of the next two", "<=", 0.1),
    Figure("write_cpu_s_per_gb", "of stores, checksums and the driving loop included"),
    Figure("read_cpu_s_per_gb", "of loads, checksums and the driving loop included"),
    Figure("raw_write_cpu_s_per_gb", "of raw writes"),
    Figure("raw_read_cpu_s_per_gb", "of raw reads"),
    Figure("write_amplification", "bytes written to the drive for each stored, only stores"),
    Figure("mixed_carried_blocks", "blocks that were read lately, written anew to make room"),
    Figure("scrub_gbs", "GB/s of going through all that is stored, verifying it"),
    Figure("recover_blocks_per_s", "read back from footers after a restart", ">=", 500_000),
    Figure("recover_cpu_s_per_million", "processor time of that, a million blocks"),
    Figure("recover_loop_block_max_ms", "longest that the event loop stood still meanwhile"),
    Figure("adopt_s_per_million_slots", "reading the arena's journal after a restart"),
    Figure("adopt_index_s_per_million_slots", "and making the core's index of it"),
)


@dataclass
class Result:
    """Results of a run, filled part by part; ``spread`` has least and greatest round."""

    values: dict[str, Any] = field(default_factory=dict)
    spread: dict[str, list[float]] = field(default_factory=dict)

    def put(self, name: str, samples: Sequence[float], digits: int = 3) -> None:
        """Record a median with its spread."""
        self.values[name] = round(p50(samples), digits)
        self.spread[name] = [round(min(samples), digits), round(max(samples), digits)]

    def as_json(self) -> dict[str, Any]:
        """Return the object that the verb prints."""
        return {**self.values, "spread": self.spread, "missed": missed(self.values)}


def missed(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the figures that do not reach their target."""
    return [each.name for each in FIGURES if each.good(values.get(each.name)) is False]

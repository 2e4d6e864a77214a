"""Figures of ``kvhearth bench ssd``: their targets, their collection and their plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvhearth_lab.bench import report
from kvhearth_lab.bench.report import Figure, missed, picture, whiskers

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
        costs.axhline(0.1, color="black")
        title = "processor seconds a GB (line: target)\nours verifies every byte, peers do not"
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

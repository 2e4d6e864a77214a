"""Figures of ``kvhearth bench local``: their targets, and their computation from samples. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One row of the table.

    Attributes:
        name: key in the JSON object.
        what: description for a person.
        sign, bound: ``>=`` or ``<=`` a target; an empty sign stands for none.
    """

    name: str
    what: str
    sign: str = ""
    bound: float = 0.0

    def good(self, value: object) -> bool | None:
        """Whether ``value`` reaches the target; None without a target or without a value."""
        if not self.sign or isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return value >= self.bound if self.sign == ">=" else value <= self.bound

    @property
    def target(self) -> str:
        """The target as shown in the table."""
        return f"{self.sign} {self.bound:g}" if self.sign else ""


FIGURES = (
    Figure("memcpy_gbs", "GB/s of a plain copy, one thread, block by block of 2 MiB"),
    Figure("store_ratio", "reserve, copy, commit of 128 x 2 MiB against memcpy", ">=", 0.8),
    Figure("store_sealed_ratio", "the same with the client's checksums", ">=", 0.65),
    Figure("load_ratio", "lookup, copy, verify against memcpy", ">=", 0.75),
    Figure("load_unverified_ratio", "lookup and copy against memcpy", ">=", 0.9),
    Figure("first_touch_ratio", "first store into a mapping that was never touched"),
    Figure("memcpy_one_p50_us", "plain copy of one block of 2 MiB"),
    Figure("memcpy_one_cached_p50_us", "the same pair again and again: from the cache"),
    Figure("store_one_p50_us", "copy and commit of one block, slots in hand"),
    Figure("store_one_ratio", "that against memcpy of one block", "<=", 3.5),
    Figure("store_one_sealed_p50_us", "copy, checksum and commit of one block"),
    Figure("load_one_p50_us", "lookup, verify and copy of one block, release behind"),
    Figure("load_one_ratio", "that against memcpy of one block", "<=", 3.5),
    Figure("load_one_unverified_p50_us", "lookup and copy of one block"),
    Figure("rpc_one_p50_us", "an empty unary gRPC call after a plain copy"),
    Figure("rpc_p50_us", "an empty unary gRPC call"),
    Figure("rpc_p99_us", "an empty unary gRPC call"),
    Figure("frame_p50_us", "an empty call as a frame: what the client's calls are"),
    Figure("frame_p99_us", "an empty call as a frame"),
    Figure("lookup512_p50_us", "lookup and lease of 512 keys, 10 k blocks"),
    Figure("lookup512_p99_us", "lookup and lease of 512 keys, 10 k blocks"),
    Figure("lookup512_ratio", "p50 against the empty call", "<=", 2.5),
    Figure("lookup512_p99_ratio", "p99 against the empty call's p99", "<=", 3.0),
    Figure("lookup512_1m_p50_us", "the same at all blocks, chain order"),
    Figure("lookup512_1m_ratio", "that against the empty call", "<=", 3.0),
    Figure("lookup4096_p50_us", "lookup and lease of 4096 keys at all blocks"),
    Figure("core_us_per_key", "the core alone, 512 keys in chain order", "<=", 0.5),
    Figure("clients8_lookups_per_s", "8 client processes, 128 keys a lookup", ">=", 3000),
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


def p50(samples: Sequence[float]) -> float:
    """Return the median."""
    return statistics.median(samples)


def p99(samples: Sequence[float]) -> float:
    """Return the 99th percentile: the sample that at most a hundredth of all exceed."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


def median_of(samples: Sequence[float]) -> tuple[float, float, float]:
    """Return the median and the ends of its 95 % interval, by order statistics, so for any
    distribution.
    """
    ordered, count = sorted(samples), len(samples)
    reach = 0.98 * math.sqrt(count)
    low = ordered[max(math.floor(count / 2 - reach), 0)]
    high = ordered[min(math.ceil(count / 2 + reach), count - 1)]
    return p50(ordered), low, high


def us(seconds: float) -> float:
    """Convert to microseconds, rounded to a tenth."""
    return round(seconds * 1e6, 1)


def ratio_of(baselines: Sequence[float], times: Sequence[float]) -> list[float]:
    """Divide baselines by times, round by round: 1 is as fast as the baseline, 0.5 half as fast."""
    return [base / time for base, time in zip(baselines, times, strict=True)]


@dataclass
class Result:
    """Results of a run, filled part by part.

    Attributes:
        values: figures by name, as described in ``FIGURES``.
        spread: least and greatest round of each ratio; for the metrics, the interval of
            ``median_of``.
        asked, kept: blocks of all stores.
        book_errors: books errors that the daemons reported at their end.
    """

    values: dict[str, Any] = field(default_factory=dict)
    spread: dict[str, list[float]] = field(default_factory=dict)
    asked: int = 0
    kept: int = 0
    book_errors: list[str] = field(default_factory=list)

    def ratio(self, name: str, ratios: Sequence[float]) -> None:
        """Record a median with its spread."""
        self.values[name] = round(p50(ratios), 3)
        self.spread[name] = [round(min(ratios), 3), round(max(ratios), 3)]

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
        return {**values, "books": books, "spread": self.spread, "missed": missed(values)}


def missed(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the figures that do not reach their target."""
    return [each.name for each in FIGURES if each.good(values.get(each.name)) is False]

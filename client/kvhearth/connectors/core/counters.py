"""Counters and gauges of a connector, for the engine's log line and its ``/metrics``."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

COUNTERS = {
    "lookups": "Requests for which KVHearth was asked.",
    "lookup_late": "Requests that went without because the answer took too long.",
    "lookup_failed": "Requests for which there was no answer.",
    "hit_tokens": "Prompt tokens that KVHearth had beyond the engine's own.",
    "declined_tokens": "Of these, tokens recomputed since that was estimated to be faster.",
    "hit_engine_tokens": "Prompt tokens of admitted requests that the engine had itself.",
    "hit_dram_tokens": "Tokens loaded that were in the daemon's memory when it was asked.",
    "hit_ssd_tokens": "Tokens loaded that had to climb from SSD for their request.",
    "climb_waits": "Requests that waited for blocks to climb from SSD.",
    "climb_late": "Of these, requests that went on before all had climbed.",
    "climb_seconds": "Time until blocks had climbed for requests that waited, added up.",
    "load_requests": "Loads that began.",
    "load_tokens": "Tokens whose KV was loaded.",
    "load_bytes": "Bytes copied into the engine's pages, over all ranks.",
    "load_failed": "Loads that failed; their requests were recomputed.",
    "load_seconds": "Time from the begin of loads to their end, added up.",
    "store_blocks": "Blocks copied out and handed to the daemon.",
    "store_bytes": "Bytes copied out of the engine's pages, over all ranks.",
    "store_failed": "Blocks whose copy or commit failed.",
    "store_duplicates": "Blocks that the daemon had already.",
    "store_skipped": "Full blocks that were never stored: no empty slot, or too many blocks held.",
    "troubles": "Calls of the connector that failed and did without the cache.",
}
GAUGES = {
    "held_blocks": "KV blocks of the engine that stores keep from reuse.",
    "attached": "1 while the scheduler is attached to a daemon.",
}


class Counters:
    """Counts since the last ``take``. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a counter of ``COUNTERS``."""
        with self._lock:
            self._counts[name] = self._counts.get(name, 0) + amount

    def take(self) -> dict[str, float]:
        """Return all counts since the last call, without zeros."""
        if not self._counts:
            return {}
        with self._lock:
            taken, self._counts = self._counts, {}
        return {name: value for name, value in taken.items() if value}


def merged(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, float]:
    """Add up counters; keep the larger value of each gauge."""
    total = {name: float(value) for name, value in left.items()}
    for name, value in right.items():
        if name in GAUGES:
            total[name] = max(total.get(name, 0.0), float(value))
        else:
            total[name] = total.get(name, 0.0) + float(value)
    return total


def summary(data: Mapping[str, Any]) -> dict[str, float]:
    """Return the values for the engine's log line about an interval."""
    shown = ("load_tokens", "load_failed", "store_blocks", "store_failed", "lookup_late")
    line = {name: data[name] for name in shown if data.get(name)}
    if data.get("load_seconds") and data.get("load_bytes"):
        line["load_GB_per_s"] = round(data["load_bytes"] / data["load_seconds"] / 1e9, 2)
    return line

"""Figures of ``kvhearth bench stalls`` and their targets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvhearth_lab.bench.local.figures import Figure

CALL_MS_MAX = 5.0

FIGURES = (
    Figure("growth_ms", "longest call while an empty index grows", "<=", CALL_MS_MAX),
    Figure("namespaces_ms", "the same while a full arena of many makes room", "<=", CALL_MS_MAX),
    Figure("bad_blocks_ms", "the same while 1,024 bad blocks are removed", "<=", CALL_MS_MAX),
    Figure("clients_ms", "the same while many clients work at once", "<=", CALL_MS_MAX),
    Figure("bump_ms", "the same at an epoch bump, and at stores after it", "<=", CALL_MS_MAX),
    Figure("evict_ms", "the same while an operator evicts a namespace", "<=", CALL_MS_MAX),
    Figure("longest_call_cpu_ms", "the longest of them", "<=", CALL_MS_MAX),
    Figure("timer_late_max_ms", "greatest lateness of a timer of 1 ms; other processes count"),
)
PARTS = tuple(each.name for each in FIGURES[:6])


def missed(values: Mapping[str, Any]) -> list[str]:
    """Return the names of the figures that do not reach their target."""
    return [each.name for each in FIGURES if each.good(values.get(each.name)) is False]

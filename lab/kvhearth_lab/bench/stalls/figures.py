"""Figures of ``kvhearth bench stalls``, their targets and their plot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvhearth_lab.bench.report import Figure, picture

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


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Write the plot: the longest call and the timer's lateness of each part; raises as
    ``picture``.
    """
    with picture(path, 11, 4) as (calls, timers):
        calls.barh(PARTS, [found[name] for name in PARTS], color="tab:orange")
        calls.axvline(CALL_MS_MAX, color="black")
        calls.set_title("longest call, CPU milliseconds (line: target)")
        timers.barh(PARTS, [found["timer_late_ms"][name] for name in PARTS], color="tab:blue")
        timers.set_title("greatest lateness of a timer of 1 ms, milliseconds")
        for axes in (calls, timers):
            axes.invert_yaxis()

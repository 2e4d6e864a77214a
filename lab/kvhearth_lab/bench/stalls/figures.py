"""Sizes and figures of ``kvhearth bench stalls``: targets and plot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvhearth_lab.bench.report import Figure, picture

SLOT_BYTES = 64
"""Size of a slot. The loop's work does not depend on it, and five million slots take 0.3 GB."""
SLAB_BYTES = 2 << 20
SLAB_SLOTS = SLAB_BYTES // SLOT_BYTES
RESERVED = 2048
"""Number of blocks in a reservation: a prompt of 32,768 tokens."""
COMMITTED = 512
"""Number of blocks in a commit: an engine's step of 8,192 tokens."""
BAD = 1024


@dataclass(frozen=True)
class Sizes:
    """Counts and seconds of one run.

    Attributes:
        growth: blocks committed into an empty daemon.
        namespaces: number of namespaces that fill the arena, run by run.
        full_slabs: slabs of the arena that they fill.
        rounds: reservations of ``RESERVED`` blocks from a full arena, each followed by its commits.
        many: blocks of the namespace that is bumped and evicted.
        clients, clients_s: number of engines that work at once, and their duration.
        repeats: number of runs of each part; a figure is the least of them.
    """

    growth: int
    namespaces: tuple[int, ...]
    full_slabs: int
    rounds: int
    many: int
    clients: int
    clients_s: float
    repeats: int


FULL = Sizes(
    growth=5_000_000,
    namespaces=(1, 100, 1000),
    full_slabs=8,
    rounds=8,
    many=1_000_000,
    clients=64,
    clients_s=20.0,
    repeats=3,
)
QUICK = Sizes(
    growth=20_000,
    namespaces=(1, 10),
    full_slabs=1,
    rounds=2,
    many=20_000,
    clients=8,
    clients_s=1.0,
    repeats=1,
)


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

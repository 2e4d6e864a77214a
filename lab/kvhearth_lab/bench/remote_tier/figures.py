"""Sizes and figures of ``kvhearth bench remote-tier``: targets, and the driver of a URL."""

from __future__ import annotations

from dataclasses import dataclass

from kvhearth_lab.bench.report import Figure

MIB = 1 << 20
BATCH = 32
"""Blocks of a batch."""


@dataclass(frozen=True)
class Sizes:
    """Counts of one run.

    Attributes:
        blocks: sizes of a block, in bytes.
        rounds: alternating rounds of each way; a figure is their median.
        lookups: lookups of each side.
    """

    blocks: tuple[int, ...]
    rounds: int
    lookups: int


FULL = Sizes((2 * MIB, 256 << 10), 9, 1500)
QUICK = Sizes((256 << 10,), 2, 200)

_RAW_LEAST = {"null": 0.45, "valkey": 0.5}


def figures_of(driver: str) -> list[Figure]:
    """Return the figures of a driver's remote at one size of block."""
    least = _RAW_LEAST.get(driver)
    bound = ("", 0.0) if least is None else (">=", least)
    return [
        Figure("put_ratio", "puts, of a raw socket's GB/s", *bound),
        Figure("get_ratio", "gets, of a raw socket's GB/s", *bound),
        Figure("vs_plain_put", "puts, of the driver's in a plain loop", ">=", 0.9),
        Figure("vs_plain_get", "gets, of the driver's in a plain loop", ">=", 0.9),
        Figure("cpu_s_per_gb", "processor time beyond the plain loop's, s/GB", "<=", 0.15),
        Figure("copy_gb_s", "records in the open on one thread: copied and summed, GB/s"),
        Figure("seal_gb_s", "sealed, GB/s"),
        Figure("open_gb_s", "opened, GB/s"),
    ]


LOOKUP_FIGURES = [
    Figure("lookup_warm_ratio", "lookups, remote known, over those without one", "<=", 1.1),
    Figure("lookup_dead_ratio", "the same, nobody at the remote's address", "<=", 1.1),
    Figure("lookup_stalled_ratio", "the same, a remote that never answers", "<=", 1.1),
    Figure("keys_asked", "keys of 512 that the remote is asked for at first", "<=", 24),
]
STALL_FIGURES = [
    Figure("stall_told_s", "a stalled server: told after the deadline, s", "<=", 0.05),
    Figure("stall_freed_s", "a stalled server: slots back after the deadline, s", "<=", 0.5),
    Figure("late_bytes", "bytes written to slots after that", "<=", 0),
]

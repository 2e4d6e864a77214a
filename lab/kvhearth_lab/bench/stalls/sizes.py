"""Sizes of a run of ``kvhearth bench stalls``."""

from __future__ import annotations

from dataclasses import dataclass

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

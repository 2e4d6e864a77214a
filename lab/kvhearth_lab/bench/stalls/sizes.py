"""How much a run of ``kvhearth bench stalls`` measures."""

from __future__ import annotations

from dataclasses import dataclass

SLOT_BYTES = 64
"""The loop does not care how long blocks are, and five million of these take 0.3 GB."""
SLAB_BYTES = 2 << 20
SLAB_SLOTS = SLAB_BYTES // SLOT_BYTES
RESERVED = 2048
"""Blocks of a reservation: a prompt of 32,768 tokens."""
COMMITTED = 512
"""Blocks of a commit: an engine's step of 8,192 tokens."""
BAD = 1024


@dataclass(frozen=True)
class Sizes:
    """Counts and seconds of one run.

    Attributes:
        growth: blocks that are committed into an empty daemon.
        namespaces: how many of them fill the arena, run by run.
        full_slabs: of the arena that they fill.
        rounds: reservations of ``RESERVED`` blocks from a full arena, each followed by its commits.
        many: blocks of the namespace that is bumped and evicted.
        clients, clients_s: how many engines work at once, and for how long.
    """

    growth: int
    namespaces: tuple[int, ...]
    full_slabs: int
    rounds: int
    many: int
    clients: int
    clients_s: float


FULL = Sizes(
    growth=5_000_000,
    namespaces=(1, 100, 1000),
    full_slabs=8,
    rounds=8,
    many=1_000_000,
    clients=64,
    clients_s=20.0,
)
QUICK = Sizes(
    growth=20_000,
    namespaces=(1, 10),
    full_slabs=1,
    rounds=2,
    many=20_000,
    clients=8,
    clients_s=1.0,
)

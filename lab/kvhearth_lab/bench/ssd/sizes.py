"""Sizes of a run of ``kvhearth bench ssd``, and its need of room on the drive."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.config.value_types import format_size
from kvhearth_server.tiers.ssd.format import PAGE_BYTES

MIB = 1 << 20
BLOCK_BYTES = 2 * MIB
SLOTS = 160
"""Number of blocks that are stored from, and of blocks that are loaded into."""
BATCH = 64
BATCHES_OUT = 2
"""Number of batches under way, with room left for half of one: 128 MiB each and 256 MiB in all, as
the daemon's portions are.
"""
SMALL_BYTES = PAGE_BYTES
"""Size of a block in the restarts; the length of a block makes no difference to a footer."""
_SPARE_BYTES = 256 * MIB


@dataclass(frozen=True)
class Sizes:
    """Bytes and counts of one run.

    Attributes:
        tier_bytes, segment_bytes: capacity of the tier and size of its files.
        round_bytes: bytes written, read or both in each turn; also the size of the raw file.
        rounds: turns of each kind.
        depth: concurrent requests in the kernel, of the tier and raw.
        reads: single blocks that are read while the drive is full of writes.
        small_blocks, small_segment_bytes: blocks recovered at a restart, and size of their files.
        restarts: number of restarts.
        slots: slots of the arena whose journal is read.
        peer_rounds: stores and loads of each peer.
    """

    tier_bytes: int = 2816 * MIB
    segment_bytes: int = 256 * MIB
    round_bytes: int = 768 * MIB
    rounds: int = 7
    depth: int = 32
    reads: int = 300
    small_blocks: int = 250_000
    small_segment_bytes: int = 64 * MIB
    restarts: int = 3
    slots: int = 1 << 20
    peer_rounds: int = 5

    @property
    def small_tier_bytes(self) -> int:
        """Capacity for the small blocks: a header and a page each, and their lines in footers."""
        return self.small_blocks * 2 * SMALL_BYTES * 11 // 10 + 6 * self.small_segment_bytes

    @property
    def needed_bytes(self) -> int:
        """Upper bound on the bytes on the drive at once; peers store as much as the slots hold."""
        first = self.tier_bytes + SLOTS * BLOCK_BYTES
        return max(first, self.small_tier_bytes) + _SPARE_BYTES


FULL = Sizes()
QUICK = Sizes(
    tier_bytes=1152 * MIB,
    segment_bytes=64 * MIB,
    round_bytes=256 * MIB,
    rounds=2,
    reads=30,
    small_blocks=20_000,
    small_segment_bytes=32 * MIB,
    restarts=1,
    slots=1 << 16,
    peer_rounds=2,
)


def check_room(folder: Path, sizes: Sizes) -> None:
    """Check the folder before anything is written.

    Raises:
        KVHearthError: ``config_invalid``: no such folder, or too little room.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise KVHearthError(Reason.CONFIG_INVALID, f"--dir {folder}: {error.strerror}") from None
    if free < sizes.needed_bytes:
        raise KVHearthError(
            Reason.CONFIG_INVALID,
            f"--dir {folder}: {format_size(free)} are free, {format_size(sizes.needed_bytes)} are "
            "needed; give another folder, or --quick",
        )

"""Jumping clocks for one process; ``harness.daemon_main`` runs a daemon with them.

The machine's clock is shared by all processes and must not be set. The daemon therefore runs
unchanged, and only its ``time.time`` and ``time.monotonic`` add offsets from a file: two numbers of
seconds, for the wall clock (either sign) and for the monotonic one (never less than before, as the
kernel promises).
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path

_FIELDS = struct.Struct("<dd")


def set_offsets(path: Path, wall_s: float, monotonic_s: float) -> None:
    """Write the offsets of a daemon's clocks; a running one follows at once."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, _FIELDS.pack(wall_s, monotonic_s), 0)
    finally:
        os.close(descriptor)


def follow(path: Path) -> None:
    """Make this process's clocks follow the file; call it before anything else is imported."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    page = mmap.mmap(descriptor, _FIELDS.size, prot=mmap.PROT_READ)
    os.close(descriptor)
    wall, monotonic = time.time, time.monotonic

    def skewed_wall() -> float:
        return wall() + float(_FIELDS.unpack_from(page)[0])

    def skewed_monotonic() -> float:
        return monotonic() + float(_FIELDS.unpack_from(page)[1])

    time.time, time.monotonic = skewed_wall, skewed_monotonic

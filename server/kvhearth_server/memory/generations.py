"""The generations: one u32 a slot in a sealed memfd that clients map read-only."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np

from kvhearth.model import U32

_F_ADD_SEALS = 1033
_SEAL_SHRINK, _SEAL_GROW, _SEAL_FUTURE_WRITE, _SEAL_SEAL = 0x2, 0x4, 0x10, 0x1


class Generations:
    """The daemon's writable mapping of the memfd. Nobody gets another after the seal."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.fd = os.memfd_create("kvhearth-generations", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        size = -(-max(count, 1) * 4 // mmap.PAGESIZE) * mmap.PAGESIZE
        os.ftruncate(self.fd, size)
        self._map = mmap.mmap(self.fd, size)
        seals = _SEAL_SHRINK | _SEAL_GROW | _SEAL_FUTURE_WRITE | _SEAL_SEAL
        fcntl.fcntl(self.fd, _F_ADD_SEALS, seals)
        self.array: U32 = np.frombuffer(self._map, np.uint32, count)

    def close(self) -> None:
        """Close the descriptor; the mapping goes with the last array that uses it."""
        os.close(self.fd)

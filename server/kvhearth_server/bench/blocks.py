"""Blocks of 2 MiB in this process, and the plain copy that everything is compared with."""

from __future__ import annotations

import contextlib
import mmap
import time

import numpy as np

from kvhearth.model import I64, U8
from kvhearth_server.bench.sizes import BATCH, PAGE_BYTES

_MAP_HUGETLB = 0x40000
_HUGE = "2MiB"
_OTHER = "4KiB or transparent"


def blocks(seed: int) -> tuple[U8, str]:
    """A batch of distinct blocks, touched, shape (BATCH, PAGE_BYTES), and the kind of its pages:
    huge ones if enough are free, as an engine's pinned pool would be.
    """
    size, kind = BATCH * PAGE_BYTES, _HUGE
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | _MAP_HUGETLB)
    except OSError:
        memory, kind = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), _OTHER
        with contextlib.suppress(OSError):  # a kernel without transparent huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    made = np.frombuffer(memory, np.uint8).reshape(BATCH, PAGE_BYTES)
    random = np.random.default_rng(seed)
    made[:] = random.integers(0, 256, PAGE_BYTES, np.uint8)
    made[:, 0] = np.arange(BATCH)
    return made, kind


def shuffled() -> I64:
    """All blocks in random order, as a busy engine's pages are: few to join into longer copies."""
    return np.random.default_rng(2).permutation(BATCH).astype(np.int64)


def plain_batch(source: U8, target: U8) -> float:
    """Seconds to copy a batch, block by block."""
    start = time.perf_counter()
    for index in range(BATCH):
        np.copyto(target[index], source[index])
    return time.perf_counter() - start


def plain_one(source: U8, target: U8, index: int) -> float:
    """Seconds to copy one block."""
    start = time.perf_counter()
    np.copyto(target[index], source[index])
    return time.perf_counter() - start

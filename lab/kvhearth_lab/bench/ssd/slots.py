"""Slots as in the arena, in huge pages if there are any: half to store from, half to load into."""

from __future__ import annotations

import mmap
from collections.abc import Iterable

import numpy as np

from kvhearth.checksum import checksum_of
from kvhearth.model import U8, Records
from kvhearth_lab.bench.ssd.sizes import BATCH, BLOCK_BYTES, SLOTS
from kvhearth_server.tiers.base import ADDRESS_DTYPE, BlockSpec, LoadBatch, StoreBatch

_MAP_HUGETLB = 0x40000
FAMILY = BlockSpec(bytes(32), 0, 1, BLOCK_BYTES)


class Slots:
    """Memory for blocks of 2 MiB; the stored bytes differ from slot to slot."""

    def __init__(self) -> None:
        size, flags = 2 * SLOTS * BLOCK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self.pages = "2MiB"
        try:
            mapping = mmap.mmap(-1, size, flags | _MAP_HUGETLB)
        except OSError:
            self.pages, mapping = "4KiB or transparent", mmap.mmap(-1, size, flags)
        self.bytes: U8 = np.frombuffer(mapping, np.uint8)
        self.address = int(self.bytes.ctypes.data)
        words = self.bytes.view(np.uint64)
        half = len(words) // 2
        words[:half] = np.random.default_rng(1).integers(0, 1 << 63, half, np.uint64)
        words[half:] = 0
        sources = self.bytes[: SLOTS * BLOCK_BYTES].reshape(SLOTS, BLOCK_BYTES)
        digests = [checksum_of(slot.data) for slot in sources]
        self._sums: Records = np.frombuffer(b"".join(digests), "V16")

    def source(self, number: int) -> int:
        """Return the address that block ``number`` is stored from."""
        return self.address + number % SLOTS * BLOCK_BYTES

    def target(self, number: int) -> int:
        """Return the address that block ``number`` is loaded into."""
        return self.address + (SLOTS + number % SLOTS) * BLOCK_BYTES

    def store_batch(self, numbers: Iterable[int]) -> StoreBatch:
        """Return a batch that stores blocks by their numbers."""
        names = np.array(list(numbers), np.uint64)
        slots = (names % SLOTS).astype(np.int64)
        sums = self._sums[slots].reshape(-1, 1)
        return StoreBatch(FAMILY, keys_of(names.tolist()), _places(slots), sums, names, names)

    def load_batch(self, keys: list[bytes], place: int, *, use: bool = True) -> LoadBatch:
        """Return a batch that loads any blocks into its own place of ``SLOTS // BATCH``: two
        batches under way must not share one.
        """
        slots = SLOTS + place * BATCH + np.arange(len(keys))
        return LoadBatch(FAMILY, keys, _places(slots), is_use=use)


def keys_of(numbers: Iterable[int]) -> list[bytes]:
    """Return keys of 32 bytes."""
    return [b"bench-%026d" % number for number in numbers]


def _places(slots: Records) -> Records:
    places = np.zeros((len(slots), 1), ADDRESS_DTYPE)
    places["offset"][:, 0] = slots * BLOCK_BYTES
    return places

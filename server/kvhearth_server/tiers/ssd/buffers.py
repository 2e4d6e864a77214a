"""Aligned memory of the tier itself: header pages of records in flight, and buffers."""

from __future__ import annotations

import mmap

import numpy as np

from kvhearth.model import U8, Records
from kvhearth_server.tiers.ssd.format import PAGE_BYTES, RECORD_BYTES


class HeaderPages:
    """A fixed number of pages, each for the header of a record in flight."""

    def __init__(self, count: int) -> None:
        self._mapping = mmap.mmap(-1, count * PAGE_BYTES)
        self._bytes: U8 = np.frombuffer(self._mapping, np.uint8).reshape(count, PAGE_BYTES)
        self._address = int(self._bytes.ctypes.data)
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of pages that can be taken."""
        return len(self._free)

    def take(self, records: Records) -> list[int]:
        """Write headers to as many pages and return the pages' numbers. There must be enough."""
        count = len(records)
        pages = self.lend(count)
        self._bytes[pages, :RECORD_BYTES] = records.view(np.uint8).reshape(count, RECORD_BYTES)
        return pages

    def lend(self, count: int) -> list[int]:
        """Take ``count`` pages without writing to them. There must be enough."""
        pages = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return pages

    def address(self, page: int) -> int:
        """Return the address of a page."""
        return self._address + page * PAGE_BYTES

    def give(self, pages: list[int]) -> None:
        """Give back pages that the device no longer uses."""
        self._free.extend(pages)


class Buffer:
    """A piece of aligned memory for one request; it lives as long as something refers to it."""

    def __init__(self, content: bytes | int) -> None:
        size = content if isinstance(content, int) else len(content)
        self.bytes: U8 = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self.address = int(self.bytes.ctypes.data)
        if not isinstance(content, int):
            self.bytes[:] = np.frombuffer(content, np.uint8)

    def __len__(self) -> int:
        return len(self.bytes)

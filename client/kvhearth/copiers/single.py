"""One block: judged as a ``Batch`` judges many, by plain numbers. For arrays of one, numpy's calls
cost about as much as the copy.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvhearth.copiers.base import BlockFailure, Done, Ticket
from kvhearth.copiers.batch import HeldArena, Run
from kvhearth.layout import PagedKV
from kvhearth.model import (
    CHECKSUM_BYTES,
    EXTENT_RECORD,
    FLAG_SUMMED,
    FLAG_VERIFY,
    I64,
    U8,
    Records,
)


class _Extent(NamedTuple):
    """The fields of ``EXTENT_DTYPE``."""

    slot: int
    segment: int
    flags: int
    offset: int
    length: int
    generation: int
    checksum: bytes


class Single:
    """Whether a block is still ok, and why not.

    Args:
        kv: the registered pages.
        arena: of the boot that the copier serves, held.
        boot_id: of the boot that the extent came from.
        pages, extents: of one block, as returned by ``own_arrays``.

    Attributes:
        failure: the first reason, or None.
        run: the block's place.
    """

    def __init__(
        self, kv: PagedKV, arena: HeldArena, boot_id: str, pages: I64, extents: Records
    ) -> None:
        self._arena = arena
        self._page_bytes = kv.page_bytes
        self._extent = extent = _Extent(*EXTENT_RECORD.unpack(extents.tobytes()))
        page = int(pages[0])
        self.run = Run([0], kv.page_bytes, extent.segment, extent.offset, page)
        self.failure: BlockFailure | None = None
        if boot_id != arena.boot_id or not arena.alive():
            self.failure = BlockFailure.STALE_BOOT
        elif not self._fits():
            self.failure = BlockFailure.BAD_EXTENT
        elif not 0 <= page < kv.page_count:
            self.failure = BlockFailure.BAD_PAGE
        else:
            self.check_generation()

    def _fits(self) -> bool:
        extent, length = self._extent, self._page_bytes
        return (
            extent.length == length
            and extent.offset + length <= self._arena.segments.get(extent.segment, 0)
            and extent.slot < len(self._arena.generations)
        )

    def check_generation(self) -> None:
        """Fail the block if its slot has left use."""
        if self._arena.generations.item(self._extent.slot) != self._extent.generation:
            self.failure = BlockFailure.STALE_GENERATION

    def expected(self, *, chosen: bool) -> bytes | None:
        """The checksum to compare, if it is ``chosen`` or due; see ``Batch.expected``."""
        summed = self._extent.flags & FLAG_SUMMED
        due = self._extent.flags & FLAG_VERIFY
        if due and not summed and self.failure is None:
            self.failure = BlockFailure.CHECKSUM_MISMATCH
        return self._extent.checksum if summed and (chosen or due) else None

    def judge(self) -> None:
        """After the copy; see ``Batch.judge``."""
        if self.failure is not None:
            return
        if not self._arena.alive():
            self.failure = BlockFailure.STALE_BOOT
        else:
            self.check_generation()

    def done(self, ticket: Ticket, checksum: bytes | None, seconds: float) -> Done:
        """The outcome; the sum of a failed block is zeros, None stands for none taken."""
        ok = self.failure is None
        sums: U8 | None = None
        if checksum is not None:
            data = checksum if ok else bytes(CHECKSUM_BYTES)
            sums = np.frombuffer(bytearray(data), np.uint8).reshape(1, CHECKSUM_BYTES)
        reasons = {} if self.failure is None else {self.failure.value: 1}
        return Done(ticket, np.array([ok]), sums, self._page_bytes if ok else 0, seconds, reasons)

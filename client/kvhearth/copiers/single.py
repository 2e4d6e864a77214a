"""One block: judged as a ``Batch`` judges many, by plain numbers. For arrays of one, numpy's calls
cost about as much as the copy.
"""

from __future__ import annotations

import numpy as np

from kvhearth.copiers.base import BlockFailure, Done, Ticket
from kvhearth.copiers.batch import HeldArena
from kvhearth.layout import PagedKV
from kvhearth.model import (
    CHECKSUM_BYTES,
    EXTENT_RECORD,
    FLAG_SUMMED,
    FLAG_VERIFY,
    U8,
)


class Single:
    """Whether a block is still ok, and why not.

    Args:
        kv: the registered pages.
        arena: of the boot that the copier serves, held.
        boot_id: of the boot that the extent came from.
        page: of the block.
        record: its extent's bytes.

    Attributes:
        failure: the first reason, or None.
        page, segment, offset: the block's place.
    """

    def __init__(
        self, kv: PagedKV, arena: HeldArena, boot_id: str, page: int, record: bytes
    ) -> None:
        slot, segment, flags, offset, length, generation, checksum = EXTENT_RECORD.unpack(record)
        self.page = page
        self.segment: int = segment
        self.offset: int = offset
        self.failure: BlockFailure | None = None
        self._arena = arena
        self._page_bytes = page_bytes = kv.page_bytes
        self._slot: int = slot
        self._generation: int = generation
        self._flags: int = flags
        self._checksum: bytes = checksum
        if boot_id != arena.boot_id or not arena.alive():
            self.failure = BlockFailure.STALE_BOOT
        elif (
            length != page_bytes
            or offset + page_bytes > arena.segments.get(segment, 0)
            or slot >= len(arena.generations)
        ):
            self.failure = BlockFailure.BAD_EXTENT
        elif not 0 <= page < kv.page_count:
            self.failure = BlockFailure.BAD_PAGE
        elif arena.generations.item(slot) != generation:
            self.failure = BlockFailure.STALE_GENERATION

    def expected(self, *, chosen: bool) -> bytes | None:
        """The checksum to compare, if it is ``chosen`` or due; see ``Batch.expected``."""
        summed = self._flags & FLAG_SUMMED
        due = self._flags & FLAG_VERIFY
        if due and not summed and self.failure is None:
            self.failure = BlockFailure.CHECKSUM_MISMATCH
        return self._checksum if summed and (chosen or due) else None

    def judge(self) -> None:
        """After the copy; see ``Batch.judge``."""
        if self.failure is not None:
            return
        if not self._arena.alive():
            self.failure = BlockFailure.STALE_BOOT
        elif self._arena.generations.item(self._slot) != self._generation:
            self.failure = BlockFailure.STALE_GENERATION

    def done(self, ticket: Ticket, checksum: bytes | None, seconds: float) -> Done:
        """The outcome; the sum of a failed block is zeros, None stands for none taken."""
        ok = self.failure is None
        sums: U8 | None = None
        if checksum is not None:
            data = checksum if ok else bytes(CHECKSUM_BYTES)
            sums = np.frombuffer(bytearray(data), np.uint8).reshape(1, CHECKSUM_BYTES)
        reasons = {} if self.failure is None else {self.failure.value: 1}
        return Done(ticket, np.array([ok]), sums, self._page_bytes if ok else 0, seconds, reasons)

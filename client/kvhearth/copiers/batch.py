"""One batch of blocks: checked before memory is touched, cut into runs, judged after the copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np

from kvhearth.copiers.base import ArenaView, BlockFailure, Done, Ticket
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import (
    CHECKSUM_BYTES,
    EXTENT_DTYPE,
    EXTENT_RECORD,
    FLAG_SUMMED,
    FLAG_VERIFY,
    I64,
    U8,
    U32,
    Bools,
    Records,
)


class Sizes(Protocol):
    """Pages to choose from, and bytes of a block in the arena: of ``PagedKV`` without a codec."""

    @property
    def page_count(self) -> int:
        """Number of engine pages."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a block in the arena."""


class Run(NamedTuple):
    """Blocks whose pages follow each other and whose slots lie at equal distances in one segment.

    Attributes:
        positions: positions of the blocks in the batch.
        step_bytes: distance from one slot to the next.
        segment: segment of all of them.
        offset: offset of the first slot, in bytes.
        page: page of the first block.
    """

    positions: list[int]
    step_bytes: int
    segment: int
    offset: int
    page: int


class Runs:
    """The runs of a batch, in its order; planned all at once, each created when it is iterated.

    Args:
        positions: positions of all blocks, shape (n,).
        bounds: indices at which runs begin among them, and n, shape (runs + 1,).
        step_bytes: distance from one slot to the next.
        places: (segment, offset, page) of the runs' first blocks, each of shape (runs,).
    """

    def __init__(
        self, positions: I64, bounds: I64, step_bytes: int, places: tuple[I64, I64, I64]
    ) -> None:
        self._positions = positions
        self._bounds = bounds
        self._step_bytes = step_bytes
        self._places = places

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __iter__(self) -> Iterator[Run]:
        positions, bounds = self._positions.tolist(), self._bounds.tolist()
        segments, offsets, pages = (column.tolist() for column in self._places)
        for index, start in enumerate(bounds[:-1]):
            yield Run(
                positions[start : bounds[index + 1]],
                self._step_bytes,
                segments[index],
                offsets[index],
                pages[index],
            )


class EncodedSizes(NamedTuple):
    """``Sizes`` of pages whose blocks a codec encodes."""

    page_count: int
    page_bytes: int


class HeldArena:
    """References into an arena, taken once: closing it elsewhere cannot unmap memory during a copy.

    Args:
        arena: arena of the boot that the copier serves.
    """

    def __init__(self, arena: ArenaView) -> None:
        self.boot_id = arena.boot_id
        self.segments = dict(arena.segments)
        self.views = {segment: arena.view(segment) for segment in self.segments}
        self.bases = {segment: arena.address(segment) for segment in self.segments}
        self.generations = arena.generations
        self.unpopulated = arena.unpopulated
        self.alive = arena.alive

    def addresses(self, extents: Records) -> I64:
        """Return the addresses of extents that lie in the arena, shape (n,)."""
        found: I64 = extents["offset"].astype(np.int64)
        for segment, base in self.bases.items():
            found[extents["segment"] == segment] += base
        return found


def as_arrays(pages: I64, extents: Records) -> tuple[I64, Records]:
    """Return copies of a caller's arrays, their shapes and dtypes checked.

    Raises:
        KVHearthError: ``bad_extents``.
    """
    pages = np.asarray(pages)
    extents = np.asarray(extents)
    if extents.dtype != EXTENT_DTYPE or extents.ndim != 1:
        raise KVHearthError(
            Reason.BAD_EXTENTS,
            f"extents of shape {extents.shape} and dtype {extents.dtype}: pass EXTENT_DTYPE, "
            "one dimension",
        )
    integral = pages.size == 0 or pages.dtype.kind in "iu"
    if pages.shape != extents.shape or not integral:
        raise KVHearthError(
            Reason.BAD_EXTENTS,
            f"pages of shape {pages.shape} and dtype {pages.dtype} for {len(extents)} extents: "
            "pass one integer page for each extent",
        )
    return pages.astype(np.int64), extents.copy()


def as_single(pages: I64, extents: Records) -> tuple[int, bytes] | None:
    """Return the page and the record of a batch of one block.

    None for any other batch, and for arguments that ``as_arrays`` must check.
    """
    plain = type(pages) is np.ndarray and type(extents) is np.ndarray
    if not plain or pages.shape != (1,) or extents.shape != (1,):
        return None
    if extents.dtype != EXTENT_DTYPE or pages.dtype.kind not in "iu":
        return None
    return pages.item(), extents.tobytes()


class Batch:
    """State of a batch: the blocks that are still ok, and why the others are not.

    Args:
        kv: sizes of the registered pages.
        arena: arena of the boot that the copier serves, held.
        boot_id: boot that the extents came from.
        pages, extents: as returned by ``as_arrays``.
    """

    def __init__(
        self, kv: Sizes, arena: HeldArena, boot_id: str, pages: I64, extents: Records
    ) -> None:
        self.pages = pages
        self.extents = extents
        self.ok: Bools = np.ones(len(extents), np.bool_)
        self.reasons: dict[BlockFailure, int] = {}
        self._arena = arena
        self._page_bytes = kv.page_bytes
        # Separate columns: a field of a packed record is unaligned and slow to index.
        self._slots = extents["slot"].astype(np.int64)
        self._wanted = extents["generation"].copy()
        if boot_id != arena.boot_id or not arena.alive():
            self.fail_all(BlockFailure.STALE_BOOT)
            return
        self.fail(~self._extents_fit(), BlockFailure.BAD_EXTENT)
        self.fail((pages < 0) | (pages >= kv.page_count), BlockFailure.BAD_PAGE)
        self.check_generations()

    def __len__(self) -> int:
        return len(self.ok)

    def fail(self, failed: Bools, why: BlockFailure) -> None:
        """Mark blocks as failed; each block keeps its first reason."""
        count = int(np.count_nonzero(self.ok & failed))
        if count:
            self.ok &= ~failed
            self.reasons[why] = self.reasons.get(why, 0) + count

    def fail_one(self, position: int, why: BlockFailure) -> None:
        """Mark one block as failed."""
        if self.ok[position]:
            self.ok[position] = False
            self.reasons[why] = self.reasons.get(why, 0) + 1

    def fail_all(self, why: BlockFailure) -> None:
        """Mark all blocks as failed."""
        self.fail(np.ones(len(self), np.bool_), why)

    def check_generations(self, positions: list[int] | I64 | None = None) -> None:
        """Fail the blocks (all, or those at ``positions``) whose slots have left use."""
        at = np.flatnonzero(self.ok) if positions is None else np.asarray(positions, np.intp)
        # No fence is needed between a copy and this read: both are calls that take the
        # interpreter's lock.
        moved = self._arena.generations[self._slots[at]] != self._wanted[at]
        if moved.any():
            failed = np.zeros(len(self), np.bool_)
            failed[at[moved]] = True
            self.fail(failed, BlockFailure.STALE_GENERATION)

    def populate(self) -> None:
        """Have the kernel populate the slots of a store; fail the blocks without memory."""
        if self._arena.unpopulated.bounds is None:
            return
        at = np.flatnonzero(self.ok)
        addresses = self._arena.addresses(self.extents[at])
        failed = np.zeros(len(self), np.bool_)
        failed[at] = self._arena.unpopulated.populate(addresses, self._page_bytes)
        self.fail(failed, BlockFailure.COPY_FAILED)

    def live(self, positions: I64) -> tuple[U32, I64, U32]:
        """Return the live generations of all slots, the slots at ``positions``, and what their
        generations must be, for a copier that compares them itself.
        """
        return self._arena.generations, self._slots[positions], self._wanted[positions]

    def judge(self) -> None:
        """Fail blocks after the last copy if the daemon died or their slots left use meanwhile.

        A generation only grows, moves before its slot is reused, and freezes when its daemon dies.
        If the daemon was alive after the copy, an equal generation after the copy therefore proves
        that the slot was the extent's all along.
        """
        if not self._arena.alive():
            self.fail_all(BlockFailure.STALE_BOOT)
            return
        self.check_generations()

    def done(self, ticket: Ticket, checksums: U8 | None, seconds: float) -> Done:
        """Return the outcome; checksums of failed blocks are zeroed."""
        failed_count = len(self) - int(np.count_nonzero(self.ok))
        assert sum(self.reasons.values()) == failed_count, f"{self.reasons} for {failed_count}"
        if checksums is not None:
            checksums[~self.ok] = 0
        copied_bytes = (len(self) - failed_count) * self._page_bytes
        return Done(ticket, self.ok, checksums, copied_bytes, seconds, dict(self.reasons))

    def expected(self, chosen: Bools) -> dict[int, bytes]:
        """Return the checksums of ``chosen`` and due blocks that have one, by position, to compare.

        A block is due if it carries ``FLAG_VERIFY``; a due block without a checksum is failed.
        """
        flags = self.extents["flags"]
        summed = (flags & FLAG_SUMMED) != 0
        due = (flags & FLAG_VERIFY) != 0
        self.fail(due & ~summed, BlockFailure.CHECKSUM_MISMATCH)
        positions = np.flatnonzero(self.ok & summed & (chosen | due))
        blob = self.extents["checksum"][positions].tobytes()
        return {
            position: blob[index * CHECKSUM_BYTES : (index + 1) * CHECKSUM_BYTES]
            for index, position in enumerate(positions.tolist())
        }

    def runs(self, blocks_max: int) -> Runs:
        """Cut the blocks that are ok into runs of at most ``blocks_max``, in the batch's order."""
        chosen = np.flatnonzero(self.ok)
        records, pages = self.extents, self.pages
        every = len(chosen) == len(self)
        offsets = (records["offset"] if every else records["offset"][chosen]).astype(np.int64)
        segments = (records["segment"] if every else records["segment"][chosen]).astype(np.int64)
        pages = pages if every else pages[chosen]
        joined = (np.diff(segments) == 0) & (np.diff(pages) == 1)
        step_bytes = self._join(joined, np.diff(offsets))
        bounds = _bounds(joined, len(chosen), blocks_max)
        first = bounds[:-1]
        return Runs(chosen, bounds, step_bytes, (segments[first], offsets[first], pages[first]))

    def _join(self, joined: Bools, steps: I64) -> int:
        """Clear in ``joined`` all pairs of blocks except those at one distance, which is returned.

        One distance per batch suffices: slots of one group are cut from slabs of one slot size,
        which may be a little larger than the page.
        """
        joined &= steps >= self._page_bytes
        if not joined.any():
            return self._page_bytes
        step_bytes = int(steps[joined].min())
        joined &= steps == step_bytes
        return step_bytes

    def _extents_fit(self) -> Bools:
        extents = self.extents
        sizes = np.zeros(len(extents), np.uint64)
        segments = extents["segment"]
        for segment in np.unique(segments).tolist():
            sizes[segments == segment] = self._arena.segments.get(segment, 0)
        length = np.uint64(self._page_bytes)
        # Compared without adding: offset + length of a hostile record may overflow.
        fits: Bools = (
            (extents["length"] == self._page_bytes)
            & (sizes >= length)
            & (extents["offset"] <= np.where(sizes >= length, sizes - length, 0))
            & (self._slots < len(self._arena.generations))
        )
        return fits


def _bounds(joined: Bools, count: int, blocks_max: int) -> I64:
    """Return the indices at which runs of at most ``blocks_max`` begin, and ``count``.

    ``joined`` (count - 1,) marks the blocks that follow their predecessors.
    """
    if not count:
        return np.zeros(1, np.int64)
    starts = np.concatenate(([0], np.flatnonzero(~joined) + 1, [count]))
    lengths = np.diff(starts)
    if int(lengths.max()) <= blocks_max:
        return starts
    pieces = -(-lengths // blocks_max)
    within = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    return np.append(np.repeat(starts[:-1], pieces) + within * blocks_max, count)


class SingleBlock:
    """State of a batch of one block: whether it is still ok, and why not.

    Args:
        kv: sizes of the registered pages.
        arena: arena of the boot that the copier serves, held.
        boot_id: boot that the extent came from.
        page: page of the block.
        record: bytes of its extent.

    Attributes:
        failure: the first reason, or None.
        page, segment, offset: location of the block.
    """

    def __init__(self, kv: Sizes, arena: HeldArena, boot_id: str, page: int, record: bytes) -> None:
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

    def populate(self) -> None:
        """Have the kernel populate the slot of a store; see ``Batch.populate``."""
        if self.failure is None:
            address = np.array([self._arena.bases[self.segment] + self.offset])
            if self._arena.unpopulated.populate(address, self._page_bytes).any():
                self.failure = BlockFailure.COPY_FAILED

    def expected(self, *, chosen: bool) -> bytes | None:
        """Return the checksum to compare if the block is chosen or due; see ``Batch.expected``."""
        summed = self._flags & FLAG_SUMMED
        due = self._flags & FLAG_VERIFY
        if due and not summed and self.failure is None:
            self.failure = BlockFailure.CHECKSUM_MISMATCH
        return self._checksum if summed and (chosen or due) else None

    def judge(self) -> None:
        """Judge the block after the copy; see ``Batch.judge``."""
        if self.failure is not None:
            return
        if not self._arena.alive():
            self.failure = BlockFailure.STALE_BOOT
        elif self._arena.generations.item(self._slot) != self._generation:
            self.failure = BlockFailure.STALE_GENERATION

    def done(self, ticket: Ticket, checksum: bytes | None, seconds: float) -> Done:
        """Return the outcome; a failed block's checksum is zeros, None means none was computed."""
        ok = self.failure is None
        sums: U8 | None = None
        if checksum is not None:
            data = checksum if ok else bytes(CHECKSUM_BYTES)
            sums = np.ndarray((1, CHECKSUM_BYTES), np.uint8, bytearray(data))
        reasons = {} if self.failure is None else {self.failure: 1}
        return Done(ticket, np.array([ok]), sums, self._page_bytes if ok else 0, seconds, reasons)

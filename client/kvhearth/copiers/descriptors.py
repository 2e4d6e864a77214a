"""Descriptors of a batch's copies, built by numpy for all blocks at once.

A fragment is the run of bytes that one block has in one part of the pages. Fragments that are
neighbours on both sides become one copy, whatever the order of the batch. Copies are cut where a
registered piece of the arena ends, because CUDA refuses a copy that crosses from one into another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from kvhearth.codec import Encoding
from kvhearth.copiers.base import CopyKind
from kvhearth.copiers.batch import HeldArena
from kvhearth.model import I64, Records
from kvhearth.page_layout import Part

COPIES_MAX = 2048
"""Most copies of one submission. Batched calls of tens of thousands of copies were reported to
crash drivers of CUDA 13.
"""


class Copies(NamedTuple):
    """Copies between addresses, each array int64 of shape (n,)."""

    sources: I64
    targets: I64
    sizes: I64


class Recoding(NamedTuple):
    """Shards that a kernel encodes before the copies of a store, or decodes after those of a load.

    Attributes:
        fragments: addresses of the runs of each shard in the pages, shape (n, m).
        blocks: addresses of the encoded blocks on the GPU, shape (n,).
        run_bytes: bytes of a run.
        encoding: codec and sizes.
    """

    fragments: I64
    blocks: I64
    run_bytes: int
    encoding: Encoding


class Blocks(Protocol):
    """The part of a batch that descriptors are built from."""

    @property
    def pages(self) -> I64:
        """Pages of the blocks, shape (n,)."""

    @property
    def extents(self) -> Records:
        """Their places in the arena, shape (n,)."""


class Pages(Protocol):
    """Pages that copies read and write: a ``PagedKV``, or rows of staging memory."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a block in the arena."""

    @property
    def parts(self) -> Sequence[Part]:
        """Runs of a page, in the order of its block."""


class Portion(NamedTuple):
    """Copies of one submission.

    Attributes:
        copies: its copies.
        positions: the blocks that they touch, as positions in the batch.
        size_bytes: their bytes.
        recoding: work of a kernel with the copies, for encoded blocks.
    """

    copies: Copies
    positions: I64
    size_bytes: int
    recoding: Recoding | None = None


class Descriptors:
    """Builds the copies between one rank's pages and one arena. Keeps no state of a batch.

    Args:
        kv: the registered pages.
        arena: the arena, held.
        piece_bytes: size of the registered pieces, from the begin of each segment.
        portion_bytes: most bytes of a portion.
        copies_max: most copies of a portion.
    """

    def __init__(
        self,
        kv: Pages,
        arena: HeldArena,
        piece_bytes: int,
        *,
        portion_bytes: int,
        copies_max: int = COPIES_MAX,
    ) -> None:
        self._page_bytes = kv.page_bytes
        self._piece_bytes = piece_bytes
        self._steps = -(-piece_bytes // portion_bytes)
        self._portion_bytes = portion_bytes
        self._copies_max = copies_max
        self._addresses = np.array([part.address for part in kv.parts], np.int64)
        self._strides = np.array([part.stride_bytes for part in kv.parts], np.int64)
        self._starts = np.array([part.start_bytes for part in kv.parts], np.int64)
        self._sizes = np.array([part.run_bytes for part in kv.parts], np.int64)
        self._bases = np.zeros(max(arena.segments, default=0) + 1, np.int64)
        for segment, view in arena.views.items():
            self._bases[segment] = int(view.ctypes.data)

    def portions(self, kind: CopyKind, batch: Blocks, positions: I64) -> list[Portion]:
        """Return the copies of some blocks of a batch, in portions, by their place in the arena.

        Args:
            positions: blocks that are ok, shape (n,).
        """
        if not len(positions):
            return []
        records = batch.extents[positions]
        bases = self._bases[records["segment"]]
        offsets = records["offset"].astype(np.int64)
        order = np.argsort(bases + offsets, kind="stable")
        positions, bases, offsets = positions[order], bases[order], offsets[order]
        parts = len(self._sizes)
        paged = (batch.pages[positions][:, None] * self._strides + self._addresses).ravel()
        in_arena = ((bases + offsets)[:, None] + self._starts).ravel()
        sizes = np.tile(self._sizes, len(positions))
        first = _merged(in_arena, paged, sizes)
        last = np.append(first[1:], len(sizes)) - 1
        ends = offsets + (self._page_bytes - 1)
        # Divisions are slow: a block that lies in one cell is not looked at part by part.
        if len(first) < len(sizes) or (self._cell(offsets) != self._cell(ends)).any():
            begins = offsets[first // parts] + self._starts[first % parts]
            at, shifts, sizes = self._cut(begins, np.add.reduceat(sizes, first))
            first, last = first[at], last[at]
            paged, in_arena = paged[first] + shifts, in_arena[first] + shifts
        source, target = (paged, in_arena) if kind is CopyKind.STORE else (in_arena, paged)
        return [
            Portion(
                Copies(source[low:high], target[low:high], sizes[low:high]),
                positions[first[low] // parts : last[high - 1] // parts + 1],
                size_bytes,
            )
            for low, high, size_bytes in self._bounds(sizes)
        ]

    def _cut(self, offsets: I64, sizes: I64) -> tuple[I64 | slice, I64 | int, I64]:
        """Cut copies at the bounds of pieces and portions.

        Returns:
            For each part the copy that it is cut from, its begin in that copy, its bytes.
        """
        low = self._cell(offsets)
        count = self._cell(offsets + sizes - 1) - low + 1
        total = int(count.sum())
        if total == len(sizes):
            return slice(None), 0, sizes
        at = np.repeat(np.arange(len(sizes)), count)
        cells = low[at] + np.arange(total) - np.repeat(np.cumsum(count) - count, count)
        begins = np.maximum(offsets[at], self._begin(cells))
        ends = np.minimum((offsets + sizes)[at], self._begin(cells + 1))
        return at, begins - offsets[at], ends - begins

    def _cell(self, offsets: I64) -> I64:
        """Return the numbers of the cells that offsets lie in: pieces are cut into portions."""
        inside = offsets % self._piece_bytes
        return offsets // self._piece_bytes * self._steps + inside // self._portion_bytes

    def _begin(self, cells: I64) -> I64:
        """Return the offsets at which cells begin."""
        step = cells % self._steps
        return cells // self._steps * self._piece_bytes + step * self._portion_bytes

    def _bounds(self, sizes: I64) -> list[tuple[int, int, int]]:
        """Return (first copy, end, bytes) of each portion."""
        ends = np.cumsum(sizes)
        bounds, low, before = [], 0, 0
        while low < len(sizes):
            high = int(np.searchsorted(ends, before + self._portion_bytes, "right"))
            high = min(max(high, low + 1), low + self._copies_max)
            after = int(ends[high - 1])
            bounds.append((low, high, after - before))
            low, before = high, after
        return bounds


def _merged(slots: I64, paged: I64, sizes: I64) -> I64:
    """Return the indices at which copies begin that do not continue the one before."""
    apart = slots[1:] != slots[:-1] + sizes[:-1]
    apart |= paged[1:] != paged[:-1] + sizes[:-1]
    return np.concatenate(([0], np.flatnonzero(apart) + 1))

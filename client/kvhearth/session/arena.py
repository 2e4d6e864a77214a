"""A client's mapping of the arena: segments and generations, from passed descriptors."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import U8, U32
from kvhearth.native.table import Table
from kvhearth.prefault import Populate, Span, Unpopulated
from kvhearth.shared_memory import MADV_DONTFORK, SharedMapping
from kvhearth.wire.handshake import Welcome, ranges_in

_ALIGN_BYTES_MAX = 1 << 30


def _region(descriptor: int, size_bytes: int, page_bytes: int, *, writable: bool) -> U8:
    """Map a passed descriptor; forked children do not inherit the mapping.

    Huge pages are mapped whole only where the mapping begins at their border.
    """
    if size_bytes <= 0 or os.fstat(descriptor).st_size < size_bytes:
        # Mapping past the end would be a SIGBUS at the first copy.
        raise KVHearthError(Reason.BAD_MESSAGE, f"a passed descriptor is not of {size_bytes} bytes")
    align_bytes = page_bytes if page_bytes & (page_bytes - 1) == 0 else 1
    try:
        mapping = SharedMapping(
            descriptor, size_bytes, min(align_bytes, _ALIGN_BYTES_MAX), writable=writable
        )
    except OSError as error:
        raise _unmappable(size_bytes, error.errno or 0) from None
    if number := mapping.advise(MADV_DONTFORK):
        raise _unmappable(size_bytes, number)
    return np.asarray(mapping)


class ArenaMapping:
    """All segments of one boot of the daemon, and the generations of its slots.

    The page tables are filled in the background from its construction on, if they are to be, as far
    as the daemon has populated the segments.

    Args:
        welcome: names the segments in the order of ``descriptors``.
        descriptors: one per segment, then the generations' memfd; the caller closes them
            afterwards.
        alive: returns whether the daemon of this boot still lives.
        populate: fill the page tables; else each page costs a fault at its first touch.

    Attributes:
        segments: bytes of each segment, by segment number.
        unpopulated: ranges that the daemon has not populated.

    Raises:
        KVHearthError: ``memory_unavailable`` if the kernel refuses, ``bad_message`` if a descriptor
            is smaller than announced.
    """

    def __init__(
        self,
        welcome: Welcome,
        descriptors: Sequence[int],
        alive: Callable[[], bool],
        *,
        populate: bool = True,
    ) -> None:
        self.boot_id = welcome.boot_id
        self.segments = {info.segment: info.bytes for info in welcome.segments}
        self._alive = alive
        self._views: dict[int, U8] = {}
        *segment_descriptors, generations_descriptor = descriptors
        for info, descriptor in zip(welcome.segments, segment_descriptors, strict=True):
            self._views[info.segment] = _region(
                descriptor, info.bytes, info.page_bytes, writable=True
            )
        raw = _region(
            generations_descriptor, welcome.generation_count * 4, mmap.PAGESIZE, writable=False
        )
        self._generations: U32 | None = raw.view(np.uint32)
        self._spans = [
            Span(int(self._views[info.segment].ctypes.data), info.bytes, info.page_bytes)
            for info in welcome.segments
        ]
        self.unpopulated = Unpopulated()
        for span, info in zip(self._spans, welcome.segments, strict=True):
            self.unpopulated.report(span, info.unpopulated)
        live = Span(int(raw.ctypes.data), raw.nbytes, mmap.PAGESIZE, writable=False)
        self._populate = Populate(
            [*self._spans, live] if populate else [],
            [*self._views.values(), raw],
            unpopulated=self.unpopulated,
        )

    @property
    def generations(self) -> U32:
        """Live generation of each slot, shape (generation_count,), read only."""
        if self._generations is None:
            raise KVHearthError(Reason.CLOSED, "the arena is unmapped")
        return self._generations

    def view(self, segment: int) -> U8:
        """Return the whole segment as bytes, shape (segments[segment],).

        Raises:
            KVHearthError: ``bad_extents`` for a segment that is not mapped, ``closed`` after
                ``close``.
        """
        view = self._views.get(segment)
        if view is None:
            if self._generations is None:
                raise KVHearthError(Reason.CLOSED, "the arena is unmapped")
            raise KVHearthError(Reason.BAD_EXTENTS, f"segment {segment} is not mapped")
        return view

    def address(self, segment: int) -> int:
        """Return the segment's address in this process. Raises like ``view``."""
        return int(self.view(segment).ctypes.data)

    def heard(self, unpopulated: Sequence[int]) -> None:
        """Take the ranges of a heartbeat's reply, which are the session's segment's.

        Raises:
            KVHearthError: ``bad_message`` if they are no ranges of it.
        """
        span = self._spans[0] if self._spans else None
        if not ranges_in(unpopulated, span.size_bytes if span else 0):
            raise KVHearthError(Reason.BAD_MESSAGE, "heartbeat: 'unpopulated' is no ranges")
        if span is not None:
            self.unpopulated.report(span, list(unpopulated))

    def alive(self) -> bool:
        """Return whether the daemon of this boot lives; if not, generations mean nothing."""
        return self._generations is not None and self._alive()

    def close(self) -> None:
        """Release the views; memory is unmapped with the last array from ``view``. Idempotent."""
        self._populate.close()
        # Cleared first: a caller that finds no view meanwhile gets `closed` and not `bad_extents`.
        self._generations = None
        self._views.clear()


def map_tables(welcome: Welcome, descriptors: Sequence[int]) -> list[Table]:
    """Map the shared index's tables.

    Args:
        welcome: has the tables' shapes.
        descriptors: the last ones are the generations' memfd and one per table; the caller closes
            them afterwards.

    Raises:
        KVHearthError: as ``ArenaMapping``.
    """
    if not welcome.tables:
        return []
    generations, *own = descriptors[-1 - len(welcome.tables) :]
    live: U8 = _region(generations, welcome.generation_count * 4, 1, writable=False)
    return [
        Table(
            shape,
            _region(descriptor, shape.bytes, 1, writable=False),
            live.view(np.uint32),
        )
        for shape, descriptor in zip(welcome.tables, own, strict=True)
    ]


def _unmappable(size_bytes: int, number: int) -> KVHearthError:
    return KVHearthError(
        Reason.MEMORY_UNAVAILABLE,
        f"cannot map {size_bytes} bytes of the arena: {os.strerror(number)}",
        errno=str(number),
    )

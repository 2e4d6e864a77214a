"""A client's mapping of the arena: segments and generations, from passed descriptors.

The mapping is made with the system call and not with ``mmap.mmap``, which keeps a duplicate of the
descriptor: a forked child would inherit it, and with it the lock by which the daemon sees that this
client may still write.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence

import numpy as np

from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import U8, U32
from kvhearth.prefault import Populate, Span
from kvhearth.wire.handshake import Welcome

_MADV_DONTFORK = 10
_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_munmap = _libc.munmap
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise = _libc.madvise
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


class _Region:
    """One mapping, unmapped when the last array made of it is gone: no view outlives its memory."""

    def __init__(self, descriptor: int, size_bytes: int, *, writable: bool) -> None:
        self.address = 0
        self._size_bytes = size_bytes
        self._writable = writable
        self._pid = os.getpid()
        if size_bytes <= 0 or os.fstat(descriptor).st_size < size_bytes:
            # Mapping past the end would be a SIGBUS at the first copy.
            raise KVHearthError(
                Reason.BAD_MESSAGE, f"a passed descriptor is not of {size_bytes} bytes"
            )
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        address = _mmap(None, size_bytes, protection, mmap.MAP_SHARED, descriptor, 0)
        if address == _MAP_FAILED:
            raise _unmappable(size_bytes)
        self.address = address
        if _madvise(address, size_bytes, _MADV_DONTFORK):
            raise _unmappable(size_bytes)

    @property
    def __array_interface__(self) -> dict[str, object]:
        return {
            "version": 3,
            "shape": (self._size_bytes,),
            "typestr": "|u1",
            "data": (self.address, not self._writable),
        }

    def __del__(self, munmap: Callable[[int, int], int] = _munmap) -> None:
        # A forked child has nothing there, or something of its own.
        if self.address and os.getpid() == self._pid:
            munmap(self.address, self._size_bytes)


class ArenaMapping:
    """All segments of one boot of the daemon, and the generations of its slots.

    The page tables are filled in the background from its construction on.

    Args:
        welcome: names the segments in the order of ``descriptors``.
        descriptors: one per segment, then the generations' memfd; the caller closes them
            afterwards.
        alive: returns whether the daemon of this boot still lives.

    Raises:
        KVHearthError: ``memory_unavailable`` if the kernel refuses, ``bad_message`` if a descriptor
            is smaller than announced.
    """

    def __init__(
        self, welcome: Welcome, descriptors: Sequence[int], alive: Callable[[], bool]
    ) -> None:
        self.boot_id = welcome.boot_id
        self.segments = {info.segment: info.bytes for info in welcome.segments}
        self._alive = alive
        self._views: dict[int, U8] = {}
        *segment_descriptors, generations_descriptor = descriptors
        for info, descriptor in zip(welcome.segments, segment_descriptors, strict=True):
            self._views[info.segment] = np.asarray(_Region(descriptor, info.bytes, writable=True))
        raw: U8 = np.asarray(
            _Region(generations_descriptor, welcome.generation_count * 4, writable=False)
        )
        self._generations: U32 | None = raw.view(np.uint32)
        spans = [
            Span(int(self._views[info.segment].ctypes.data), info.bytes, info.page_bytes)
            for info in welcome.segments
        ]
        spans.append(Span(int(raw.ctypes.data), raw.nbytes, mmap.PAGESIZE, writable=False))
        self._populate = Populate(spans, [*self._views.values(), raw])

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

    def alive(self) -> bool:
        """Return whether the daemon of this boot lives; if not, generations mean nothing."""
        return self._generations is not None and self._alive()

    def close(self) -> None:
        """Release the views; memory is unmapped with the last array from ``view``. Idempotent."""
        self._populate.close()
        # Cleared first: a caller that finds no view meanwhile gets `closed` and not `bad_extents`.
        self._generations = None
        self._views.clear()


def _unmappable(size_bytes: int) -> KVHearthError:
    number = ctypes.get_errno()
    return KVHearthError(
        Reason.MEMORY_UNAVAILABLE,
        f"cannot map {size_bytes} bytes of the arena: {os.strerror(number)}",
        errno=str(number),
    )

"""Copies of blocks in C, with their checksums in the same pass over the bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvhearth.native import library

_SUM_BYTES = 16
_STREAMED_BYTES = 256 << 10
"""Bytes of a call from which on its stores bypass the caches: more than stays in a core's own."""
_STREAMED_PART_BYTES = {True: 32 << 10, False: 4 << 10}
"""Length of a part from which on that pays, for stores (to slots) and loads: gathered small parts
come slower than the stores go. Measured, see docs/adr/0026.
"""
_NEVER = 1 << 62
_PARTS_ONE_MAX = 1024
"""Most parts of a page that ``kvh_move_page`` holds on its stack."""
_Digest = ctypes.c_char * _SUM_BYTES
_I64 = npt.NDArray[np.int64]
_U32 = npt.NDArray[np.uint32]
_U8 = npt.NDArray[np.uint8]


class BlockMover:
    """Moves blocks between pages and slots; the caller keeps their memory mapped.

    Calls release the interpreter's lock, once for all blocks. Thread-safe.

    Args:
        loaded: the native module.
        parts: (address in page 0, distance from page to page, bytes) of each part of a page.
        level: instruction set: 2 AVX-512, 1 AVX2, 0 neither; by default the processor's best.
    """

    def __init__(
        self,
        loaded: ctypes.CDLL,
        parts: Sequence[tuple[int, int, int]],
        level: int | None = None,
    ) -> None:
        loaded.kvh_level.restype = ctypes.c_int64
        self.level: int = loaded.kvh_level() if level is None else level
        self._layout = np.array(parts, np.int64).reshape(len(parts), 3).T.copy()
        self._addresses, self._strides, self._lengths = self._layout
        self._starts = np.cumsum(self._lengths) - self._lengths
        self._layout_at = address_of(self._layout)
        self._lengths_at = address_of(self._lengths)
        self._parts = len(parts)
        self._block_bytes = int(self._lengths.sum())
        longest = int(self._lengths.max(initial=0))
        self._streamed_blocks = {
            to_slots: -(-_STREAMED_BYTES // max(self._block_bytes, 1))
            if longest >= least
            else _NEVER
            for to_slots, least in _STREAMED_PART_BYTES.items()
        }
        self._call = loaded.kvh_move_blocks
        self._call.restype = None
        self._call.argtypes = [
            *(ctypes.c_void_p,) * 3,
            *(ctypes.c_int64,) * 2,
            *(ctypes.c_void_p,) * 5,
            *(ctypes.c_int64,) * 2,
        ]
        self._call_one = loaded.kvh_move_page
        self._call_one.restype = None
        self._call_one.argtypes = [
            ctypes.c_void_p,
            *(ctypes.c_int64,) * 4,
            ctypes.c_void_p,
            *(ctypes.c_int64,) * 2,
        ]

    def move_one(self, page: int, slot: int, *, to_slot: bool, sums: bool) -> bytes | None:
        """Copy one page into the slot at an address, or back; return the checksum if wanted.

        Costs a third of ``move`` after a pause, when the code that makes arrays is in no cache.
        """
        if self._parts > _PARTS_ONE_MAX:
            places = np.array([page], np.int64), np.array([slot], np.int64)
            _, digests = self.move(*places, to_slots=to_slot, sums=sums)
            return None if digests is None else digests.tobytes()
        digest = _Digest() if sums else None
        self._call_one(
            self._layout_at,
            self._parts,
            page,
            slot,
            to_slot,
            digest,
            self._streamed_blocks[to_slot] <= 1,
            self.level,
        )
        return None if digest is None else digest.raw

    def move(
        self,
        pages: _I64,
        slots: _I64,
        *,
        to_slots: bool,
        sums: bool,
        live: tuple[_U32, _I64, _U32] | None = None,
    ) -> tuple[npt.NDArray[np.bool_], _U8 | None]:
        """Copy pages into slots, or back, and checksum them.

        Args:
            pages: numbers of the pages, shape (n,).
            slots: addresses of the slots, shape (n,).
            to_slots: the direction.
            sums: compute checksums: xxh3_128 of the parts' bytes in their order.
            live: counters of all slots, the slot of each block, and the value that its counter must
                have before its copy; shapes (slots,), (n,), (n,).

        Returns:
            Which blocks were moved, shape (n,); their checksums, uint8 of shape (n, 16), zero for
            the others, or None.
        """
        ends = self._addresses + pages[:, None] * self._strides, slots[:, None] + self._starts
        source, target = ends if to_slots else ends[::-1]
        return self._run(target, source, sums, live, to_slots)

    def sum(self, slots: _I64) -> _U8:
        """Return the checksums of the slots at addresses, shape (n,): uint8 of shape (n, 16)."""
        _, digests = self._run(None, slots[:, None] + self._starts, True, None)
        assert digests is not None
        return digests

    def sum_pages(self, pages: _I64) -> _U8:
        """Return the checksums of pages, shape (n,): uint8 of shape (n, 16)."""
        source = self._addresses + pages[:, None] * self._strides
        _, digests = self._run(None, source, True, None)
        assert digests is not None
        return digests

    def _run(
        self,
        target: _I64 | None,
        source: _I64,
        sums: bool,
        live: tuple[_U32, _I64, _U32] | None,
        to_slots: bool = False,
    ) -> tuple[npt.NDArray[np.bool_], _U8 | None]:
        count = len(source)
        moved = np.zeros(count, np.bool_)
        digests = np.zeros((count, _SUM_BYTES), np.uint8) if sums else None
        generations, at, wanted = live or (None, None, None)
        self._call(
            address_of(target),
            address_of(source),
            self._lengths_at,
            count,
            self._parts,
            address_of(digests),
            address_of(generations),
            address_of(at),
            address_of(wanted),
            address_of(moved),
            count >= self._streamed_blocks[to_slots],
            self.level,
        )
        return moved, digests


def sums_at(addresses: _I64, lengths: _I64) -> _U8 | None:
    """Return the checksums of runs of memory, uint8 of shape (n, 16); None without a mover.

    Args:
        addresses, lengths: of each run, in bytes, shape (n,).
    """
    found = np.zeros((len(addresses), _SUM_BYTES), np.uint8)
    for length in np.unique(lengths).tolist():
        mover = block_mover([(0, 0, length)])
        if mover is None:
            return None
        chosen = lengths == length
        found[chosen] = mover.sum(addresses[chosen])
    return found


def address_of(array: npt.NDArray[Any] | None) -> Any:
    """Return the address of an array's first byte; None for None."""
    return None if array is None else array.__array_interface__["data"][0]


def block_mover(parts: Sequence[tuple[int, int, int]]) -> BlockMover | None:
    """Return a mover, or None without the native module or on a processor that it does not help.

    Without AVX2 the C library's copy and the checksum library's loops are as fast or faster.
    """
    loaded = library()
    mover = None if loaded is None else BlockMover(loaded, parts)
    return mover if mover is not None and mover.level else None

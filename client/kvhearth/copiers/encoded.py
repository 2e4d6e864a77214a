"""Encoded blocks of the CUDA copier: a kernel encodes pages into staging memory on the GPU, and
copies move whole blocks between that memory and the arena; loads go the other way.

Kernels could write the arena themselves, but their codes are single bytes, which cross a bus badly.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kvhearth.codec import ELEMENT_BYTES, Encoding
from kvhearth.copiers.base import CopyKind
from kvhearth.copiers.batch import HeldArena
from kvhearth.copiers.descriptors import COPIES_MAX, Blocks, Descriptors, Portion, Recoding
from kvhearth.copiers.device import CopyDevice
from kvhearth.copiers.kernels.pages import PageRuns
from kvhearth.copiers.methods import CopyMethod
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import I64, Records
from kvhearth.page_layout import PagedKV, Part


class _Staging(NamedTuple):
    """Rows of staging memory as pages."""

    page_bytes: int
    parts: tuple[Part, ...]


class _Rows(NamedTuple):
    """Blocks of one portion, whose pages are rows of staging memory."""

    pages: I64
    extents: Records


class EncodedDescriptors:
    """Builds the copies and the kernel's tables of encoded blocks; see ``Descriptors``.

    Each portion encodes or decodes its own blocks, in the order of its stream, and uses the staging
    memory of its direction from the begin on.

    Args:
        kv: the registered pages.
        arena: the arena, held.
        piece_bytes: size of the registered pieces.
        encoding: codec of the blocks in the arena.
        device: GPU of the pages.

    Raises:
        KVHearthError: ``bad_contract`` if kernels cannot be used, or not for these pages.
        RuntimeError: the GPU has no memory.
    """

    def __init__(
        self,
        kv: PagedKV,
        arena: HeldArena,
        piece_bytes: int,
        encoding: Encoding,
        device: CopyDevice,
    ) -> None:
        self._encoding = encoding
        self._runs = PageRuns(kv)
        problem = device.problems[CopyMethod.KERNEL]
        if not problem and self._runs.alignment % ELEMENT_BYTES[encoding.dtype]:
            problem = f"pages begin between two elements of {encoding.dtype}"
        if problem:
            raise KVHearthError(Reason.BAD_CONTRACT, f"codec {encoding.codec}: {problem}")
        stored_bytes = encoding.stored_bytes
        self._rows = max(1, min(device.portion_bytes // stored_bytes, COPIES_MAX // 2))
        size_bytes = self._rows * stored_bytes
        self._memory = {kind: device.runtime.memory(device.index, size_bytes) for kind in CopyKind}
        self._copies = {}
        for kind, memory in self._memory.items():
            part = Part(memory.address, stored_bytes, stored_bytes, 0, 0)
            # One portion: a kernel that follows only some of its copies would decode old bytes.
            self._copies[kind] = Descriptors(
                _Staging(stored_bytes, (part,)),
                arena,
                piece_bytes,
                portion_bytes=max(piece_bytes, size_bytes),
                copies_max=1 << 30,
            )

    def portions(self, kind: CopyKind, batch: Blocks, positions: I64) -> list[Portion]:
        """Return the work on some blocks of a batch, in portions; see ``Descriptors.portions``."""
        records = batch.extents[positions]
        order = np.lexsort((records["offset"], records["segment"]))
        positions, portions = positions[order], []
        for start in range(0, len(positions), self._rows):
            some = positions[start : start + self._rows]
            rows = np.arange(len(some))
            staged = _Rows(rows, batch.extents[some])
            (portion,) = self._copies[kind].portions(kind, staged, rows)
            recoding = Recoding(
                np.ascontiguousarray(self._runs.fragments(batch.pages[some])),
                self._memory[kind].address + rows * self._encoding.stored_bytes,
                self._runs.run_bytes,
                self._encoding,
            )
            portions.append(Portion(portion.copies, some, portion.size_bytes, recoding))
        return portions

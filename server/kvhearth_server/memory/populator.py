"""Takes the memory of an arena while the daemon serves.

A slab is given out whether it is populated or not, but populated ones come first: slabs are
populated in the order in which they are assigned. Whoever copies into another one has the kernel
populate what it copies to, by ``madvise``, which returns an error where a touch would be a SIGBUS.
Only the journal's rows of a slab, a hundredth of it, must be there before it is assigned: the
daemon's loop writes to them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from kvhearth.errors import KVHearthError, Reason
from kvhearth.failpoints import hit
from kvhearth.memory_limits import tightest
from kvhearth.model import I64, Bools, Records
from kvhearth_server.config.value_types import format_size
from kvhearth_server.core.slot_table import Geometry
from kvhearth_server.memory.journal import rows_of
from kvhearth_server.memory.mapping import MIB, Segment
from kvhearth_server.memory.numa import Topology

_AT_START_BYTES = 64 * MIB
"""Bytes of the journal, and of the slabs, that are populated before the daemon serves: 25 ms."""
_NICE = 10

Tell = Callable[[list[int]], None]
"""Callback with numbers of slabs."""


class Populator:
    """Populates slabs, ascending, with a thread for each NUMA node, which the caller starts.

    Args:
        geometry: the arena's.
        segments: its memory.
        journal: its journal, None without one.
        slab_nodes: NUMA node of each slab, shape (slabs,); an attribute, too.
        topology: binds threads to nodes.

    Attributes:
        populated: whether all pages of a slab are there, shape (slabs,).
        without_rows: slabs whose rows of the journal have no pages yet.
        given_up: why the rest stays without pages, by node.
    """

    def __init__(
        self,
        geometry: Geometry,
        segments: Sequence[Segment],
        journal: Segment | None,
        slab_nodes: I64,
        topology: Topology,
    ) -> None:
        self._geometry, self._segments, self._journal = geometry, segments, journal
        self.slab_nodes, self._topology = slab_nodes, topology
        self.populated: Bools = np.zeros(geometry.slab_count, np.bool_)
        every = range(geometry.slab_count) if journal is not None else range(0)
        self.without_rows = set(every)
        self.given_up: dict[int, str] = {}

    @property
    def nodes(self) -> list[int]:
        """Nodes of the slabs; each is for one call of ``run``."""
        return sorted(set(self.slab_nodes.tolist()))

    def begin(self) -> None:
        """Populate what the first calls need.

        Raises:
            OSError: there is no memory for the first rows of the journal.
        """
        for slabs in self._row_portions(range(self._geometry.slab_count)):
            self._populate_rows(slabs)
            break
        with contextlib.suppress(OSError):  # ``run`` tells it
            for slab in range(_AT_START_BYTES // self._geometry.slab_bytes)[: len(self.populated)]:
                self._populate(slab)
        if self.populated.all():
            self.settle()

    def settle(self) -> None:
        """Look what pages there are, once all threads have ended."""
        for number, segment in enumerate(self._segments):
            segment.settle(self.populated_in(number))

    def run(self, node: int, stopped: threading.Event, rows_there: Tell, give_up: Tell) -> None:
        """Populate the slabs of a node on the calling thread, which gives way to all others.

        Args:
            node: one of ``nodes``.
            stopped: ends it after the piece under way.
            rows_there: called with slabs that may be assigned from now on.
            give_up: called with slabs that have no memory.
        """
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        if len(self.nodes) > 1:
            with contextlib.suppress(OSError):
                self._topology.run_on(node)
        own = np.flatnonzero(self.slab_nodes == node)
        try:
            for slabs in self._row_portions(own.tolist()):
                if stopped.is_set():
                    return
                self._populate_rows(slabs)
                rows_there(slabs)
            for slab in own[~self.populated[own]].tolist():
                if stopped.is_set():
                    return
                self._populate(slab)
        except OSError as error:
            rest = own[~self.populated[own]].tolist()
            size = format_size(len(rest) * self._geometry.slab_bytes)
            self.given_up[node] = (
                f"{size} of memory cannot be had ({error.strerror}); the rest serves"
            )
            give_up(rest)

    def touch(self, extents: Records) -> None:
        """Take the pages of extents that this process is about to touch, where any may be missing.

        Raises:
            KVHearthError: ``memory_unavailable``.
        """
        if self.populated.all():
            return
        slabs = extents["slot"].astype(np.int64) // self._geometry.stride
        try:
            for each in extents[~self.populated[slabs]]:
                self._segments[each["segment"]].populate(int(each["offset"]), int(each["length"]))
        except OSError as error:
            message = f"no memory for a block ({error.strerror}); it is stored later"
            raise KVHearthError(Reason.MEMORY_UNAVAILABLE, message) from None

    def populated_in(self, segment: int) -> int:
        """Bytes of a segment's populated slabs."""
        return int(np.count_nonzero(self._there(segment))) * self._geometry.slab_bytes

    def unpopulated(self, segment: int) -> list[int]:
        """Return begin and end, in bytes of a segment, of each range without pages, ascending."""
        there = self._there(segment)
        if there.all():
            return []
        edges = np.flatnonzero(np.diff(np.concatenate([[True], there, [True]])))
        return [edge * self._geometry.slab_bytes for edge in edges.tolist()]

    def _there(self, segment: int) -> Bools:
        shape = self._geometry.segments[segment]
        return self.populated[shape.first_slab : shape.first_slab + shape.slabs]

    def _row_portions(self, slabs: Iterable[int]) -> Iterator[list[int]]:
        """Yield slabs without rows in portions of ``_AT_START_BYTES`` of rows, neighbours only."""
        portion = list[int]()
        most = max(1, _AT_START_BYTES // rows_of(self._geometry, 0).stop)
        for slab in [slab for slab in slabs if slab in self.without_rows]:
            if portion and (slab != portion[-1] + 1 or len(portion) == most):
                yield portion
                portion = []
            portion.append(slab)
        if portion:
            yield portion

    def _populate_rows(self, slabs: list[int]) -> None:
        assert self._journal is not None
        first, last = rows_of(self._geometry, slabs[0]), rows_of(self._geometry, slabs[-1])
        self._journal.populate(first.start, last.stop - first.start)
        self.without_rows.difference_update(slabs)

    def _place(self, slab: int) -> tuple[Segment, int]:
        """Segment of a slab, and its begin in bytes."""
        shapes = self._geometry.segments
        index = next(n for n, each in enumerate(shapes) if slab < each.first_slab + each.slabs)
        start = (slab - shapes[index].first_slab) * self._geometry.slab_bytes
        return self._segments[index], start

    def _populate(self, slab: int) -> None:
        hit("populate.slab")
        segment, start = self._place(slab)
        size = self._geometry.slab_bytes
        least = tightest(segment.source.limits(start, size))
        if least is not None and least.free_bytes < size:
            raise OSError(errno.ENOMEM, f"by {least.name} there is no more")
        segment.populate(start, size)
        self.populated[slab] = True

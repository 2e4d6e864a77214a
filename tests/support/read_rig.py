"""A tier on a real drive whose reads end as a test scripts, and the places of its records on
disk.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from kvhearth.model import Records
from kvhearth_server.tiers.base import BlockSpec, Completion, Done
from kvhearth_server.tiers.ssd.disk.probe import choose, open_queue
from kvhearth_server.tiers.ssd.disk.queues import PIECES_MAX, DiskQueue, Op, Reaped, Request
from kvhearth_server.tiers.ssd.format import RECORD_BYTES, RECORD_DTYPE, RECORD_MAGIC
from kvhearth_server.tiers.ssd.tier import Environment, SsdTier
from support.tiers import (
    DEADLINE_S,
    PAGE,
    Arena,
    Desk,
    content_of,
    family,
    key_of,
    segment_files,
    settings,
)

Page = tuple[int, int]
"""A page of a file: the file's inode and the page's number."""


def pages_of(request: Request) -> set[Page]:
    """Return the pages that a request reads or writes."""
    first, inode = request.offset // PAGE, os.fstat(request.fd).st_ino
    return {(inode, page) for page in range(first, first + size_of(request) // PAGE)}


def size_of(request: Request) -> int:
    """Return the bytes of all pieces."""
    return sum(size for _, size in request.pieces)


class Drive:
    """Passes requests on to a real queue, and records the reads.

    Attributes:
        reads: reads that the kernel took, in order.
        fate: replaces a read's result; the read's memory is spoilt if the result differs.
        holds: whether a read's end is held back for now.
        shut: takes no reads.
        broken: error that the queue itself raises.
    """

    def __init__(self, inner: DiskQueue) -> None:
        self.name, self.depth, self.event_fd = inner.name, inner.depth, inner.event_fd
        self.reads: list[Request] = []
        self.fate: Callable[[Request, int], int] = lambda _, result: result
        self.holds: Callable[[Request], bool] = lambda _: False
        self.shut = False
        self.broken: OSError | None = None
        self._inner = inner
        self._out: dict[int, Request] = {}
        self._kept: list[Reaped] = []

    @property
    def in_flight(self) -> int:
        return len(self._out)

    @property
    def held(self) -> int:
        """Number of reads that have ended and are held back."""
        return len(self._kept)

    def submit(self, requests: Sequence[Request]) -> int:
        if self.broken is not None:
            raise self.broken
        if self.shut and any(each.op is Op.READ for each in requests):
            return 0
        taken = self._inner.submit(requests)
        for each in requests[:taken]:
            self._out[each.tag] = each
            if each.op is Op.READ:
                self.reads.append(each)
        return taken

    def reap(self) -> list[Reaped]:
        found, self._kept = [*self._kept, *self._inner.reap()], []
        ended = []
        for each in found:
            request = self._out[each.tag]
            if request.op is not Op.READ:
                ended.append(each)
            elif self.holds(request):
                self._kept.append(each)
                continue
            else:
                ended.append(Reaped(each.tag, self._end(request, each.result)))
            del self._out[each.tag]
        return ended

    def _end(self, request: Request, result: int) -> int:
        fate = self.fate(request, result)
        if fate != result:
            for address, size in request.pieces:
                ctypes.memset(address, 0x5A, size)
        return fate

    def release(self) -> None:
        """Release the reads that are held back."""
        self.holds, self.shut = lambda _: False, False
        os.eventfd_write(self.event_fd, 1)

    def well(self) -> None:
        """Return to normal behaviour."""
        self.fate = lambda _, result: result
        self.release()

    def close(self) -> None:
        self._inner.close()


class ReadRig:
    """A tier on a ``Drive``; reads are joined as far as possible unless a test says otherwise."""

    def __init__(self, *folders: Path, interface: str = "", **changes: Any) -> None:
        self._folders = folders
        self.drive = Drive(open_queue(interface or choose()[0], 16))
        self.arena = Arena()
        # Half of a depth of two is one: one request may have all records.
        reported = {
            "depth": 2,
            "segments": 16,
            "segment_bytes": 1 << 20,
            "slow_s": 600.0,
            **changes,
        }
        found = settings(*folders, **{"stuck_s": 600.0, **reported})
        self.tier = SsdTier(found, [self.arena.bytes], environment=Environment(queue=self.drive))
        self.desk = Desk(self.tier, self.arena)
        self.desk.settle()

    def begin(self, numbers: Sequence[int], of: BlockSpec | None = None) -> int:
        """Submit a load."""
        ticket = self.tier.submit_load(self.desk.load_batch(list(numbers), of or family()))
        assert isinstance(ticket, int)
        return ticket

    def present(self, numbers: Sequence[int], of: BlockSpec | None = None) -> list[bool]:
        """Return which of the blocks are present."""
        found = self.tier.look_up(of or family(), [key_of(number) for number in numbers])
        return [bool(each) for each in found.present]

    def compare(self, done: Completion, numbers: Sequence[int], of: BlockSpec) -> None:
        """Compare every byte of the blocks reported as loaded."""
        for row in done.rows(Done).tolist():
            for shard in range(of.shards):
                slot = self.arena.slots + row * of.shards + shard
                wanted = content_of(numbers[row], shard, of.length)
                assert (self.arena.view(slot, of.length) == wanted).all(), "wrong bytes"

    def payload(self, number: int, shard: int = 0, group: int = 0) -> tuple[Path, int]:
        """Return the place of a record's payload: file and page. The page before is its header."""
        for path in chain.from_iterable(map(segment_files, self._folders)):
            heads = records_of(path)
            mine = (heads["group"] == group) & (heads["shard"] == shard)
            mine &= heads["key"] == np.frombuffer(key_of(number).ljust(64, b"\0"), "V64")
            for page in np.flatnonzero(mine):
                return path, int(page) + 1
        raise AssertionError(f"block {number} is not on disk")

    def page(self, number: int, shard: int = 0, group: int = 0, *, after: int = 0) -> Page:
        """Return a page of a record: its payload's first, or the one ``after`` pages later."""
        path, at = self.payload(number, shard, group)
        return path.stat().st_ino, at + after

    def close(self) -> None:
        """Close the tier, and check that books agree and bounds were kept."""
        self.drive.well()
        assert self.tier.drain(DEADLINE_S)
        self.desk.events += self.tier.poll()
        self.tier.check()
        assert self.tier.figures().queued_reads == 0
        self.tier.close()
        assert self.drive.in_flight == 0
        most = self.tier.settings.request_bytes
        for each in self.drive.reads:
            assert len(each.pieces) <= PIECES_MAX
            assert size_of(each) <= most or len(each.pieces) == 1


def records_of(path: Path) -> Records:
    """Return a row for each page of a segment file; rows of pages that are no record's header are
    zero.
    """
    pages = np.fromfile(path, np.uint8).reshape(-1, PAGE)
    heads = np.ascontiguousarray(pages[:, :RECORD_BYTES]).view(RECORD_DTYPE).reshape(-1)
    good = (heads["magic"] == RECORD_MAGIC) & (heads["position"] == np.arange(len(heads)))
    heads[~good] = np.zeros(1, RECORD_DTYPE)
    return heads

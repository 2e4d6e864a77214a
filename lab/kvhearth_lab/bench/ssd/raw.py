"""The drive's own ceiling: requests of 2 MiB through the same kernel interface as the tier's, with
nothing around them, to where the tier's blocks lie: another file lies elsewhere on the drive, and
that alone makes a difference of a third.
"""

from __future__ import annotations

import itertools
import os
import select
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from kvhearth_lab.bench.ssd.sizes import BLOCK_BYTES, Sizes
from kvhearth_lab.bench.ssd.slots import Slots
from kvhearth_server.tiers.ssd.disk.base import Op, Request
from kvhearth_server.tiers.ssd.disk.probe import open_queue

_Asked = tuple[Op, int]
"""What to do, and with which of the spots."""

Spot = tuple[Path, int, int]
"""A file, an offset in it, and the number of the block that lies there."""

_WAIT_S = 1.0


class Raw:
    """Requests to ``spots``: what is written to one is what lies there already.

    Raises:
        OSError: the drive fails.
    """

    def __init__(self, slots: Slots, sizes: Sizes, interface: str) -> None:
        self._slots = slots
        self._round = sizes.round_bytes // BLOCK_BYTES
        self._files: dict[Path, int] = {}
        self._spots: list[tuple[int, int, int]] = []
        self._queue = open_queue(interface, sizes.depth)

    def use(self, spots: Iterable[Spot]) -> None:
        """Go to these from now on."""
        self._spots = [(self._open(path), offset, number) for path, offset, number in spots]

    def use_file(self, path: Path) -> None:
        """Go to a file that is made here and written once; it is gone with its descriptor."""
        descriptor = self._open(path, os.O_CREAT)
        path.unlink()
        os.posix_fallocate(descriptor, 0, self._round * BLOCK_BYTES)
        self.use((path, index * BLOCK_BYTES, index) for index in range(self._round))
        self.write()

    def _open(self, path: Path, flags: int = 0) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDWR | os.O_DIRECT | flags, 0o600)
        return self._files[path]

    def write(self, passes: int = 1) -> None:
        """So many rounds' bytes, at the full depth."""
        count = len(self._spots)
        self._drive((Op.WRITE, index % count) for index in range(passes * self._round))

    def read(self) -> None:
        """A round's bytes, at the full depth."""
        count = len(self._spots)
        self._drive((Op.READ, index % count) for index in range(self._round))

    def mix(self) -> None:
        """One half of a round read and the other written, in turns."""
        half = len(self._spots) // 2
        pairs = (
            ((Op.READ, index % half), (Op.WRITE, half + index % half))
            for index in range(self._round // 2)
        )
        self._drive(itertools.chain.from_iterable(pairs))

    def reads_among_writes(self, count: int) -> list[float]:
        """Seconds of each of so many reads, one at a time, all other requests being writes."""
        times: list[float] = []
        half = len(self._spots) // 2
        writes = itertools.count()
        begun = 0.0

        def asked() -> Iterator[_Asked]:
            nonlocal begun
            while len(times) < count:
                if not begun:
                    begun = time.perf_counter()
                    yield Op.READ, len(times) % half
                yield Op.WRITE, half + next(writes) % half

        def ended(op: Op) -> None:
            nonlocal begun
            if op is Op.READ:
                times.append(time.perf_counter() - begun)
                begun = 0.0

        self._drive(asked(), ended)
        return times

    def _drive(self, asked: Iterable[_Asked], ended: Callable[[Op], None] | None = None) -> None:
        """Keep the queue full until there is nothing more to ask for."""
        queue, left = self._queue, iter(asked)
        out: dict[int, Op] = {}
        tags = itertools.count()
        refused: list[_Asked] = []
        while True:
            room = queue.depth - queue.in_flight
            wanted = [*refused, *itertools.islice(left, room - len(refused))]
            requests = [self._request(each, next(tags)) for each in wanted]
            out |= {request.tag: request.op for request in requests}
            taken = queue.submit(requests) if requests else 0
            refused = wanted[taken:]
            for request in requests[taken:]:
                del out[request.tag]
            if not out and not refused:
                return
            select.select([queue.event_fd], [], [], _WAIT_S)
            for tag, result in queue.reap():
                if result != BLOCK_BYTES:
                    raise OSError(max(0, -result), f"the drive failed: {result}")
                op = out.pop(tag)
                if ended is not None:
                    ended(op)

    def _request(self, asked: _Asked, tag: int) -> Request:
        op, index = asked
        descriptor, offset, number = self._spots[index]
        where = self._slots.target(index) if op is Op.READ else self._slots.source(number)
        return Request(op, descriptor, offset, ((where, BLOCK_BYTES),), tag)

    def close(self) -> None:
        """Close what was opened."""
        self._queue.close()
        for descriptor in self._files.values():
            os.close(descriptor)

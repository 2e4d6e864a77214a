"""The drive's own ceiling: one file that was written once, and requests of 2 MiB to it through the
same kernel interface as the tier's, with nothing around them.
"""

from __future__ import annotations

import itertools
import os
import select
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from kvhearth_server.bench.ssd.sizes import BLOCK_BYTES, Sizes
from kvhearth_server.bench.ssd.slots import Slots
from kvhearth_server.tiers.ssd.disk.base import Op, Request
from kvhearth_server.tiers.ssd.disk.choose import open_queue

_Asked = tuple[Op, int]
"""What to do, and with which block."""
_WAIT_S = 1.0


class Raw:
    """The file ``path``, made here.

    Raises:
        OSError: it cannot be made, or the drive fails.
    """

    def __init__(self, path: Path, slots: Slots, sizes: Sizes, interface: str) -> None:
        self._slots, self._path = slots, path
        self._blocks = sizes.round_bytes // BLOCK_BYTES
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, self._blocks * BLOCK_BYTES)
        self._queue = open_queue(interface, sizes.depth)
        self.write()

    def write(self, passes: int = 1) -> None:
        """All of it so often, at the full depth."""
        count = passes * self._blocks
        self._drive((Op.WRITE, index % self._blocks) for index in range(count))

    def read(self) -> None:
        """All of it once, at the full depth."""
        self._drive((Op.READ, index) for index in range(self._blocks))

    def mix(self) -> None:
        """One half of it read and the other written, in turns."""
        half = self._blocks // 2
        pairs = (((Op.READ, index), (Op.WRITE, half + index)) for index in range(half))
        self._drive(itertools.chain.from_iterable(pairs))

    def reads_among_writes(self, count: int) -> list[float]:
        """Seconds of each of so many reads, one at a time, all other requests being writes."""
        times: list[float] = []
        half = self._blocks // 2
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
        where = self._slots.target(index) if op is Op.READ else self._slots.source(index)
        return Request(op, self._fd, index * BLOCK_BYTES, ((where, BLOCK_BYTES),), tag)

    def close(self) -> None:
        """Free it, and remove the file."""
        self._queue.close()
        os.close(self._fd)
        self._path.unlink()

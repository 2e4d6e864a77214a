"""The drive's own ceiling: bare 2 MiB requests, and the best of several ways to make them.

They go to the places of the tier's blocks: another file lies elsewhere on the drive, and that alone
makes a difference of a third.
"""

from __future__ import annotations

import itertools
import os
import select
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from kvhearth.model import U8, Records, checksum_of
from kvhearth_lab.bench.report import p50, steps
from kvhearth_lab.bench.ssd.figures import BATCH, BLOCK_BYTES, GB, SLOTS, Sizes
from kvhearth_server.memory.mapping import HugepagePolicy
from kvhearth_server.memory.segments import create_segment
from kvhearth_server.tiers.base import ADDRESS_DTYPE, BlockSpec, LoadBatch, StoreBatch
from kvhearth_server.tiers.ssd.disk.probe import NAMES, open_queue, probe
from kvhearth_server.tiers.ssd.disk.queues import Op, Request

FAMILY = BlockSpec(bytes(32), 0, 1, BLOCK_BYTES)


class Slots:
    """Memory for blocks of 2 MiB, as the daemon's arena; the stored bytes differ from slot to slot.

    Args:
        policy: pages to take, by default the best to be had.
    """

    def __init__(self, policy: HugepagePolicy = HugepagePolicy.PREFER) -> None:
        self._segment = create_segment(2 * SLOTS * BLOCK_BYTES, policy)
        self.pages = str(self._segment.page_kind)
        self.bytes: U8 = self._segment.view
        self.address = self._segment.address
        words = self.bytes.view(np.uint64)
        half = len(words) // 2
        words[:half] = np.random.default_rng(1).integers(0, 1 << 63, half, np.uint64)
        words[half:] = 0
        sources = self.bytes[: SLOTS * BLOCK_BYTES].reshape(SLOTS, BLOCK_BYTES)
        digests = [checksum_of(slot.data) for slot in sources]
        self._sums: Records = np.frombuffer(b"".join(digests), "V16")

    def source(self, number: int) -> int:
        """Return the address that block ``number`` is stored from."""
        return self.address + number % SLOTS * BLOCK_BYTES

    def target(self, number: int) -> int:
        """Return the address that block ``number`` is loaded into."""
        return self.address + (SLOTS + number % SLOTS) * BLOCK_BYTES

    def store_batch(self, numbers: Iterable[int]) -> StoreBatch:
        """Return a batch that stores blocks by their numbers."""
        names = np.array(list(numbers), np.uint64)
        slots = (names % SLOTS).astype(np.int64)
        sums = self._sums[slots].reshape(-1, 1)
        return StoreBatch(FAMILY, keys_of(names.tolist()), _places(slots), sums, names, names)

    def load_batch(self, keys: list[bytes], place: int) -> LoadBatch:
        """Return a batch that loads any blocks into its own place of ``SLOTS // BATCH``: two
        batches under way must not share one.
        """
        slots = SLOTS + place * BATCH + np.arange(len(keys))
        return LoadBatch(FAMILY, keys, _places(slots))


def keys_of(numbers: Iterable[int]) -> list[bytes]:
    """Return keys of 32 bytes."""
    return [b"bench-%026d" % number for number in numbers]


def _places(slots: Records) -> Records:
    places = np.zeros((len(slots), 1), ADDRESS_DTYPE)
    places["offset"][:, 0] = slots * BLOCK_BYTES
    return places


_Asked = tuple[Op, int]
"""Operation, and the index of its spot."""

Spot = tuple[Path, int, int]
"""A file, an offset in it, and the number of the block there."""

_WAIT_S = 1.0


class Raw:
    """Requests to ``spots``; a write repeats the bytes that are already there.

    Args:
        depth: requests in the kernel at once, by default as many as the tier's.

    Raises:
        OSError: the drive fails.
    """

    def __init__(
        self, slots: Slots, sizes: Sizes, interface: str, depth: int | None = None
    ) -> None:
        self._slots = slots
        self._round = sizes.round_bytes // BLOCK_BYTES
        self._files: dict[Path, int] = {}
        self._spots: list[tuple[int, int, int]] = []
        self._queue = open_queue(interface, depth or sizes.depth)

    def use(self, spots: Iterable[Spot]) -> None:
        """Use these spots from now on."""
        self._spots = [(self._open(path), offset, number) for path, offset, number in spots]

    def use_file(self, path: Path) -> None:
        """Use a new file, written once here; it is deleted when its descriptor is closed."""
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
        """Write the bytes of ``passes`` rounds at the full depth."""
        count = len(self._spots)
        self._drive((Op.WRITE, index % count) for index in range(passes * self._round))

    def read(self) -> None:
        """Read a round's bytes at the full depth."""
        count = len(self._spots)
        self._drive((Op.READ, index % count) for index in range(self._round))

    def mix(self) -> None:
        """Read one half of a round and write the other, in turns."""
        half = len(self._spots) // 2
        pairs = (
            ((Op.READ, index % half), (Op.WRITE, half + index % half))
            for index in range(self._round // 2)
        )
        self._drive(itertools.chain.from_iterable(pairs))

    def reads_among_writes(self, count: int) -> list[float]:
        """Return the seconds of each of ``count`` reads, one at a time, while all other requests
        are writes.
        """
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
        """Keep the queue full until all requests are done."""
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
        """Close the queue and the files."""
        self._queue.close()
        for descriptor in self._files.values():
            os.close(descriptor)


_DEPTH_FEW = 8
_PAUSE_S = 0.05


class Ceiling:
    """The best of several kernel interfaces, depths and kinds of pages, for reads and for writes.

    Attributes:
        ways: GB/s of reads and of writes of each way, medians; filled by ``survey``.
        best: name of the best way to read, and of the best one to write.
    """

    def __init__(self, slots: Slots, sizes: Sizes) -> None:
        self.ways: dict[str, dict[str, float]] = {}
        self.best: dict[str, str] = {}
        self._sizes = sizes
        self._raws: dict[str, Raw] = {}
        memories = {slots.pages: slots}
        if (small := Slots(HugepagePolicy.OFF)).pages not in memories:
            memories[small.pages] = small
        depths = [(name, depth) for name in NAMES for depth in (sizes.depth, _DEPTH_FEW)]
        depths = [each for each in depths if each != ("threads", sizes.depth)]  # 8 at most
        for pages, memory in memories.items():
            for name, depth in dict.fromkeys(depths):
                if probe(name, depth).works:
                    way = f"{name}, depth {depth}, {pages}"
                    self._raws[way] = Raw(memory, sizes, name, depth)

    def use(self, spots: Iterable[Spot]) -> None:
        """Use these spots from now on."""
        named = list(spots)
        for raw in self._raws.values():
            raw.use(named)

    def survey(self) -> None:
        """Find the best ways: all of them in turns, reads and then writes."""
        for kind in ("read", "write"):
            rates: dict[str, list[float]] = {way: [] for way in self._raws}
            for _ in steps(self._sizes.survey_rounds, f"ways to {kind}"):
                for way, raw in self._raws.items():
                    time.sleep(_PAUSE_S)
                    start = time.perf_counter()
                    raw.read() if kind == "read" else raw.write()
                    rates[way].append(self._sizes.round_bytes / GB / (time.perf_counter() - start))
            for way, found in rates.items():
                self.ways.setdefault(way, {})[f"{kind}_gbs"] = round(p50(found), 3)
            self.best[kind] = max(rates, key=lambda way: p50(rates[way]))

    def write(self, passes: int = 1) -> None:
        """Write as ``Raw.write``, in the best way."""
        self._raws[self.best["write"]].write(passes)

    def read(self) -> None:
        """Read as ``Raw.read``, in the best way."""
        self._raws[self.best["read"]].read()

    def mix(self) -> None:
        """Read and write as ``Raw.mix``, in the best way to read."""
        self._raws[self.best["read"]].mix()

    def reads_among_writes(self, count: int) -> list[float]:
        """Return the seconds of reads as ``Raw.reads_among_writes``, in the best way to read."""
        return self._raws[self.best["read"]].reads_among_writes(count)

    def close(self) -> None:
        """Close all queues and files."""
        for raw in self._raws.values():
            raw.close()

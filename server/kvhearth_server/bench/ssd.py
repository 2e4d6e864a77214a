"""The SSD tier against its own device: the same kernel interface with no store in the way, then
the tier, in turns within one run. Ratios are what lasts; the absolutes are of this machine.

It drives the tier as the engine's loop does: batches in flight, one descriptor to wait on.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import mmap
import os
import select
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvhearth.model import U8
from kvhearth_server.tiers.base import PLACE_DTYPE, Done, Family, LoadBatch, StoreBatch, Throttled
from kvhearth_server.tiers.ssd.disk.base import Op, Request
from kvhearth_server.tiers.ssd.disk.choose import choose, open_queue
from kvhearth_server.tiers.ssd.settings import Place, SsdSettings
from kvhearth_server.tiers.ssd.tier import SsdTier

MIB = 1 << 20
GB = 1e9
_BLOCK_BYTES = 2 * MIB
_SLOTS = 128
_BATCH = 16
_BATCHES_OUT = 4
_MAP_HUGETLB = 0x40000
_NAMESPACE = bytes(32)
_DEADLINE_S = 120.0
_HOLD_S = 0.004


@dataclass(frozen=True)
class Sizes:
    """How much is done. ``tier_bytes`` and ``raw_bytes`` together are what the run takes of disk.

    Attributes:
        round_bytes: written and read in each turn.
        small_blocks, small_length: what recovery is measured with.
    """

    tier_bytes: int = 2816 * MIB
    raw_bytes: int = 512 * MIB
    round_bytes: int = 768 * MIB
    rounds: int = 5
    depth: int = 32
    small_blocks: int = 100_000
    small_length: int = 4096


@dataclass
class Arena:
    """Slots of 2 MiB in huge pages if there are any; every slot's content is different."""

    bytes: U8 = field(init=False)
    sums: Any = field(init=False)
    huge: bool = True

    def __post_init__(self) -> None:
        size, flags = _SLOTS * _BLOCK_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            mapping = mmap.mmap(-1, size, flags | _MAP_HUGETLB)
        except OSError:
            self.huge, mapping = False, mmap.mmap(-1, size, flags)
        self.bytes = np.frombuffer(mapping, np.uint8)
        self.bytes.view(np.uint64)[:] = np.random.default_rng(1).integers(
            0, 1 << 63, size // 8, np.uint64
        )
        slots = self.bytes.reshape(_SLOTS, _BLOCK_BYTES)
        digests = [xxhash.xxh3_128_digest(slot.data) for slot in slots]
        self.sums = np.frombuffer(b"".join(digests), "V16")

    @property
    def address(self) -> int:
        """Where it begins."""
        return int(self.bytes.ctypes.data)


@dataclass(frozen=True)
class Took:
    """Wall and processor seconds of a turn."""

    seconds: float
    cpu_s: float


@contextlib.contextmanager
def _timed(into: list[Took]) -> Iterator[None]:
    start, cpu = time.perf_counter(), time.process_time()
    yield
    into.append(Took(time.perf_counter() - start, time.process_time() - cpu))


class Raw:
    """One file that was written once, and requests of 2 MiB with nothing around them."""

    def __init__(self, folder: Path, arena: Arena, sizes: Sizes, interface: str) -> None:
        self._arena, self._sizes = arena, sizes
        self._fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._fd, 0, sizes.raw_bytes)
        self._queue = open_queue(interface, sizes.depth)
        self.move(Op.WRITE, sizes.raw_bytes)

    def move(self, op: Op, size: int) -> None:
        """Write or read ``size`` bytes at the full depth."""
        queue, total, sent, done = self._queue, size // _BLOCK_BYTES, 0, 0
        blocks = self._sizes.raw_bytes // _BLOCK_BYTES
        while done < total:
            room = min(total - sent, queue.depth - queue.in_flight)
            requests = [
                Request(
                    op,
                    self._fd,
                    index % blocks * _BLOCK_BYTES,
                    ((self._arena.address + index % _SLOTS * _BLOCK_BYTES, _BLOCK_BYTES),),
                    index,
                )
                for index in range(sent, sent + room)
            ]
            sent += queue.submit(requests)
            select.select([queue.event_fd], [], [], 1.0)
            for _, result in queue.reap():
                if result != _BLOCK_BYTES:
                    raise OSError(max(0, -result), "the raw device failed")
                done += 1

    def close(self) -> None:
        """Free it."""
        self._queue.close()
        os.close(self._fd)


class Driven:
    """A tier, driven as the engine's loop drives it."""

    def __init__(self, folder: Path, arena: Arena, sizes: Sizes, interface: str) -> None:
        folder.mkdir(exist_ok=True)
        place = Place(folder, sizes.tier_bytes)
        settings = SsdSettings(
            (place,),
            segment_bytes=256 * MIB,
            interface=interface,
            depth=sizes.depth,
            prewrite=True,
        )
        self._arena = arena
        self.tier = SsdTier(settings, [arena.bytes])
        self.longest_poll_s = 0.0
        self.family = Family(_NAMESPACE, 0, 1, _BLOCK_BYTES)
        self.stored = 0
        self.wait_for(lambda: not self.tier.status.recovering)

    def poll(self) -> list[Any]:
        """One turn of the loop."""
        start = time.perf_counter()
        done = self.tier.poll()
        self.longest_poll_s = max(self.longest_poll_s, time.perf_counter() - start)
        return done

    def wait_for(self, true: Callable[[], bool]) -> None:
        """Turn the loop until ``true()``."""
        end = time.monotonic() + _DEADLINE_S
        while not true():
            self.poll()
            if time.monotonic() > end:
                raise TimeoutError("the tier made no progress")
            select.select([self.tier.event_fd], [], [], 0.05)

    def move(self, numbers: range, *, store: bool) -> int:
        """Store or load blocks; how many were done."""
        left = [list(numbers[start : start + _BATCH]) for start in range(0, len(numbers), _BATCH)]
        out: dict[int, list[int]] = {}
        done = 0
        end = time.monotonic() + _DEADLINE_S
        hold_until = 0.0
        while left or out:
            while left and len(out) < _BATCHES_OUT and time.monotonic() >= hold_until:
                batch = self._batch(left[0], store=store)
                submit = self.tier.submit_store if store else self.tier.submit_load
                ticket = submit(batch)  # type: ignore[arg-type]
                if isinstance(ticket, Throttled):
                    hold_until = time.monotonic() + max(0.001, ticket.retry_after_s)
                    break
                out[ticket] = left.pop(0)
            select.select([self.tier.event_fd], [], [], _HOLD_S)
            for each in self.poll():
                if not each.final:
                    continue
                mine = out.pop(each.ticket)
                done += len(each.rows(Done))
                again = [mine[row] for row in each.rows(Throttled).tolist()]
                if again:
                    left.append(again)
                    hold_until = time.monotonic() + _HOLD_S
            if time.monotonic() > end:
                raise TimeoutError("the tier made no progress")
        return done

    def _batch(self, numbers: list[int], *, store: bool) -> LoadBatch:
        slots = np.array(numbers) % _SLOTS
        places = np.zeros((len(numbers), 1), PLACE_DTYPE)
        places["offset"][:, 0] = slots * _BLOCK_BYTES
        keys = [b"bench-%026d" % number for number in numbers]
        if not store:
            return LoadBatch(self.family, keys, places)
        names = np.array(numbers, np.uint64)
        sums = self._arena.sums[slots].reshape(-1, 1)
        return StoreBatch(self.family, keys, places, sums, names, names)


def measure(folder: Path, sizes: Sizes, interface: str = "auto") -> dict[str, Any]:
    """The figures of the tier in ``folder``, which is used and left empty."""
    name, _ = choose(interface)
    sys.setswitchinterval(0.0005)  # as the daemon does
    arena = Arena()
    took: dict[str, list[Took]] = {key: [] for key in ("raw_write", "write", "raw_read", "read")}
    blocks = sizes.round_bytes // _BLOCK_BYTES
    raw = Raw(folder, arena, sizes, name)
    driven = Driven(folder / "tier", arena, sizes, name)
    # Filled once, so that rounds overwrite: what a device gives for good.
    first = sizes.tier_bytes // _BLOCK_BYTES
    driven.move(range(first), store=True)
    at = first
    # Nothing has been loaded yet, so that room is made without carrying anything over.
    for _ in range(sizes.rounds):
        with _timed(took["raw_write"]):
            raw.move(Op.WRITE, sizes.round_bytes)
        with _timed(took["write"]):
            _all(driven.move(range(at, at + blocks), store=True), blocks)
        at += blocks
    for _ in range(sizes.rounds):
        with _timed(took["raw_read"]):
            raw.move(Op.READ, sizes.round_bytes)
        with _timed(took["read"]):
            _all(driven.move(range(at - blocks, at), store=False), blocks)
    amplification = driven.tier.status.write_amplification
    driven.tier.check()
    driven.tier.drain(10.0)
    driven.tier.close()
    raw.close()
    shutil.rmtree(folder / "tier")
    (folder / "raw").unlink()
    found = _figures(took, sizes.round_bytes)
    found["loop_block_max_ms"] = round(driven.longest_poll_s * 1e3, 1)
    found["write_amplification"] = round(amplification, 3)
    found["hugepages"], found["interface"] = arena.huge, name
    found |= recovery(folder / "small", sizes, name)
    return found


def _all(done: int, wanted: int) -> None:
    if done != wanted:
        raise OSError(errno.EIO, f"{done} of {wanted} blocks were stored or loaded")


def _figures(took: dict[str, list[Took]], size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, turns in took.items():
        found[f"{key}_gbs"] = round(statistics.median(size / GB / t.seconds for t in turns), 2)
        found[f"{key}_cpu_s_per_gb"] = round(
            statistics.median(t.cpu_s / (size / GB) for t in turns), 4
        )
    for key in ("write", "read"):
        pairs = zip(took[f"raw_{key}"], took[key], strict=True)
        ratios = [raw.seconds / tier.seconds for raw, tier in pairs]
        found[f"{key}_ratio"] = round(statistics.median(ratios), 3)
        found[f"{key}_ratio_spread"] = [round(min(ratios), 3), round(max(ratios), 3)]
    return found


def recovery(folder: Path, sizes: Sizes, interface: str) -> dict[str, Any]:
    """Blocks a second that are read back from footers, all of them in full segments; the files are
    read directly, so no cache is warm.
    """
    folder.mkdir()
    region = np.frombuffer(mmap.mmap(-1, 64 * sizes.small_length), np.uint8)
    digest = np.frombuffer(xxhash.xxh3_128_digest(region[: sizes.small_length].data), "V16")
    size = sizes.small_blocks * 2 * sizes.small_length * 5 // 4 + (512 << 20)
    settings = SsdSettings(
        (Place(folder, size),), segment_bytes=64 * MIB, interface=interface, write_bytes=256 << 10
    )
    family = Family(_NAMESPACE, 0, 1, sizes.small_length)
    tier = SsdTier(settings, [region])
    offered = 0
    while tier.counts["stored_blocks"] < sizes.small_blocks:
        # Some are put off while a segment is made; others are offered instead.
        names = np.arange(offered, offered + 512, dtype=np.uint64)
        keys = [b"small-%026d" % number for number in names.tolist()]
        sums = np.repeat(digest, 512).reshape(-1, 1)
        batch = StoreBatch(family, keys, np.zeros((512, 1), PLACE_DTYPE), sums, names, names)
        offered += 512
        tier.submit_store(batch)
        select.select([tier.event_fd], [], [], 0.02)
        tier.poll()
    tier.drain(_DEADLINE_S)
    tier.close()
    start, cpu = time.perf_counter(), time.process_time()
    longest = 0.0
    tier = SsdTier(settings, [region])
    while tier.status.recovering:
        select.select([tier.event_fd], [], [], 0.05)
        began = time.perf_counter()
        tier.poll()
        longest = max(longest, time.perf_counter() - began)
    seconds, used = time.perf_counter() - start, time.process_time() - cpu
    blocks = tier.status.blocks
    tier.close()
    shutil.rmtree(folder)
    return {
        "recovered_blocks": blocks,
        "recover_blocks_per_s": round(blocks / seconds),
        "recover_cpu_s_per_million": round(used / blocks * 1e6, 2),
        "recover_loop_block_max_ms": round(longest * 1e3, 1),
    }


def main() -> None:
    """``python -m kvhearth_server.bench.ssd DIRECTORY``: one JSON object."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--interface", default="auto")
    parser.add_argument("--rounds", type=int, default=Sizes.rounds)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory, prefix="kvhearth-bench-") as folder:
        sizes = Sizes(rounds=options.rounds)
        found = measure(Path(folder), sizes, options.interface)
    sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()

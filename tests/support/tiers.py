"""Blocks of known content, an arena to hold them, and a tier driven step by step."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import mmap
import os
import select
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from kvhearth.model import U8
from kvhearth_server.tiers.base import (
    ADDRESS_DTYPE,
    BlockSpec,
    Completion,
    Done,
    LoadBatch,
    StoreBatch,
    Throttled,
    Tier,
)
from kvhearth_server.tiers.ssd.directory import Directory
from kvhearth_server.tiers.ssd.files import Files
from kvhearth_server.tiers.ssd.format import PAGE_BYTES, RECORD_DTYPE
from kvhearth_server.tiers.ssd.settings import SsdDirectorySpec, SsdSettings, segment_cost_bytes
from kvhearth_server.tiers.ssd.tier import Environment, SsdTier

DEADLINE_S = 20.0
NAMESPACE = hashlib.sha256(b"tests").digest()
PAGE = 4096
SEGMENT_BYTES = 256 << 10
LENGTH = 10_000
"""Not a multiple of the page size, so that every test includes padding."""


def family(**changes: Any) -> BlockSpec:
    """A family of small blocks."""
    return BlockSpec(
        **{"namespace": NAMESPACE, "group": 0, "epoch": 1, "length": LENGTH, **changes}
    )


def key_of(number: int) -> bytes:
    """A key of 32 bytes."""
    return hashlib.sha256(b"key %d" % number).digest()


def keys_of(numbers: range | list[int]) -> list[bytes]:
    """Return the keys of several numbers."""
    return [key_of(number) for number in numbers]


def content_of(number: int, shard: int, length: int) -> U8:
    """Return bytes that depend on everything that names them."""
    return np.frombuffer(np.random.default_rng([number, shard, length]).bytes(length), np.uint8)


def settings(*folders: Path, segments: int = 8, **changes: Any) -> SsdSettings:
    """Return settings with small segments, ``segments`` of them in each folder."""
    size = changes.pop("segment_bytes", SEGMENT_BYTES)
    capacity = segments * segment_cost_bytes(size) + (64 << 10)
    for folder in folders:
        folder.mkdir(exist_ok=True)
    places = tuple(SsdDirectorySpec(folder, capacity) for folder in folders)
    return SsdSettings(places, segment_bytes=size, **changes)


def a_directory(place: SsdDirectorySpec, segment_bytes: int) -> Directory:
    """Open a directory whose thread is never used, so that it signals nothing."""
    return Directory(place, SsdSettings((place,), segment_bytes=segment_bytes), Files(), -1)


class Clock:
    """The tier's clock: the machine's, until a test advances or stops it."""

    def __init__(self) -> None:
        self._ahead_s = 0.0
        self._held: float | None = None

    def __call__(self) -> float:
        held = self._held
        return time.monotonic() + self._ahead_s if held is None else held

    def put_forward(self, seconds: float) -> None:
        """Advance the clock."""
        self._ahead_s += seconds

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Stop the clock for the length of a block."""
        self._held = self()
        try:
            yield
        finally:
            self._held = None


class Arena:
    """One region of slots: the first half is for stores, the second for loads."""

    def __init__(self, slots: int = 128, slot_bytes: int = 16 << 10) -> None:
        self._mapping = mmap.mmap(-1, 2 * slots * slot_bytes)
        self.bytes: U8 = np.frombuffer(self._mapping, np.uint8)
        self.slots, self.slot_bytes = slots, slot_bytes

    def places(self, first: int, count: int, shards: int) -> Any:
        """Return the places of ``count`` blocks from slot ``first``, (count, shards)."""
        rows = np.zeros((count, shards), ADDRESS_DTYPE)
        rows["offset"] = (
            first + np.arange(count * shards).reshape(count, shards)
        ) * self.slot_bytes
        return rows

    def view(self, slot: int, length: int) -> U8:
        """Return the bytes of a slot."""
        return self.bytes[slot * self.slot_bytes :][:length]


class Desk:
    """A tier with an arena. Every content is known by its number, so every answer is checked."""

    def __init__(self, tier: Tier, arena: Arena) -> None:
        self.tier, self.arena = tier, arena
        self.events: list[Completion] = []
        self._poll = select.poll()
        self._poll.register(tier.event_fd, select.POLLIN)

    def store_batch(self, numbers: range | list[int], of: BlockSpec) -> StoreBatch:
        """Fill slots with known bytes and return them as a batch."""
        count, shards = len(numbers), of.shards
        assert count * shards <= self.arena.slots
        sums = np.zeros((count, shards), "V16")
        for row, number in enumerate(numbers):
            for shard in range(shards):
                data = content_of(number, shard, of.length)
                self.arena.view(row * shards + shard, of.length)[:] = data
                sums[row, shard] = np.frombuffer(xxhash.xxh3_128_digest(data.data), "V16")[0]
        names = np.array(numbers, np.uint64)
        places = self.arena.places(0, count, shards)
        return StoreBatch(of, keys_of(list(numbers)), places, sums, names + 1, names)

    def load_batch(self, numbers: range | list[int], of: BlockSpec) -> LoadBatch:
        """Return a batch of wiped slots to load into."""
        count, shards = len(numbers), of.shards
        assert count * shards <= self.arena.slots
        half = self.arena.slots
        self.arena.bytes[half * self.arena.slot_bytes :] = 0xEE
        return LoadBatch(of, keys_of(list(numbers)), self.arena.places(half, count, shards))

    def wait(self, ticket: int | Throttled, deadline_s: float = DEADLINE_S) -> Completion:
        """Wait for a ticket's final completion."""
        assert not isinstance(ticket, Throttled), ticket
        end = time.monotonic() + deadline_s
        while True:
            self.events += self.tier.poll()
            for each in self.events:
                if each.ticket == ticket and each.final:
                    self.events.remove(each)
                    return each
            assert time.monotonic() < end, f"no completion of {ticket} in {deadline_s} s"
            self._poll.poll(50)

    def store(self, numbers: range | list[int], of: BlockSpec | None = None) -> Completion:
        """Store blocks and wait; a batch that is refused for now is submitted again."""
        batch = self.store_batch(numbers, of or family())
        end = time.monotonic() + DEADLINE_S
        while isinstance(answer := self.tier.submit_store(batch), Throttled):
            assert time.monotonic() < end, answer
            self._poll.poll(10)
            self.events += self.tier.poll()
        return self.wait(answer)

    def store_all(self, numbers: range | list[int], of: BlockSpec | None = None) -> None:
        """Store blocks until each is done; those that found no place are submitted again."""
        left = list(numbers)
        end = time.monotonic() + DEADLINE_S
        while left:
            done = self.store(left[:32], of)
            kept = set(done.rows(Throttled).tolist())
            assert len(kept) + len(done.rows(Done)) == len(left[:32]), done.parts
            left = [left[row] for row in sorted(kept)] + left[32:]
            assert time.monotonic() < end, done.parts
            self._poll.poll(5 if kept else 0)

    def load(self, numbers: range | list[int], of: BlockSpec | None = None) -> Completion:
        """Load blocks, wait, and compare every byte of those reported as loaded."""
        of = of or family()
        done = self.wait(self.tier.submit_load(self.load_batch(numbers, of)))
        for row in done.rows(Done).tolist():
            for shard in range(of.shards):
                slot = self.arena.slots + row * of.shards + shard
                wanted = content_of(list(numbers)[row], shard, of.length)
                assert (self.arena.view(slot, of.length) == wanted).all(), "wrong bytes"
        return done

    def settle(self, deadline_s: float = DEADLINE_S) -> None:
        """Poll until the log is recovered."""
        end = time.monotonic() + deadline_s
        while self.tier.recovering:  # type: ignore[attr-defined]
            self.events += self.tier.poll()
            assert time.monotonic() < end
            self._poll.poll(20)

    def rest(self, deadline_s: float = DEADLINE_S) -> None:
        """Poll until the tier does nothing by itself: each directory has its next segment."""
        end = time.monotonic() + deadline_s
        while True:
            self.events += self.tier.poll()
            now = self.tier.figures()  # type: ignore[attr-defined]
            ready = all(place.segments.get("open", 0) >= 2 for place in now.directories)
            if ready and not (now.queued_reads or now.queued_writes or now.running_requests):
                return
            assert time.monotonic() < end, now
            self._poll.poll(10)

    def pump(self, seconds: float) -> None:
        """Poll for a while."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.events += self.tier.poll()
            self._poll.poll(10)


def segment_files(folder: Path) -> Iterator[Path]:
    """Return the segment files of a folder, by name."""
    return iter(sorted(folder.glob("*.segment")))


def spoil(folder: Path, key: bytes) -> int:
    """Flip a bit of a block's payload in each of its records. Return how many records it has."""
    found = 0
    for path in segment_files(folder):
        data = path.read_bytes()
        for page in range(PAGE_BYTES, len(data) - PAGE_BYTES, PAGE_BYTES):
            (head,) = np.frombuffer(data, RECORD_DTYPE, 1, page)
            # A footer's lines name records that lie elsewhere.
            if head["key"].tobytes()[: len(key)] == key and head["position"] * PAGE_BYTES == page:
                with path.open("r+b") as file:
                    file.seek(page + PAGE_BYTES)
                    file.write(bytes([data[page + PAGE_BYTES] ^ 1]))
                found += 1
    return found


class NoDirect(Files):
    """A file system without O_DIRECT."""

    def open_raw(self, path: Path, flags: int) -> int:

        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct I/O")
        return super().open_raw(path, flags)


class Opened:
    """A tier over folders, its log recovered; closed at the end, books checked."""

    def __init__(self, *folders: Path, files: Files | None = None, **changes: object) -> None:
        reported = settings(*folders, **changes)
        self.tier = SsdTier(
            reported, [(arena := Arena()).bytes], environment=Environment(files=files or Files())
        )
        self.desk = Desk(self.tier, arena)

    def __enter__(self) -> Desk:
        self.desk.settle()
        return self.desk

    def __exit__(self, *_: object) -> None:
        assert self.tier.drain(DEADLINE_S)
        self.desk.events += self.tier.poll()
        self.tier.check()
        self.tier.close()

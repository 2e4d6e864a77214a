"""Blocks of known content, an arena to hold them, and a tier driven step by step."""

from __future__ import annotations

import hashlib
import mmap
import os
import select
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from kvhearth.model import U8
from kvhearth_lab.harness import HUNG_S
from kvhearth_server.tiers.base import (
    ADDRESS_DTYPE,
    BlockSpec,
    Completion,
    Counts,
    DirectoryError,
    Done,
    LoadBatch,
    StoreBatch,
    Throttled,
    Tier,
)
from kvhearth_server.tiers.ssd.directory import Directory
from kvhearth_server.tiers.ssd.disk.queues import PIECES_MAX, Request
from kvhearth_server.tiers.ssd.files import Files
from kvhearth_server.tiers.ssd.format import RECORD_BYTES, RECORD_DTYPE, RECORD_MAGIC
from kvhearth_server.tiers.ssd.settings import SsdDirectorySpec, SsdSettings, segment_cost_bytes
from kvhearth_server.tiers.ssd.tier import Environment, SsdTier
from kvhearth_server.tiers.ssd.write_limits import SeenTwice
from support.drive import PAGE, Drive, Page, size_of

STEP_S = 0.05
"""Time that passes while a drive and all on it are idle."""
STEPS_MAX = 100_000
NAMESPACE = hashlib.sha256(b"tests").digest()
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


def keys_of(numbers: Sequence[int]) -> list[bytes]:
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


def a_directory(
    place: SsdDirectorySpec, segment_bytes: int, files: Files | None = None
) -> Directory:
    """Open a directory whose worker never works."""
    drive, found = Drive(), SsdSettings((place,), segment_bytes=segment_bytes)
    return Directory(place, found, files or drive.files, -1, drive.start)


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
    """A tier with an arena. Every content is known by its number, so every answer is checked.

    With a drive nothing waits: each step does what can be done, and moves the time if there is
    nothing. Other tiers have threads, which are waited for.
    """

    def __init__(self, tier: Tier, arena: Arena, drive: Drive | None = None) -> None:
        self.tier, self.arena = tier, arena
        self.events: list[Completion] = []
        self._drive = drive
        self._poll = select.poll()
        self._poll.register(tier.event_fd, select.POLLIN)

    def step(self) -> bool:
        """Have the tier do something; false if a drive and all on it are idle."""
        if self._drive is None:
            self._poll.poll(20)
            self.events += self.tier.poll()
            return True
        moved = self._drive.step()
        done = self.tier.poll()
        self.events += done
        return moved or bool(done) or bool(self._poll.poll(0))

    def announced(self) -> bool:
        """Whether the tier's descriptor tells that it has something to report."""
        if self._drive is None:
            return bool(self._poll.poll(HUNG_S * 1000))
        while self._drive.step():
            pass
        return bool(self._poll.poll(0))

    def until(self, true: Callable[[], object], what: object = "it never happens") -> None:
        """Take steps until ``true()``. Time moves while there is nothing to do."""
        end = time.monotonic() + HUNG_S
        steps = 0
        while not true():
            idle = not self.step()
            steps += 1
            if self._drive is None:
                assert time.monotonic() < end, what
            else:
                assert steps < STEPS_MAX, what
                self._drive.clock.now += STEP_S * idle

    def idle(self) -> None:
        """Take steps until nothing happens, in no time."""
        assert self._drive is not None
        assert not all(self.step() for _ in range(STEPS_MAX)), "it is never idle"

    def drain(self) -> None:
        """End all that has begun, and begin nothing more."""
        if self._drive is None:
            assert self.tier.drain(HUNG_S)
        else:
            self.until(lambda: self.tier.drain(0.0), "it is never drained")

    def store_batch(self, numbers: Sequence[int], of: BlockSpec) -> StoreBatch:
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
        return StoreBatch(of, keys_of(numbers), places, sums, names + 1, names)

    def load_batch(self, numbers: Sequence[int], of: BlockSpec) -> LoadBatch:
        """Return a batch of wiped slots to load into."""
        count, shards = len(numbers), of.shards
        assert count * shards <= self.arena.slots
        half = self.arena.slots
        self.arena.bytes[half * self.arena.slot_bytes :] = 0xEE
        return LoadBatch(of, keys_of(numbers), self.arena.places(half, count, shards))

    def begin(self, numbers: Sequence[int], of: BlockSpec | None = None) -> int:
        """Submit a load."""
        ticket = self.tier.submit_load(self.load_batch(numbers, of or family()))
        assert isinstance(ticket, int), ticket
        return ticket

    def wait(self, ticket: int | Throttled) -> Completion:
        """Wait for a ticket's final completion."""
        assert not isinstance(ticket, Throttled), ticket
        found: list[Completion] = []

        def ended() -> bool:
            found.extend(each for each in self.events if each.ticket == ticket and each.final)
            return bool(found)

        self.until(ended, f"no completion of {ticket}")
        self.events.remove(found[0])
        return found[0]

    def store(self, numbers: Sequence[int], of: BlockSpec | None = None) -> Completion:
        """Store blocks and wait; a batch that is refused for now is submitted again."""
        batch = self.store_batch(numbers, of or family())
        answers: list[int] = []

        def taken() -> bool:
            answer = self.tier.submit_store(batch)
            answers.extend([answer] if isinstance(answer, int) else [])
            return bool(answers)

        self.until(taken, "no store is taken")
        return self.wait(answers[0])

    def store_all(self, numbers: Sequence[int], of: BlockSpec | None = None) -> None:
        """Store blocks until each is done; those that found no place are submitted again."""
        left = list(numbers)

        def stored() -> bool:
            done = self.store(left[:32], of)
            kept = set(done.rows(Throttled).tolist())
            assert len(kept) + len(done.rows(Done)) == len(left[:32]), done.parts
            left[:32] = [left[row] for row in sorted(kept)]
            return not left

        self.until(stored, "some are never stored")

    def load(self, numbers: Sequence[int], of: BlockSpec | None = None) -> Completion:
        """Load blocks, wait, and compare every byte of those reported as loaded."""
        of = of or family()
        done = self.wait(self.begin(numbers, of))
        self.compare(done, numbers, of)
        return done

    def compare(self, done: Completion, numbers: Sequence[int], of: BlockSpec) -> None:
        """Compare every byte of the blocks reported as loaded."""
        for row in done.rows(Done).tolist():
            for shard in range(of.shards):
                slot = self.arena.slots + row * of.shards + shard
                wanted = content_of(numbers[row], shard, of.length)
                assert (self.arena.view(slot, of.length) == wanted).all(), "wrong bytes"

    def loaded(self, numbers: Sequence[int], of: BlockSpec | None = None) -> list[int]:
        """Return which blocks of a load arrive."""
        return [numbers[row] for row in sorted(self.load(numbers, of).rows(Done).tolist())]

    def present(self, numbers: Sequence[int], of: BlockSpec | None = None) -> list[int]:
        """Return which of the blocks are present."""
        found = self.tier.look_up(of or family(), keys_of(numbers)).present
        return [number for number, there in zip(numbers, found.tolist(), strict=True) if there]

    def settle(self) -> None:
        """Wait until the log is recovered."""
        self.until(lambda: not self.tier.recovering, "it is never recovered")  # type: ignore[attr-defined]


class Opened(Desk):
    """An SSD tier on a drive, its log recovered; closed at the end of a block, books checked.

    Args:
        drive: the drive; None for one that only this tier has.
        real: files, queue, threads and time of the machine.
        changes: as for ``settings``.
    """

    tier: SsdTier

    def __init__(
        self,
        *folders: Path,
        drive: Drive | None = None,
        real: bool = False,
        settle: bool = True,
        admission: SeenTwice | None = None,
        offers: bool = False,
        **changes: Any,
    ) -> None:
        self.folders, self._abandoned = folders, False
        self.drive = drive or Drive(changes.get("depth", 16))
        # Wide bounds: a test that is about one sets it. No thread verifies.
        outside = {} if real else {"sum_threads": 0}
        limits = {"slow_s": 600.0, "stuck_s": 600.0, "open_s": 600.0}
        found = settings(*folders, **{**limits, **outside, **changes})
        environment = Environment() if real else self.drive.environment()
        arena = Arena()
        try:
            tier = SsdTier(
                found, [arena.bytes], admission=admission, environment=environment, offers=offers
            )
        except DirectoryError:
            if environment.queue is not None:
                environment.queue.close()
            raise
        super().__init__(tier, arena, None if real else self.drive)
        if settle:
            self.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object = None, *_: object) -> None:
        if self._abandoned:
            return
        if self._drive is not None:
            self.drive.queue.well()
        if kind is None:
            self.check()
        self.tier.close()

    def abandon(self) -> None:
        """Close a tier whose requests never end, and give back what it leaves to the kernel."""
        self._abandoned = True
        self.tier.close(0.0)
        for each in self.tier.log.directories:
            each.close()
        self.drive.queue.close()
        os.close(self.tier.event_fd)

    def check(self) -> None:
        """Drain the tier, and check that books balance and bounds were kept."""
        if self._drive is not None:
            self.idle()
            self._check_reads()
        self.drain()
        self.events += self.tier.poll()
        self.tier.check()
        assert self.tier.figures().queued_reads == 0
        self.check_capacity()

    def check_capacity(self) -> None:
        """Check that no directory is over its capacity."""
        most = {str(place.path): place.capacity_bytes for place in self.tier.settings.places}
        for path, size in self.tier.allocated_bytes().items():
            assert size <= most[path], "over its capacity"

    def _check_reads(self) -> None:
        for each in self.reads:
            assert len(each.pieces) <= PIECES_MAX
            assert size_of(each) <= self.tier.settings.request_bytes or len(each.pieces) == 1

    def rest(self) -> None:
        """Wait until the tier does nothing by itself: each directory has its next segment."""

        def rests() -> bool:
            now = self.tier.figures()
            ready = all(place.segments.get("open", 0) >= 2 for place in now.directories)
            return ready and not (now.queued_reads or now.queued_writes or now.running_requests)

        self.until(rests, "it never rests")

    @property
    def reasons(self) -> str:
        """All problems as one text."""
        return "; ".join(self.tier.problems().values())

    @property
    def counts(self) -> Counts:
        """The tier's counters."""
        return self.tier.counts

    @property
    def reads(self) -> list[Request]:
        """All reads that the drive took."""
        return self.drive.queue.reads


def segment_files(folder: Path) -> list[Path]:
    """Return the segment files of a folder, by name."""
    return sorted(folder.glob("*.segment"))


def patch(path: Path, at: int, data: bytes) -> None:
    """Replace bytes of a file; a negative place counts from its end."""
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_SET if at >= 0 else os.SEEK_END)
        file.write(data)


def flip(path: Path, at: int, bit: int = 0) -> None:
    """Flip a bit of a file."""
    patch(path, at, bytes([path.read_bytes()[at] ^ (1 << bit)]))


def flip_stored(folder: Path, content: bytes) -> None:
    """Flip a bit of a content in the one file below a folder that holds it."""
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    ((path, at),) = ((path, text.find(content)) for path, text in files.items() if content in text)
    flip(path, at)


def payloads(
    folder: Path, key: bytes, shard: int | None = None, group: int = 0
) -> Iterator[tuple[Path, int]]:
    """Return file and first page of each record's payload; the page before is its header."""
    for path in segment_files(folder):
        pages = np.fromfile(path, np.uint8).reshape(-1, PAGE)
        heads = np.ascontiguousarray(pages[:, :RECORD_BYTES]).view(RECORD_DTYPE).reshape(-1)
        # A footer's lines name records that lie elsewhere.
        mine = (heads["magic"] == RECORD_MAGIC) & (heads["position"] == np.arange(len(heads)))
        mine &= heads["group"] == group
        mine &= heads["key"] == np.frombuffer(key.ljust(64, b"\0"), "V64")
        for page in np.flatnonzero(mine).tolist():
            if shard is None or heads["shard"][page] == shard:
                yield path, page + 1


def payload_page(folder: Path, key: bytes, shard: int = 0, group: int = 0) -> Page:
    """Return the first page of a record's payload."""
    path, page = next(payloads(folder, key, shard, group))
    return path.stat().st_ino, page


def spoil(folder: Path, key: bytes, shard: int | None = None) -> int:
    """Flip a bit of a block's payload in each of its records. Return how many records it has."""
    found = list(payloads(folder, key, shard))
    for path, page in found:
        flip(path, page * PAGE)
    return len(found)

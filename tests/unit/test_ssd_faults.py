"""Drives that fail, fill up, hang or turn read-only: degraded with reasons, never hung or fatal."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.memory_places import mounted
from support.tiers import (
    DEADLINE_S,
    SEGMENT_BYTES,
    Arena,
    Clock,
    Desk,
    NoDirect,
    a_directory,
    family,
    key_of,
    settings,
)

from kvhearth_lab.harness.faults import Faults, FaultyQueue
from kvhearth_server.tiers.base import (
    Corrupt,
    Counts,
    DirectoryError,
    Done,
    Failed,
    Missing,
    StoreBatch,
    Throttled,
)
from kvhearth_server.tiers.ssd.directory import DirectoryHealth
from kvhearth_server.tiers.ssd.disk.executor import Job
from kvhearth_server.tiers.ssd.disk.probe import choose, open_queue
from kvhearth_server.tiers.ssd.disk.queues import Op, Request
from kvhearth_server.tiers.ssd.files import Files
from kvhearth_server.tiers.ssd.settings import SsdDirectorySpec
from kvhearth_server.tiers.ssd.tier import Environment, SsdTier, Watch
from kvhearth_server.tiers.ssd.write_limits import SeenTwice

STUCK_S = 600.0
"""Longer than any request lasts that the test does not hold: tests put the clock forward."""


class Rig:
    """A tier on a drive and a clock that misbehave on command."""

    def __init__(self, *folders: Path, **changes: object) -> None:
        self.faults = Faults()
        self.queue = FaultyQueue(open_queue(choose()[0], 16), self.faults)
        self.arena = Arena()
        self.clock = Clock()
        found = settings(*folders, slow_s=STUCK_S / 2, stuck_s=STUCK_S, **changes)
        self.tier = SsdTier(
            found, [self.arena.bytes], environment=Environment(queue=self.queue, clock=self.clock)
        )
        self.desk = Desk(self.tier, self.arena)
        self.desk.settle()

    def reasons(self) -> str:
        """All reasons as one text."""
        return "; ".join(self.tier.problems().values())

    def until(self, true: Callable[[], bool], what: str) -> None:
        """Polls until ``true()``."""
        end = time.monotonic() + DEADLINE_S
        while not true():
            self.desk.pump(0.01)
            assert time.monotonic() < end, what

    def close(self) -> None:
        """Restores the drive and closes the tier."""
        self.faults.errors, self.faults.short, self.faults.held = {}, frozenset(), frozenset()
        assert self.tier.drain(DEADLINE_S)
        self.desk.events += self.tier.poll()
        self.tier.check()
        self.tier.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path / "one")
    rig.desk.store_all(range(8))
    yield rig
    rig.close()


@pytest.mark.parametrize(
    ("number", "reason", "text"),
    [
        (errno.EIO, "io", "I/O errors"),
        (errno.ENOSPC, "no_space", "no space left"),
        (errno.EROFS, "read_only", "read-only"),
    ],
)
def test_a_write_that_fails(rig: Rig, number: int, reason: str, text: str) -> None:
    rig.desk.rest()
    rig.faults.errors = {Op.WRITE: number}
    with rig.clock.held():  # long enough that no retry happens meanwhile
        done = rig.desk.store(range(10, 14))
        assert done.parts[0][0] == Failed(reason)
        assert not len(done.rows(Done))
        assert text in rig.reasons()
        refused = rig.desk.store(range(20, 22))
        assert isinstance(refused.parts[0][0], Throttled)
        assert refused.parts[0][0].reason == "degraded"
        assert len(rig.desk.load(range(8)).rows(Done)) == 8, "reads go on"
        assert len(rig.desk.load(range(10, 14)).rows(Missing)) == 4
    rig.faults.errors = {}
    rig.desk.store_all(range(10, 14))
    assert len(rig.desk.load(range(10, 14)).rows(Done)) == 4
    assert text not in rig.reasons()


def test_a_read_that_fails(rig: Rig) -> None:
    rig.faults.errors = {Op.READ: errno.EIO}
    done = rig.desk.load(range(4))
    assert done.parts[0][0] == Failed("io")
    assert "reads: its device reports I/O errors" in rig.reasons()
    rig.faults.errors = {}
    assert len(rig.desk.load(range(4)).rows(Missing)) == 4, "what cannot be read is forgotten"
    rig.desk.store_all(range(4))
    assert len(rig.desk.load(range(8)).rows(Done)) == 8
    assert "I/O errors" not in rig.reasons()


def test_short_reads_and_writes(rig: Rig) -> None:
    rig.faults.short = frozenset({Op.READ})
    assert rig.desk.load([0]).parts[0][0] == Failed("short")
    rig.faults.short = frozenset({Op.WRITE})
    assert rig.desk.store([30]).parts[0][0] == Failed("short")
    rig.faults.short = frozenset()
    rig.desk.store_all([0, 30])
    assert len(rig.desk.load([0, 30]).rows(Done)) == 2


def test_some_errors_among_many_leave_no_wrong_byte_and_no_leak(rig: Rig) -> None:
    rig.faults.rate = 0.2
    for turn in range(12):
        rig.clock.put_forward(60.0)  # the pause after a failed write is over
        rig.faults.errors = {Op.WRITE: errno.EIO, Op.READ: errno.EIO} if turn % 3 else {}
        rig.desk.store(range(100 + 8 * turn, 108 + 8 * turn))
        done = rig.desk.load(range(100, 108 + 8 * turn))
        assert not len(done.rows(Corrupt))
    assert rig.queue.injected > 5


def test_a_drive_that_hangs(rig: Rig) -> None:
    rig.desk.rest()
    rig.faults.held = frozenset({Op.READ})
    ticket = rig.tier.submit_load(rig.desk.load_batch(range(4), family()))
    rig.until(lambda: rig.queue.in_flight == 4, "the reads never began")
    rig.clock.put_forward(STUCK_S - 60)
    rig.desk.pump(0.05)
    assert rig.desk.events == [], "it may still come"
    rig.clock.put_forward(60)
    rig.until(lambda: bool(rig.desk.events), "nobody said that it hangs")
    (notice,) = rig.desk.events
    assert (notice.ticket, notice.final) == (ticket, False)
    assert notice.rows(Failed).tolist() == [0, 1, 2, 3]
    assert "holds on to 4 requests" in rig.reasons()
    assert isinstance(rig.tier.submit_store(rig.desk.store_batch([90], family())), int)
    assert not rig.tier.drain(0.1), "its slots are still the drive's"
    rig.faults.held = frozenset()
    done = rig.desk.wait(ticket)
    assert len(done.rows(Done)) == 4
    rig.until(lambda: "is slow" in rig.reasons(), "a slow request is told")


def test_a_request_that_waited_long_for_its_turn_is_not_stuck() -> None:
    class Drive:
        health = DirectoryHealth("drive")

    health, directory = Drive.health, Drive()
    log: Any = SimpleNamespace(
        directories=[directory],
        segments={1: SimpleNamespace(fd=3, directory=directory)},
    )
    job = Job(Op.WRITE, 3, 0, (), 0, (), lambda _: None, queued_at=1.0, begun_at=8.0)
    task: Any = SimpleNamespace(ticket=1, jobs={job}, out=np.arange(1))
    watch = Watch(log, Counts(), slow_s=1.0, stuck_s=5.0)
    watch.look([task], 9.0)
    assert health.may_write(9.0), "a queue that is long, but moves, makes no drive stuck"
    watch.look([task], 14.0)
    assert not health.may_write(14.0)


def test_closing_while_a_drive_hangs_returns(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "one")
    rig.desk.store_all(range(4))
    rig.desk.rest()
    rig.faults.held = frozenset({Op.READ})
    rig.tier.submit_load(rig.desk.load_batch(range(4), family()))
    rig.until(lambda: rig.queue.in_flight == 4, "the reads never began")
    began = time.monotonic()
    rig.tier.close(0.2)
    assert time.monotonic() - began < DEADLINE_S
    rig.faults.held = frozenset()


def descriptors_of(folder: Path) -> frozenset[int]:
    """Numbers of this process's open files below ``folder``."""
    found = set()
    for fd in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{fd}").startswith(f"{folder}/"):
                found.add(fd)
    return frozenset(found)


def test_of_two_drives_one_fails(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "one", tmp_path / "two")
    rig.desk.store_all(range(16))
    rig.faults.fds = descriptors_of(tmp_path / "one")
    rig.faults.errors = {Op.WRITE: errno.EIO}
    left = list(range(100, 140))
    end = time.monotonic() + DEADLINE_S
    while left:
        assert time.monotonic() < end
        done = rig.desk.store(left[:16])
        good = set(done.rows(Done).tolist())
        left = [n for row, n in enumerate(left[:16]) if row not in good] + left[16:]
    assert len(rig.desk.load(range(100, 140)).rows(Done)) == 40
    rig.close()


def test_old_weights_block_that_is_written_late_takes_no_new_ones_place(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "one", tmp_path / "two")
    rig.desk.store_all(range(16))
    rig.desk.rest()
    rig.faults.fds = descriptors_of(tmp_path / "one")
    rig.faults.held = frozenset({Op.WRITE})

    def present(epoch: int) -> list[bool]:
        keys = [key_of(100), key_of(101)]
        return list(rig.tier.look_up(family(epoch=epoch), keys).present)

    three = rig.desk.store_batch([100, 101, 102], family())

    def store_old(row: int) -> int | Throttled:
        one, part = slice(row, row + 1), three
        sums, names, parents = part.checksums[one], part.sequences[one], part.parents[one]
        batch = StoreBatch(part.family, part.keys[one], part.places[one], sums, names, parents)
        return rig.tier.submit_store(batch)

    late = {store_old(0), store_old(1)}
    rig.until(lambda: any(present(1)), "the good drive has one of them")
    held = present(1).index(False)
    if held == 0:  # blocks alternate between the directories
        late.add(store_old(2))
    rig.desk.store_all([100 + held], family(epoch=2))
    rig.faults.held = frozenset()
    rig.queue.wake()
    rig.until(lambda: late <= {each.ticket for each in rig.desk.events}, "all are written")
    assert present(2)[held]
    rig.close()


def test_no_space_for_another_segment_and_what_there_is_is_used(tmp_path: Path) -> None:
    class Full(Files):
        left = 5

        def allocate(self, fd: int, size_bytes: int) -> int:
            if self.left == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.left -= 1
            return super().allocate(fd, size_bytes)

    arena = Arena()
    tier = SsdTier(settings(tmp_path / "one"), [arena.bytes], environment=Environment(files=Full()))
    desk = Desk(tier, arena)
    desk.settle()
    desk.store_all(range(300))
    (reason,) = tier.problems().values()
    assert "no space left on its file system for another segment" in reason
    assert len(desk.load(range(290, 300)).rows(Done)) == 10
    assert len(list((tmp_path / "one").glob("*.segment*"))) == 5
    tier.check()
    tier.close()


def test_a_small_file_system_runs_full(tmp_path: Path) -> None:
    with mounted("tmpfs", "size=1300k", tmp_path / "small") as folder:
        arena = Arena()
        tier = SsdTier(settings(folder, segments=8), [arena.bytes])
        desk = Desk(tier, arena)
        desk.settle()
        desk.store_all(range(200))
        assert len(desk.load(range(190, 200)).rows(Done)) == 10
        assert any("no space" in reason for reason in tier.problems().values())
        tier.check()
        tier.close()


def test_a_file_system_that_was_remounted_read_only(tmp_path: Path) -> None:
    with mounted("tmpfs", "size=16m", tmp_path / "small") as folder:
        arena = Arena()
        tier = SsdTier(settings(folder), [arena.bytes])
        desk = Desk(tier, arena)
        desk.settle()
        desk.store_all(range(20))
        tier.close()
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        tier = SsdTier(settings(folder), [arena.bytes])
        desk = Desk(tier, arena)
        desk.settle()
        assert len(desk.load(range(20)).rows(Done)) == 20
        (reason,) = tier.problems().values()
        assert "may not be written to (Read-only file system)" in reason
        assert desk.store([50]).parts[0][0] == Throttled("degraded", 60.0)
        tier.close()


def test_a_file_system_without_direct_io(tmp_path: Path) -> None:
    arena = Arena()
    tier = SsdTier(
        settings(tmp_path / "one"), [arena.bytes], environment=Environment(files=NoDirect())
    )
    desk = Desk(tier, arena)
    desk.settle()
    desk.store_all(range(4))
    assert len(desk.load(range(4)).rows(Done)) == 4
    (reason,) = tier.problems().values()
    assert "no direct I/O" in reason
    tier.close()


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    found = settings(tmp_path / "one")
    arena = Arena()
    tier = SsdTier(found, [arena.bytes])
    with pytest.raises(DirectoryError, match="another daemon"):
        SsdTier(found, [arena.bytes])
    tier.close()
    SsdTier(found, [arena.bytes]).close()


def test_a_segment_that_somebody_still_locks_is_waited_for(tmp_path: Path) -> None:
    found, arena = settings(tmp_path / "one"), Arena()
    tier = SsdTier(found, [arena.bytes])
    desk = Desk(tier, arena)
    desk.settle()
    desk.store_all(range(20))
    tier.close()
    path = min((tmp_path / "one").glob("*.segment"))
    holder = Files().open(path)
    tier = SsdTier(found, [arena.bytes])
    desk = Desk(tier, arena)
    desk.settle()
    assert tier.figures().locked_files == 1
    desk.load(range(20))
    os.close(holder.fd)
    end = time.monotonic() + DEADLINE_S
    while tier.figures().locked_files:
        desk.pump(0.05)
        assert time.monotonic() < end
    assert len(desk.load(range(20)).rows(Done)) == 20
    tier.close()


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DirectoryError, match="give a directory that exists"):
        a_directory(SsdDirectorySpec(tmp_path / "nowhere", 1 << 30), SEGMENT_BYTES)


def test_a_lowered_capacity_is_kept_to(tmp_path: Path) -> None:
    folder, arena = tmp_path / "one", Arena()
    tier = SsdTier(settings(folder, segments=10), [arena.bytes])
    desk = Desk(tier, arena)
    desk.settle()
    desk.store_all(range(150))
    tier.close()
    smaller = settings(folder, segments=5)
    tier = SsdTier(smaller, [arena.bytes])
    desk = Desk(tier, arena)
    desk.settle()
    end = time.monotonic() + DEADLINE_S
    while tier.allocated_bytes()[str(folder)] > smaller.places[0].capacity_bytes:
        desk.pump(0.02)
        assert time.monotonic() < end, "it stays over its capacity"
    desk.store_all(range(200, 260))
    assert len(desk.load(range(250, 260)).rows(Done)) == 10
    tier.check()
    tier.close()


def test_admission_and_budget_stand_before_the_drive(tmp_path: Path) -> None:
    arena = Arena()
    one_day = settings(tmp_path / "one", bytes_per_day=24 * 10 * 4 * 4096 * 10)
    tier = SsdTier(one_day, [arena.bytes], admission=SeenTwice())
    desk = Desk(tier, arena)
    desk.settle()
    first = desk.store(range(20))
    assert {o.reason for o, _ in first.parts if isinstance(o, Throttled)} == {"admission"}
    end = time.monotonic() + DEADLINE_S
    while not len((second := desk.store(range(20))).rows(Done)):
        assert time.monotonic() < end
    reasons = {o.reason for o, _ in second.parts if isinstance(o, Throttled)}
    assert reasons == {"budget"}
    assert len(second.rows(Done)) in (10, 11), "a tenth of an hour's bytes, the last overdrawn"
    tier.close()


def test_a_full_queue_puts_a_batch_off(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "one", queue_writes=8, queue_reads=8, segment_bytes=4 * SEGMENT_BYTES)
    rig.desk.store_all(range(8))
    rig.faults.held = frozenset(Op)
    first = rig.tier.submit_load(rig.desk.load_batch(range(8), family()))
    assert isinstance(first, int)
    again = rig.tier.submit_load(rig.desk.load_batch([1], family()))
    assert isinstance(again, Throttled)
    assert again.reason == "queue"
    assert isinstance(rig.tier.submit_store(rig.desk.store_batch(range(20, 28), family())), int)
    refused = rig.tier.submit_store(rig.desk.store_batch([40], family()))
    assert isinstance(refused, Throttled)
    assert refused.reason == "queue"
    rig.faults.held = frozenset()
    rig.desk.wait(first)
    rig.close()


def test_a_disk_interface_that_breaks_is_no_hang(tmp_path: Path) -> None:
    class Breaks(FaultyQueue):
        broken = False

        def submit(self, requests: Sequence[Request]) -> int:
            if self.broken:
                raise OSError(errno.EBADF, "the ring is gone")
            return super().submit(requests)

    arena, clock = Arena(), Clock()
    queue = Breaks(open_queue("threads", 4), Faults())
    reported = settings(tmp_path / "one", stuck_s=STUCK_S)
    tier = SsdTier(reported, [arena.bytes], environment=Environment(queue=queue, clock=clock))
    desk = Desk(tier, arena)
    desk.settle()
    desk.store_all(range(8))
    desk.rest()
    queue.broken = True
    ticket = tier.submit_load(desk.load_batch(range(8), family()))
    end = time.monotonic() + DEADLINE_S
    while tier.counts["read_errors"] < 4:
        desk.pump(0.02)
        assert time.monotonic() < end, "those that had not begun never end"
    assert desk.events == []
    clock.put_forward(STUCK_S + 1)
    while not desk.events:
        desk.pump(0.02)
        assert time.monotonic() < end
    (notice,) = desk.events
    # The four that had begun may still be in the kernel's hands: none of their slots is given back.
    assert (notice.ticket, notice.final, len(notice.rows(Failed))) == (ticket, False, 4)
    assert "disk interface failed: threads: the ring is gone" in tier.problems().values()
    assert tier.submit_store(desk.store_batch([50], family())) == Throttled("degraded", 60.0)
    tier.close(0.5)

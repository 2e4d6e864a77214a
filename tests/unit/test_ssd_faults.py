"""Drives that fail, fill up, hang or turn read-only: degraded with reasons, never hung or fatal."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.drive import Drive, is_below, size_of
from support.tiers import SEGMENT_BYTES, Opened, family, segment_files

from kvhearth_server.tiers.base import (
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
from kvhearth_server.tiers.ssd.disk.queues import Op
from kvhearth_server.tiers.ssd.files import Files
from kvhearth_server.tiers.ssd.tier import Watch
from kvhearth_server.tiers.ssd.write_limits import SeenTwice

STUCK_S = 600.0


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Opened]:
    with Opened(tmp_path / "one", slow_s=STUCK_S / 2, stuck_s=STUCK_S) as desk:
        desk.store_all(range(8))
        desk.rest()
        yield desk


def reasons_of(desk: Opened, numbers: range | list[int]) -> set[str]:
    """Store blocks and return why some are not."""
    return {o.reason for o, _ in desk.store(numbers).parts if isinstance(o, Failed | Throttled)}


# -- errors ----------------------------------------------------------------------------------------


def test_writes_that_fail(desk: Opened) -> None:
    errors = [
        (-errno.EIO, "io", "writes: its device reports I/O errors"),
        (-errno.ENOSPC, "no_space", "no space left"),
        (-errno.EROFS, "read_only", "read-only"),
        (4096, "short", "writes: its device moves fewer bytes than asked for"),
    ]
    for row, (result, reason, text) in enumerate(errors):
        numbers = range(10 * row + 10, 10 * row + 14)
        desk.drive.queue.fate = lambda each, result=result: (  # type: ignore[misc]
            result if each.op is Op.WRITE else size_of(each)
        )
        assert reasons_of(desk, numbers) == {reason}
        assert text in desk.reasons
        assert reasons_of(desk, [90, 91]) == {"degraded"}
        assert desk.loaded(range(8)) == list(range(8)), "reads go on"
        assert len(desk.load(numbers).rows(Missing)) == 4
        desk.drive.queue.well()
        assert reasons_of(desk, numbers) == {"degraded"}, "the pause is not over"
        desk.store_all(numbers)
        assert desk.loaded(numbers) == list(numbers)
        assert desk.reasons == ""


def test_reads_that_fail(desk: Opened) -> None:
    for reason, result in ("io", -errno.EIO), ("short", 4096):
        desk.drive.queue.fate = lambda each, result=result: result  # type: ignore[misc]
        assert desk.load(range(4)).parts[0][0] == Failed(reason)
        assert "reads: its device" in desk.reasons
        desk.drive.queue.well()
        assert len(desk.load(range(4)).rows(Missing)) == 4, "what cannot be read is forgotten"
        desk.store_all(range(4))
        assert desk.loaded(range(8)) == list(range(8))
        assert desk.reasons == ""


# -- drives that hang ------------------------------------------------------------------------------


def test_a_drive_that_hangs(desk: Opened) -> None:
    desk.drive.queue.holds = lambda each: each.op is Op.READ
    ticket = desk.begin(range(4))
    desk.idle()
    assert desk.drive.queue.in_flight == 4
    desk.drive.clock.now += STUCK_S - 1
    desk.idle()
    assert desk.events == [], "it may still come"
    desk.drive.clock.now += 2
    desk.idle()
    (notice,) = desk.events
    assert (notice.ticket, notice.final) == (ticket, False)
    assert notice.rows(Failed).tolist() == [0, 1, 2, 3]
    assert "holds on to 4 requests" in desk.reasons
    assert isinstance(desk.tier.submit_store(desk.store_batch([90], family())), int)
    assert not desk.tier.drain(0.0), "its slots are still the drive's"
    desk.drive.queue.release()
    assert len(desk.wait(ticket).rows(Done)) == 4
    assert "is slow" in desk.reasons


def test_a_request_that_waited_long_for_its_turn_is_not_stuck() -> None:
    class Directory:
        health = DirectoryHealth("drive")

    health, directory = Directory.health, Directory()
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


def test_closing_while_a_drive_hangs_returns(desk: Opened) -> None:
    desk.drive.queue.holds = lambda each: each.op is Op.READ
    desk.begin(range(4))
    desk.idle()
    desk.tier.close()
    assert desk.drive.queue.in_flight == 4
    assert os.fstat(desk.drive.queue.waiting[0].fd), "a descriptor that the kernel uses stays"
    desk.abandon()


def test_a_disk_interface_that_breaks_is_no_hang(tmp_path: Path) -> None:
    with Opened(tmp_path / "one", stuck_s=STUCK_S, drive=Drive(depth=4)) as desk:
        desk.store_all(range(8))
        desk.rest()
        desk.drive.queue.broken = OSError(errno.EBADF, "the ring is gone")
        ticket = desk.begin(range(8))
        desk.idle()
        assert desk.counts["read_errors"] == 4, "those that had not begun end"
        assert desk.events == []
        desk.drive.clock.now += STUCK_S + 1
        desk.idle()
        (notice,) = desk.events
        # The four that had begun may be in the kernel's hands: none of their slots is given back.
        assert (notice.ticket, notice.final, len(notice.rows(Failed))) == (ticket, False, 4)
        assert "disk interface failed: drive: the ring is gone" in desk.reasons
        refused = desk.tier.submit_store(desk.store_batch([50], family()))
        assert refused == Throttled("degraded", 60.0)
        desk.abandon()


# -- two drives ------------------------------------------------------------------------------------


def test_of_two_drives_one_fails(tmp_path: Path) -> None:
    with Opened(tmp_path / "one", tmp_path / "two") as desk:
        desk.store_all(range(16))
        desk.drive.queue.fail(Op.WRITE, errno.EIO, tmp_path / "one")
        left = list(range(100, 140))

        def stored() -> bool:
            good = set(desk.store(left[:16]).rows(Done).tolist())
            left[:16] = [number for row, number in enumerate(left[:16]) if row not in good]
            return not left

        desk.until(stored)
        assert desk.loaded(range(100, 140)) == list(range(100, 140))


def test_old_weights_block_that_is_written_late_takes_no_new_ones_place(tmp_path: Path) -> None:
    with Opened(tmp_path / "one", tmp_path / "two") as desk:
        desk.store_all(range(16))
        desk.rest()
        desk.drive.queue.holds = lambda each: (
            each.op is Op.WRITE and is_below(each, tmp_path / "one")
        )
        two = desk.store_batch([100, 101], family())  # blocks alternate between the directories
        late = set()
        for row in range(2):
            one = slice(row, row + 1)
            sums, names, parents = two.checksums[one], two.sequences[one], two.parents[one]
            batch = StoreBatch(two.family, two.keys[one], two.places[one], sums, names, parents)
            late.add(desk.tier.submit_store(batch))
        desk.idle()
        (good,) = desk.present([100, 101])
        held = 201 - good
        new = family(epoch=2)
        desk.tier.submit_store(
            desk.store_batch([50], new)
        )  # takes the turn of the drive that hangs
        desk.until(lambda: desk.present([held], new) or stored_again(desk, held))
        desk.drive.queue.release()
        desk.until(lambda: late <= {each.ticket for each in desk.events})
        assert desk.present([held], new) == [held]


def stored_again(desk: Opened, number: int) -> bool:
    """Store a block of new weights where writes end."""
    desk.tier.submit_store(desk.store_batch([number], family(epoch=2)))
    desk.idle()
    return bool(desk.present([number], family(epoch=2)))


# -- ownership, capacity, bounds -------------------------------------------------------------------


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    with (
        Opened(tmp_path / "one"),
        pytest.raises(DirectoryError, match="another daemon"),
    ):
        Opened(tmp_path / "one")
    with Opened(tmp_path / "one"):
        pass


def test_a_segment_that_somebody_still_locks_is_waited_for(tmp_path: Path) -> None:
    with Opened(tmp_path / "one") as desk:
        desk.store_all(range(20))
    holder = Files().open(segment_files(tmp_path / "one")[0])
    with Opened(tmp_path / "one") as desk:
        assert desk.tier.figures().locked_files == 1
        assert desk.loaded(range(20)) == list(range(15, 20))
        os.close(holder.fd)
        desk.until(lambda: not desk.tier.figures().locked_files)
        assert desk.loaded(range(20)) == list(range(20))


def test_a_lowered_capacity_is_kept_to(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    with Opened(folder, segments=10) as desk:
        desk.store_all(range(150))
    # That capacity is kept is checked at the end of each tier.
    with Opened(folder, segments=5) as desk:
        most = desk.tier.settings.places[0].capacity_bytes
        desk.until(lambda: desk.tier.allocated_bytes()[str(folder)] <= most, "it stays over it")
        desk.store_all(range(200, 260))
        assert desk.loaded(range(250, 260)) == list(range(250, 260))


def test_admission_and_budget_stand_before_the_drive(tmp_path: Path) -> None:
    bound = {"bytes_per_day": 24 * 10 * 4 * 4096 * 10}
    with Opened(tmp_path / "one", admission=SeenTwice(), **bound) as desk:
        desk.until(lambda: desk.tier.figures().directories[0].segments["open"])
        assert reasons_of(desk, range(20)) == {"admission"}
        second = desk.store(range(20))
        stored = len(second.rows(Done))
        assert stored in (10, 11), "a tenth of an hour's bytes, the last overdrawn"
        assert {o.reason for o, _ in second.parts if isinstance(o, Throttled)} == {"budget"}
        now = desk.tier.figures()
        assert now.count("stores_refused_admission") == 20
        assert now.count("stores_refused_budget") == 20 - stored
        assert now.budget_left_bytes is not None
        assert now.budget_left_bytes <= 0


def test_a_full_queue_puts_a_batch_off(tmp_path: Path) -> None:
    bounds = {"queue_writes": 8, "queue_reads": 8, "segment_bytes": 4 * SEGMENT_BYTES}
    with Opened(tmp_path / "one", **bounds) as desk:
        desk.store_all(range(8))
        desk.drive.queue.holds = lambda _: True
        desk.begin(range(8))
        again = desk.tier.submit_load(desk.load_batch([1], family()))
        assert isinstance(desk.tier.submit_store(desk.store_batch(range(20, 28), family())), int)
        refused = desk.tier.submit_store(desk.store_batch([40], family()))
        for answer in again, refused:
            assert isinstance(answer, Throttled)
            assert answer.reason == "queue"
        assert desk.counts["loads_refused_queue"] == desk.counts["stores_refused_queue"] == 1

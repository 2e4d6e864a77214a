"""The tier's threads, those that verify what the drive has moved, and the segments kept ready."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import xxhash
from support.drive import Drive
from support.tiers import a_directory

from kvhearth_lab.harness import HUNG_S
from kvhearth_server.tiers.base import Failure
from kvhearth_server.tiers.ssd.directory import TenantLog
from kvhearth_server.tiers.ssd.disk import worker
from kvhearth_server.tiers.ssd.disk.executor import ChecksumPool, IoExecutor, Job
from kvhearth_server.tiers.ssd.disk.queues import Op, make_event, reset_event, signal_event
from kvhearth_server.tiers.ssd.settings import SsdDirectorySpec


def _job(op: Op, contents: list[bytes], wrong: set[int]) -> Job:
    checks = tuple(
        (memoryview(content), xxhash.xxh3_128_digest(content + b"!" * (index in wrong)))
        for index, content in enumerate(contents)
    )
    return Job(op, -1, 0, (), sum(map(len, contents)), checks, lambda _: None)


@pytest.mark.parametrize("threads", [0, 1, 5])
def test_every_job_is_verified_once_and_wrong_bytes_are_named(threads: int) -> None:
    reported: list[Job] = []
    checksum_pool = ChecksumPool(reported.append, threads)
    jobs = []
    for number in range(300):
        op = Op.READ if number % 3 == 0 else Op.WRITE
        contents = [bytes([number % 256]) * 5000, b"b" * number]
        jobs.append(_job(op, contents, {number % 2} if number % 5 == 0 else set()))
    for start in range(0, len(jobs), 7):
        checksum_pool.check(jobs[start : start + 7])
    assert checksum_pool.alive
    assert checksum_pool.stop(HUNG_S)
    assert checksum_pool.alive == (threads == 0)
    assert len(reported) == len(jobs)
    assert set(reported) == set(jobs)
    for number, job in enumerate(jobs):
        assert job.wrong == ([number % 2] if number % 5 == 0 else [])


def test_reads_are_verified_before_writes_that_wait() -> None:
    order: list[Job] = []
    lock, go, busy = threading.Lock(), threading.Event(), threading.Semaphore(0)

    def then(job: Job) -> None:
        with lock:
            order.append(job)
        busy.release()
        go.wait(HUNG_S)

    checksum_pool = ChecksumPool(then, 2)
    first = [_job(Op.WRITE, [b"x"], set()) for _ in range(16)]
    checksum_pool.check(first)  # more than one thread may take: both are busy now
    assert busy.acquire(timeout=HUNG_S)
    assert busy.acquire(timeout=HUNG_S)
    read = _job(Op.READ, [b"y"], set())
    checksum_pool.check([read])
    go.set()
    assert checksum_pool.stop(HUNG_S)
    assert order.index(read) < 4  # the first of the waiting jobs; two were under way
    assert len(order) == 17


@pytest.mark.parametrize("has_event", [False, True])
def test_a_worker_takes_a_turn_at_the_start_and_after_each_wake(
    monkeypatch: pytest.MonkeyPatch, has_event: bool
) -> None:
    monkeypatch.setattr(worker, "_TICK_MS", 1 << 30)
    event = make_event() if has_event else -1
    taken, left = threading.Semaphore(0), [3]

    def turn() -> bool:
        if has_event:
            reset_event(event)
        left[0] -= 1
        taken.release()
        return left[0] > 0

    made = worker.ThreadWorker("test", turn, event)
    for turns_left in (2, 1, 0):
        assert taken.acquire(timeout=HUNG_S)
        assert not turns_left or made.alive, "a turn for which there was no reason"
        made.wake()
    assert made.join(HUNG_S)
    assert not made.alive
    if has_event:
        os.close(event)


def test_a_job_that_comes_while_the_thread_ends_is_handed_back() -> None:
    drive, event = Drive(), make_event()
    executor = IoExecutor(drive.queue, event, sum_threads=0, start=drive.start)
    assert executor.stop(0.0)
    executor.submit([_job(Op.READ, [b"x"], set())])
    assert [each.reason for each in executor.take(9)] == [Failure.IO]
    executor.close()
    os.close(event)


def test_an_event_is_readable_until_it_is_reset_and_a_bad_one_is_told() -> None:
    event = make_event()
    for _ in range(3):
        signal_event(event)
    reset_event(event)
    reset_event(event)  # it is reset already, which is no error
    os.close(event)
    for call in (signal_event, reset_event):
        with pytest.raises(OSError, match="Bad file descriptor"):
            call(-1)


@pytest.mark.parametrize(("files", "most"), [(4, 1), (15, 1), (16, 2), (64, 4)])
def test_more_segments_are_ready_while_places_are_ahead_of_the_drive(
    tmp_path: Path, files: int, most: int
) -> None:
    directory = a_directory(SsdDirectorySpec(tmp_path, 1 << 30), 1 << 20)
    log = TenantLog("", directory, files, 0.25)
    assert log.ready_wanted(0.0) == 1
    for _ in range(6):
        log.closed(1.0)
    assert log.ready_wanted(2.0) == most
    log.sealing = 0
    assert log.ready_wanted(2.0) == most  # the next burst resembles the last one
    assert log.ready_wanted(60.0) == 1
    directory.close()

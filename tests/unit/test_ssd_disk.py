"""Every disk queue: vectored reads and writes, errors as results, bounded depth, no blocking."""

from __future__ import annotations

import errno
import os
import select
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.drive import HandQueue

from kvhearth_lab.harness import HUNG_S
from kvhearth_server.tiers.ssd.disk.probe import NAMES, choose, open_queue, probe
from kvhearth_server.tiers.ssd.disk.queues import DiskQueue, Op, Reaped, Request
from kvhearth_server.tiers.ssd.log import Buffer

DEPTH = 4
PAGE = 4096


@pytest.fixture(params=["drive", *NAMES])
def queue(request: pytest.FixtureRequest) -> Iterator[DiskQueue]:
    if request.param == "drive":
        yield (queue := HandQueue(DEPTH))
        queue.close()
        return
    verdict = probe(request.param)
    if not verdict.works:
        pytest.skip(f"{verdict.name}: {verdict.reason}")
    queue = open_queue(request.param, DEPTH)
    yield queue
    queue.close()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def ends(queue: DiskQueue, count: int) -> dict[int, int]:
    """Returns the results of ``count`` requests by tag."""
    found: list[Reaped] = []
    while len(found) < count:
        if isinstance(queue, HandQueue):
            queue.end_some()
        assert select.select([queue.event_fd], [], [], HUNG_S)[0], f"only {found} ended"
        found += queue.reap()
    return {each.tag: each.result for each in found}


def test_pieces_are_written_and_read_in_file_order(queue: DiskQueue, fd: int) -> None:
    first, second = Buffer(b"a" * PAGE), Buffer(b"b" * 2 * PAGE)
    pieces = ((first.address, PAGE), (second.address, 2 * PAGE))
    assert queue.submit([Request(Op.WRITE, fd, PAGE, pieces, 1)]) == 1
    assert ends(queue, 1) == {1: 3 * PAGE}
    assert os.pread(fd, 4 * PAGE, 0) == bytes(PAGE) + b"a" * PAGE + b"b" * 2 * PAGE
    back, rest = Buffer(2 * PAGE), Buffer(PAGE)
    pieces = ((back.address, 2 * PAGE), (rest.address, PAGE))
    one = Buffer(PAGE)
    requests = [
        Request(Op.READ, fd, PAGE, pieces, 2),
        Request(Op.READ, fd, 2 * PAGE, ((one.address, PAGE),), 3),
    ]
    assert queue.submit(requests) == 2
    assert ends(queue, 2) == {2: 3 * PAGE, 3: PAGE}
    assert back.bytes.tobytes() == b"a" * PAGE + b"b" * PAGE
    assert rest.bytes.tobytes() == one.bytes.tobytes() == b"b" * PAGE


def test_what_is_wrong_with_a_request_is_its_result(queue: DiskQueue, fd: int) -> None:
    os.pwrite(fd, b"x" * 100, 0)
    buffer = Buffer(PAGE)
    closed = os.dup(fd)
    os.close(closed)
    requests = [
        Request(Op.READ, closed, 0, ((buffer.address, PAGE),), 1),
        Request(Op.READ, fd, 0, ((buffer.address, PAGE),), 2),
        Request(Op.READ, fd, PAGE, ((buffer.address, PAGE),), 3),
    ]
    taken = queue.submit(requests)
    results = ends(queue, taken)
    if taken < 3:
        queue.submit(requests[taken:])
        results |= ends(queue, 3 - taken)
    assert results == {1: -errno.EBADF, 2: 100, 3: 0}
    assert queue.in_flight == 0


def test_depth_is_a_bound(queue: DiskQueue, fd: int) -> None:
    os.ftruncate(fd, 64 * PAGE)
    buffer = Buffer(64 * PAGE)
    requests = [
        Request(Op.READ, fd, index * PAGE, ((buffer.address + index * PAGE, PAGE),), index)
        for index in range(64)
    ]
    assert queue.submit(requests) == DEPTH
    done, sent = {}, DEPTH
    while len(done) < 64:
        done |= ends(queue, 1)
        assert queue.in_flight <= DEPTH
        sent += queue.submit(requests[sent:])
    assert done == dict.fromkeys(range(64), PAGE)
    assert queue.reap() == []


def test_data_is_flushed(queue: DiskQueue, fd: int) -> None:
    assert queue.submit([Request(Op.SYNC, fd, 0, (), 9)]) == 1
    assert ends(queue, 1) == {9: 0}


def test_the_first_that_works_is_chosen_and_says_why_others_do_not() -> None:
    name, probe_results = choose()
    assert [each.name for each in probe_results] == list(NAMES[: NAMES.index(name) + 1])
    assert [each.works for each in probe_results] == [False] * (len(probe_results) - 1) + [True]
    assert choose("threads")[0] == "threads"
    with pytest.raises(ValueError, match="no disk interface"):
        choose("floppy")

"""Drives that obey a file, through which the chaos kit controls a real daemon's disk queue."""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvhearth.failpoints import DISK_ENVIRONMENT_NAME
from kvhearth_lab.harness.faults import CommandedQueue, Commander, commanded
from kvhearth_server.tiers.ssd.disk.probe import open_queue
from kvhearth_server.tiers.ssd.disk.queues import Op, Reaped, Request

DEADLINE_S = 10.0
SIZE = 4096


class Rig:
    """A commanded queue over a file."""

    def __init__(self, folder: Path) -> None:
        self.orders = folder / "orders"
        self.say()
        self.commander = Commander(self.orders)
        self.queue: CommandedQueue = self.commander.queue(open_queue("threads", 4))
        self.fd = os.open(folder / "data", os.O_RDWR | os.O_CREAT)
        os.pwrite(self.fd, b"x" * SIZE, 0)
        self.memory = (ctypes.c_char * SIZE)()
        self._tags = iter(range(1, 1000))

    def say(self, **orders: object) -> None:
        fresh = self.orders.with_suffix(".new")
        fresh.write_text(json.dumps(orders))
        fresh.replace(self.orders)

    def obeys(self, **orders: object) -> None:
        """Writes the command and waits until the queue has read it."""
        before = self.commander._read_at
        self.say(**orders)
        end = time.monotonic() + DEADLINE_S
        while self.commander._read_at == before:
            time.sleep(0.005)
            assert time.monotonic() < end

    def begin(self, op: Op) -> int:
        tag = next(self._tags)
        pieces = ((ctypes.addressof(self.memory), SIZE),) if op is not Op.SYNC else ()
        assert self.queue.submit([Request(op, self.fd, 0, pieces, tag)]) == 1
        return tag

    def end(self, tag: int) -> Reaped:
        end = time.monotonic() + DEADLINE_S
        while True:
            for each in self.queue.reap():
                assert each.tag == tag
                return each
            time.sleep(0.002)
            assert time.monotonic() < end, "a request never ends"

    def result(self, op: Op) -> int:
        return self.end(self.begin(op)).result


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    made = Rig(tmp_path)
    yield made
    made.queue.close()
    os.close(made.fd)


def test_without_orders_it_is_the_queue(rig: Rig) -> None:
    assert rig.result(Op.READ) == SIZE
    assert rig.memory.raw == b"x" * SIZE
    assert rig.result(Op.WRITE) == SIZE
    assert rig.result(Op.SYNC) == 0
    assert rig.queue.in_flight == 0


def test_errors_and_short_results(rig: Rig) -> None:
    rig.obeys(errors={"read": errno.EIO, "sync": errno.EROFS})
    assert rig.result(Op.READ) == -errno.EIO
    assert rig.result(Op.SYNC) == -errno.EROFS
    assert rig.result(Op.WRITE) == SIZE
    rig.obeys(short=["write"])
    assert rig.result(Op.WRITE) == SIZE // 2
    assert rig.result(Op.READ) == SIZE
    rig.obeys()
    assert rig.result(Op.WRITE) == SIZE


def test_what_is_held_comes_later(rig: Rig) -> None:
    rig.obeys(held=["write"])
    tag = rig.begin(Op.WRITE)
    time.sleep(0.1)
    assert rig.queue.reap() == []
    assert rig.queue.in_flight == 1
    rig.obeys()
    assert rig.end(tag) == Reaped(tag, SIZE)
    assert rig.queue.in_flight == 0


def test_a_slow_read_back(rig: Rig) -> None:
    rig.obeys(read_back_s=0.2)
    files = rig.commander.files()
    with mmap.mmap(-1, SIZE) as memory, memoryview(memory) as view:
        begin = time.monotonic()
        assert files.read_into(rig.fd, view, 0) == SIZE
        assert time.monotonic() - begin >= 0.2
        assert bytes(view) == b"x" * SIZE


def test_a_slow_drive(rig: Rig) -> None:
    rig.obeys(delay_s=0.3)
    begin = time.monotonic()
    tag = rig.begin(Op.READ)
    assert rig.end(tag).result == SIZE
    assert time.monotonic() - begin >= 0.3
    # Delayed requests count as in flight, so that the depth bounds them.
    tags = [rig.begin(Op.READ) for _ in range(rig.queue.depth)]
    assert rig.queue.submit([Request(Op.SYNC, rig.fd, 0, (), 9999)]) == 0
    rig.obeys()
    seen: list[int] = []
    end = time.monotonic() + DEADLINE_S
    while len(seen) < len(tags) and time.monotonic() < end:
        seen += [each.tag for each in rig.queue.reap()]
    assert sorted(seen) == tags


def test_no_file_can_be_made(rig: Rig, tmp_path: Path) -> None:
    files = rig.commander.files()
    fd = os.open(tmp_path / "made", os.O_RDWR | os.O_CREAT)
    try:
        rig.obeys(make=errno.ENOSPC)
        with pytest.raises(OSError, match="No space left"):
            files.allocate(fd, SIZE)
        rig.obeys()
        files.allocate(fd, SIZE)
        assert os.fstat(fd).st_size == SIZE
    finally:
        os.close(fd)


def test_a_half_written_order_changes_nothing(rig: Rig) -> None:
    rig.obeys(errors={"read": errno.EIO})
    rig.orders.write_text("{")
    time.sleep(0.1)
    assert rig.result(Op.READ) == -errno.EIO


def test_nobody_is_commanded_unless_the_environment_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(DISK_ENVIRONMENT_NAME, raising=False)
    assert commanded() is None

"""Random work on the SSD tier, from a seed, with drives that misbehave and with restarts.

Every block reported as loaded has the bytes that were stored (``Desk.load`` compares them all); the
books agree whenever nothing is in flight; every step keeps to the capacity.
"""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
from support.drive import Drive, size_of
from support.tiers import Opened, family, keys_of

from kvhearth_server.tiers.base import Completion, Corrupt, Done, Throttled
from kvhearth_server.tiers.ssd.disk.queues import Op, Request

FAMILIES = [
    family(),
    family(group=1, length=4096, shards=2),
    family(group=2, length=16_000),
    family(epoch=2),
    family(namespace=bytes(32), length=1, shards=5),
]
FAULTS: list[dict[Op, int]] = [
    {},
    {},
    {Op.WRITE: -errno.EIO},
    {Op.READ: -errno.EIO},
    {Op.SYNC: -errno.EIO},
    {Op.READ: 4096},
    {Op.WRITE: 4096},
]
"""What becomes of three in ten requests: an error, or a few bytes are moved."""


class Life:
    """Successive runs of a tier over the same directories."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        count = self.random.choice([1, 1, 2])
        self.folders = [folder / name for name in ("one", "two")[:count]]
        self.segments = self.random.choice([4, 6, 12])
        self.stored: set[tuple[int, int]] = set()
        self.open()

    def open(self) -> None:
        chance, drive = self.random, Drive(self.random.choice([1, 4, 32]))
        self.faults: dict[Op, int] = {}

        def fate(each: Request) -> int:
            hurt = each.op in self.faults and chance.random() < 0.3
            return self.faults[each.op] if hurt else size_of(each)

        drive.queue.fate = fate
        drive.queue.holds = lambda _: chance.random() < 0.1
        drive.queue.order = lambda ending: chance.sample(ending, len(ending))
        self.desk = Opened(
            *self.folders,
            drive=drive,
            settle=chance.random() < 0.7,
            segments=self.segments,
            flush=chance.random() < 0.2,
            request_bytes=chance.choice([4096, 64 << 10]),
            carry_share=chance.choice([0.0, 0.25, 0.5]),
        )

    def close(self) -> None:
        self.desk.__exit__(None)

    def step(self) -> None:
        which = self.random.randrange(len(FAMILIES))
        of = FAMILIES[which]
        count = self.random.randrange(1, min(24, 64 // of.shards))
        start = self.random.randrange(200)
        numbers = list(range(start, start + count))
        what = self.random.random()
        if what < 0.4:
            self.store(which, numbers)
        elif what < 0.75:
            self.load(which, numbers)
        elif what < 0.8:
            ticket = self.desk.begin(numbers, of)
            self.desk.tier.cancel(ticket)
            every_row_once(self.desk.wait(ticket), count)
        elif what < 0.85:
            self.desk.tier.forget(of.namespace, of.group, keys_of(numbers[:3]))
        elif what < 0.95:
            self.faults = self.random.choice(FAULTS)
        elif what < 0.97:
            self.close()
            self.open()
        else:
            self.desk.idle()
        self.desk.check_capacity()

    def store(self, which: int, numbers: list[int]) -> None:
        ticket = self.desk.tier.submit_store(self.desk.store_batch(numbers, FAMILIES[which]))
        if not isinstance(ticket, Throttled):
            done = self.desk.wait(ticket)
            every_row_once(done, len(numbers))
            assert not len(done.rows(Corrupt))
            self.stored |= {(which, numbers[row]) for row in done.rows(Done).tolist()}

    def load(self, which: int, numbers: list[int]) -> None:
        done = self.desk.load(numbers, FAMILIES[which])
        every_row_once(done, len(numbers))
        assert not len(done.rows(Corrupt))


def every_row_once(done: Completion, count: int) -> None:
    rows = sorted(row for _, rows in done.parts for row in rows.tolist())
    assert rows == list(range(count))


@pytest.mark.parametrize("seed", range(8))
def test_random_work(seed: int, tmp_path: Path) -> None:
    life = Life(seed, tmp_path)
    for _ in range(400):
        life.step()
    life.close()
    life.open()
    life.desk.settle()
    for which in range(len(FAMILIES)):
        for start in range(0, 224, 12):
            life.load(which, list(range(start, start + 12)))
    life.close()
    assert life.stored, "nothing was ever stored"

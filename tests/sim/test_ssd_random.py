"""Random work on the SSD tier, from a seed, with a drive that misbehaves and with restarts.

Every block reported as loaded has the bytes that were stored (``Desk.load`` compares them all); the
books agree whenever nothing is in flight; every step keeps to the capacity.
"""

from __future__ import annotations

import errno
import random
from pathlib import Path

import pytest
from support.tiers import DEADLINE_S, Arena, Desk, family, keys_of, settings

from kvhearth_lab.harness.faults import Faults, FaultyQueue
from kvhearth_server.tiers.base import Completion, Corrupt, Done, Throttled
from kvhearth_server.tiers.ssd.disk.probe import NAMES, open_queue, probe
from kvhearth_server.tiers.ssd.disk.queues import Op
from kvhearth_server.tiers.ssd.tier import Environment, SsdTier

FAMILIES = [
    family(),
    family(group=1, length=4096, shards=2),
    family(group=2, length=20_000),
    family(epoch=2),
    family(namespace=bytes(32), length=1, shards=5),
]


class Life:
    """Successive runs of a tier over the same directories."""

    def __init__(self, seed: int, folder: Path) -> None:
        self.random = random.Random(seed)
        count = self.random.choice([1, 1, 2])
        self.folders = [folder / name for name in ("one", "two")[:count]]
        self.segments = self.random.choice([4, 6, 12])
        self.interface = self.random.choice([n for n in NAMES if probe(n).works])
        self.arena = Arena(64, 20 << 10)
        self.faults = Faults()
        self.stored: set[tuple[int, int]] = set()
        self.open()

    def open(self) -> None:
        self.faults = Faults(seed=self.random.randrange(1 << 30), rate=0.3)
        found = settings(
            *self.folders,
            segments=self.segments,
            flush=self.random.random() < 0.2,
            request_bytes=self.random.choice([4096, 64 << 10]),
            carry_share=self.random.choice([0.0, 0.25, 0.5]),
        )
        queue = FaultyQueue(open_queue(self.interface, self.random.choice([1, 4, 32])), self.faults)
        self.tier = SsdTier(found, [self.arena.bytes], environment=Environment(queue=queue))
        self.desk = Desk(self.tier, self.arena)
        if self.random.random() < 0.7:
            self.desk.settle()

    def close(self) -> None:
        self.faults.errors, self.faults.short = {}, frozenset()
        assert self.tier.drain(DEADLINE_S)
        self.desk.events = []
        self.tier.poll()
        self.tier.check()
        self.tier.close()

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
            self.cancel(which, numbers)
        elif what < 0.85:
            self.tier.forget(of.namespace, of.group, keys_of(numbers[:3]))
        elif what < 0.95:
            kinds = [{}, {}, {Op.WRITE: errno.EIO}, {Op.READ: errno.EIO}, {Op.SYNC: errno.EIO}]
            self.faults.errors = self.random.choice(kinds)
            self.faults.short = frozenset(self.random.choice([[], [], [Op.READ], [Op.WRITE]]))
        elif what < 0.97:
            self.close()
            self.open()
        else:
            self.desk.step()
        for path, size in self.tier.allocated_bytes().items():
            places = {str(p.path): p.capacity_bytes for p in self.tier.settings.places}
            assert size <= places[path]

    def store(self, which: int, numbers: list[int]) -> None:
        ticket = self.tier.submit_store(self.desk.store_batch(numbers, FAMILIES[which]))
        if not isinstance(ticket, Throttled):
            done = self.desk.wait(ticket)
            self.every_row_once(done, len(numbers))
            assert not len(done.rows(Corrupt))
            self.stored |= {(which, numbers[row]) for row in done.rows(Done).tolist()}

    def load(self, which: int, numbers: list[int]) -> None:
        done = self.desk.load(numbers, FAMILIES[which])
        self.every_row_once(done, len(numbers))
        assert not len(done.rows(Corrupt))

    def cancel(self, which: int, numbers: list[int]) -> None:
        ticket = self.tier.submit_load(self.desk.load_batch(numbers, FAMILIES[which]))
        assert not isinstance(ticket, Throttled)
        self.tier.cancel(ticket)
        self.every_row_once(self.desk.wait(ticket), len(numbers))

    @staticmethod
    def every_row_once(done: Completion, count: int) -> None:
        rows = sorted(row for _, rows in done.parts for row in rows.tolist())
        assert rows == list(range(count))


def run(seed: int, folder: Path, steps: int) -> None:
    life = Life(seed, folder)
    for _ in range(steps):
        life.step()
    life.close()
    life.open()
    life.desk.settle()
    for which in range(len(FAMILIES)):
        for start in range(0, 224, 12):
            life.load(which, list(range(start, start + 12)))
    life.close()
    assert life.stored, f"seed {seed}: nothing was ever stored"


@pytest.mark.parametrize("seed", [1, 2])
def test_random_work(seed: int, tmp_path: Path) -> None:
    run(seed, tmp_path, 120)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 40))
def test_much_random_work(seed: int, tmp_path: Path) -> None:
    run(seed, tmp_path, 1000)

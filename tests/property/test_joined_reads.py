"""Random loads from a drive with bad pages: a block arrives intact, or only that block fails."""

from __future__ import annotations

import errno
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from support.drive import Page, pages_of, size_of
from support.tiers import PAGE, Opened, family, key_of, payload_page

from kvhearth_server.tiers.base import Completion, Done, Failed, Missing, Outcome
from kvhearth_server.tiers.ssd.disk.queues import Op, Request
from kvhearth_server.tiers.ssd.format import pages_of as payload_pages

FAMILIES = [
    family(),
    family(group=1, length=PAGE, shards=2),
    family(group=2, length=1, shards=3),
    family(group=3, length=5000),
]
MOST = 16

Batch = tuple[int, list[int]]
"""A family's index and block numbers."""

which = st.integers(0, len(FAMILIES) - 1)
stored = st.tuples(which, st.lists(st.integers(0, 40), min_size=1, max_size=MOST, unique=True))
runs = st.tuples(st.integers(0, 40), st.integers(1, MOST)).map(
    lambda run: list(range(run[0], run[0] + run[1]))
)
some = st.lists(st.integers(0, 45), min_size=1, max_size=MOST)
loaded = st.tuples(which, st.one_of(runs, some))


class World(Opened):
    """A tier, its stored blocks, and the pages that its drive cannot read."""

    def __init__(self, folder: Path, depth: int, request_bytes: int) -> None:
        super().__init__(
            folder, depth=depth, request_bytes=request_bytes, segment_bytes=256 << 10, segments=16
        )
        self.bad: set[Page] = set()
        self.fails: set[int] = set()
        self._reads = 0

    def misbehave(self) -> None:
        """Fails reads of bad pages, and those that ``fails`` counts; mixes up the ends of all."""
        self.drive.queue.fate = self._fate
        mixed = random.Random(5)
        self.drive.queue.order = lambda ending: mixed.sample(ending, len(ending))

    def _fate(self, request: Request) -> int:
        if request.op is not Op.READ:
            return size_of(request)
        self._reads += 1
        if self.bad & pages_of(request):
            return -errno.EIO
        return size_of(request) // (2 if self._reads in self.fails else 1)

    def _payload(self, number: int, which: int, shard: int) -> Page:
        group = FAMILIES[which].group
        return payload_page(self.folders[0], key_of(number), shard, group)

    def spoil(self, batch: Batch, at: int) -> None:
        """Makes a page of one of these blocks unreadable, of a header or of a payload."""
        of = FAMILIES[batch[0]]
        pages = 1 + payload_pages(of.length)
        block, rest = divmod(at % (len(batch[1]) * of.shards * pages), of.shards * pages)
        shard, page = divmod(rest, pages)
        inode, first = self._payload(batch[1][block], batch[0], shard)
        self.bad.add((inode, first + page - 1))

    def _readable(self, number: int, which: int) -> bool:
        of = FAMILIES[which]
        firsts = [self._payload(number, which, shard) for shard in range(of.shards)]
        count = payload_pages(of.length)
        return not any((inode, at + n) in self.bad for inode, at in firsts for n in range(count))

    def load_some(self, batch: Batch, *, cancel: bool) -> None:
        """Loads blocks and compares their outcomes with the expected ones."""
        which, numbers = batch
        of = FAMILIES[which]
        there = set(self.present(numbers, of))
        wanted: list[Outcome] = [
            Missing()
            if number not in there
            else Done()
            if self._readable(number, which)
            else Failed("io")
            for number in numbers
        ]
        ticket = self.begin(numbers, of)
        if cancel:
            self.tier.cancel(ticket)
        done = self.wait(ticket)
        self.compare(done, numbers, of)
        excused = {Failed("short")} if self.fails else set()
        if cancel:
            excused.add(Failed("cancelled"))
        for row, outcome in enumerate(outcomes_of(done, len(numbers))):
            assert outcome == wanted[row] or (wanted[row] != Missing() and outcome in excused)


def outcomes_of(done: Completion, count: int) -> Sequence[Outcome]:
    """Returns one outcome for each row."""
    found = sorted((row, index) for index, part in enumerate(done.parts) for row in part[1])
    assert [row for row, _ in found] == list(range(count)), "each row once"
    return [done.parts[index][0] for _, index in found]


@settings(deadline=None, print_blob=True, max_examples=40)
@given(
    depth=st.sampled_from([2, 1, 8]),
    request_bytes=st.sampled_from([1 << 20, 64 << 10, 1]),
    stores=st.lists(stored, min_size=1, max_size=6),
    bad=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 200)), max_size=4),
    fails=st.one_of(st.just(set()), st.sets(st.integers(1, 30), max_size=6)),
    loads=st.lists(st.tuples(loaded, st.booleans()), min_size=1, max_size=6),
)
def test_random_loads(
    *,
    depth: int,
    request_bytes: int,
    stores: list[Batch],
    bad: list[tuple[int, int]],
    fails: set[int],
    loads: list[tuple[Batch, bool]],
) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        World(Path(folder) / "one", depth, request_bytes) as world,
    ):
        for which, numbers in stores:
            world.store_all(numbers, FAMILIES[which])
        for which, at in bad:
            world.spoil(stores[which % len(stores)], at)
        world.fails = fails
        world.misbehave()
        for batch in stores:
            world.load_some(batch, cancel=False)
        for batch, cancel in loads:
            world.load_some(batch, cancel=cancel)

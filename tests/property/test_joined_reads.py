"""Random loads from a drive with bad pages: a block arrives intact, or only that block fails."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from support.read_rig import Page, ReadRig, pages_of
from support.tiers import PAGE, family

from kvhearth_server.tiers.base import Completion, Done, Failed, Missing, Outcome
from kvhearth_server.tiers.ssd.disk.queues import Request
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


class World:
    """A tier, its stored blocks, and the pages that its drive cannot read."""

    def __init__(self, folder: Path, depth: int, request_bytes: int) -> None:
        self.rig = ReadRig(
            folder, depth=depth, request_bytes=request_bytes, segment_bytes=256 << 10
        )
        self.bad: set[Page] = set()
        self.fails: set[int] = set()
        self._reads = 0
        self.rig.drive.fate = self._fate

    def _fate(self, request: Request, result: int) -> int:
        self._reads += 1
        if self.bad & pages_of(request):
            return -errno.EIO
        return result // 2 if self._reads in self.fails else result

    def spoil(self, batch: Batch, at: int) -> None:
        """Makes a page of one of these blocks unreadable, of a header or of a payload."""
        of = FAMILIES[batch[0]]
        pages = 1 + payload_pages(of.length)
        block, rest = divmod(at % (len(batch[1]) * of.shards * pages), of.shards * pages)
        shard, page = divmod(rest, pages)
        self.bad.add(self.rig.page(batch[1][block], shard, of.group, after=page - 1))

    def _readable(self, number: int, which: int) -> bool:
        of = FAMILIES[which]
        count = payload_pages(of.length)
        return not any(
            self.rig.page(number, shard, of.group, after=page) in self.bad
            for shard in range(of.shards)
            for page in range(count)
        )

    def load(self, batch: Batch, *, cancel: bool) -> None:
        """Loads blocks and compares their outcomes with the expected ones."""
        which, numbers = batch
        of = FAMILIES[which]
        there = self.rig.present(numbers, of)
        wanted: list[Outcome] = [
            (Done() if self._readable(number, which) else Failed("io")) if present else Missing()
            for number, present in zip(numbers, there, strict=True)
        ]
        ticket = self.rig.begin(numbers, of)
        if cancel:
            self.rig.tier.cancel(ticket)
        done = self.rig.desk.wait(ticket)
        self.rig.compare(done, numbers, of)
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
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder) / "one", depth, request_bytes)
        for which, numbers in stores:
            world.rig.desk.store_all(numbers, FAMILIES[which])
        for which, at in bad:
            world.spoil(stores[which % len(stores)], at)
        world.fails = fails
        for batch in stores:
            world.load(batch, cancel=False)
        for batch, cancel in loads:
            world.load(batch, cancel=cancel)
        world.rig.close()

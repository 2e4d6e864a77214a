"""Recovery after a crash: every whole record is read back, and nothing else."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.daemon import until
from support.tiers import (
    DEADLINE_S,
    PAGE,
    SEGMENT_BYTES,
    Opened,
    a_directory,
    family,
    key_of,
    segment_files,
    settings,
)

from kvhearth_server.tiers.base import BlockSpec, Done, Missing, Throttled
from kvhearth_server.tiers.ssd.directory import Segment
from kvhearth_server.tiers.ssd.files import Files, OpenFile
from kvhearth_server.tiers.ssd.format import RECORD_BYTES, RECORD_DTYPE, Doubt, seal
from kvhearth_server.tiers.ssd.recovery import restore as recovery
from kvhearth_server.tiers.ssd.recovery.restore import Reader, Recovered, read_segment

SECTOR = 512
RECORD_PAGES = 4
"""A header and 10,000 bytes."""


def written(folder: Path, count: int, of: BlockSpec | None = None) -> None:
    """Writes a log with blocks 0 to ``count``; its last segment is unfinished."""
    with Opened(folder) as desk:
        desk.store_all(range(count), of)
        assert desk.tier.drain(DEADLINE_S)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks 0 to 19: one segment with a footer (15 blocks), one without (5)."""
    folder = tmp_path_factory.mktemp("log") / "one"
    written(folder, 20)
    return folder


@pytest.fixture
def copy(log: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(log, tmp_path / "copy"))


def files(folder: Path) -> tuple[Path, Path]:
    """Returns the two files that hold records: the one with a footer, the one without."""
    found = [p for p in segment_files(folder) if p.read_bytes()[PAGE : PAGE + 4] == b"HKVR"]
    whole = [p for p in found if p.read_bytes()[-PAGE : -PAGE + 4] == b"HKVF"]
    (sealed,), (unfinished,) = whole, [p for p in found if p not in whole]
    return sealed, unfinished


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = path.read_bytes()[at]
    patch(path, at, bytes([data ^ (1 << bit)]))


class Bench:
    """Reads one segment file of a directory repeatedly, as recovery does."""

    def __init__(self, folder: Path) -> None:
        self.directory = a_directory(settings(folder).places[0], SEGMENT_BYTES)
        self.segments = {s.path: s for s in self.directory.list_segments()}
        self._memory = mmap.mmap(-1, 8 << 20)

    def read(self, path: Path) -> Recovered:
        segment = self.segments[path]
        found = read_segment(segment, Reader(self._memory, Files()))
        self.directory.close_segment(segment)
        assert found.failed is None
        return found


@pytest.fixture
def bench(copy: Path) -> Iterator[Bench]:
    bench = Bench(copy)
    yield bench
    bench.directory.close()


def numbers(found: Recovered) -> list[int]:
    """Numbers of the recovered blocks."""
    by_key = {key_of(number): number for number in range(100)}
    return [by_key[key.tobytes()[:32]] for key in found.records["key"]]


def test_a_record_torn_at_any_sector_is_dropped_alone(copy: Path, bench: Bench) -> None:
    _, path = files(copy)
    whole = path.read_bytes()
    start = (1 + 4 * RECORD_PAGES) * PAGE  # of block 19, the last one
    end = start + RECORD_PAGES * PAGE
    assert numbers(bench.read(path)) == [15, 16, 17, 18, 19]
    payload_end = start + PAGE + 10_000
    for filler in (b"\0", b"\xa5"):
        for cut in range(start, end, SECTOR):
            patch(path, cut, filler * (end - cut))
            found = bench.read(path)
            # Bytes missing after the header in its page, or in the padding, do no harm.
            harmless = start < cut and cut >= payload_end
            expected = [15, 16, 17, 18, 19] if harmless else [15, 16, 17, 18]
            assert numbers(found) == expected, (filler, cut - start)
            if not harmless:
                torn = found.doubts[Doubt.TORN] + found.doubts[Doubt.DAMAGED]
                assert torn == (0 if cut == start else 1), (filler, cut - start)
            patch(path, start, whole[start:end])


def test_a_flipped_bit_anywhere_in_a_record_drops_that_record(copy: Path, bench: Bench) -> None:
    _, path = files(copy)
    start = (1 + RECORD_PAGES) * PAGE  # block 16
    for at in range(0, RECORD_BYTES, 7):
        flip(path, start + at, at % 8)
        assert numbers(bench.read(path)) == [15, 17, 18, 19], at
        flip(path, start + at, at % 8)
    for at in (0, 5000, 9999):
        flip(path, start + PAGE + at)
        found = bench.read(path)
        assert numbers(found) == [15, 17, 18, 19]
        assert found.doubts == Counter({Doubt.TORN: 1})
        flip(path, start + PAGE + at)


def test_a_flipped_bit_anywhere_in_a_footer_costs_nothing(copy: Path, bench: Bench) -> None:
    path, _ = files(copy)
    assert not bench.read(path).resume
    used = [*range(0, 64, 3), *range(-PAGE, -PAGE + 15 * RECORD_BYTES, 101)]
    for at in used:
        place = SEGMENT_BYTES + at - (0 if at < 0 else PAGE)
        if at < 0:
            place -= PAGE
        flip(path, place, at % 8)
        found = bench.read(path)
        assert found.resume, at
        assert numbers(found) == list(range(15)), at
        flip(path, place, at % 8)


def test_a_file_made_longer_is_not_read_to_its_end(copy: Path, bench: Bench) -> None:
    _, path = files(copy)
    os.truncate(path, 4 << 40)
    assert len(bench.read(path).records) == 5


def test_records_and_files_of_another_log(copy: Path, tmp_path: Path) -> None:
    written(tmp_path / "other", 20)
    sealed, unfinished = files(copy)
    foreign_sealed, foreign = files(tmp_path / "other")
    size = RECORD_PAGES * PAGE
    patch(unfinished, PAGE, foreign.read_bytes()[PAGE : PAGE + size])
    shutil.copy(foreign_sealed, sealed)
    with Opened(copy) as desk:
        assert desk.load(range(20)).rows(Done).tolist() == [16, 17, 18, 19]
        assert desk.tier.counts["dropped_foreign"] == 2


def test_of_two_directories_the_younger_epoch_is_served(tmp_path: Path) -> None:
    folders = tmp_path / "one", tmp_path / "two"
    with Opened(*folders) as desk:
        desk.store_all(range(20, 60))
        desk.rest()
        for number in range(4):  # blocks alternate between the directories
            desk.store_all([number])
        desk.store_all([10])
        for number in range(4):  # so that each block goes to the other directory now
            desk.store_all([number], family(epoch=2))
    with Opened(*folders) as desk:
        assert desk.tier.counts["dropped_duplicate"] == 4
        assert len(desk.load(range(4), family(epoch=2)).rows(Done)) == 4


def test_of_one_segment_the_younger_epoch_is_served_where_it_lies_first(tmp_path: Path) -> None:
    """A block of old weights was carried over while one of the new weights was being written."""
    with Opened(tmp_path / "one") as desk:
        desk.store_all([1])
        desk.store_all([1], family(epoch=2))
    (path,) = [p for p in segment_files(tmp_path / "one") if b"HKVR" in p.read_bytes()]
    for at, epoch in (PAGE, 2), ((1 + RECORD_PAGES) * PAGE, 1):
        row = np.frombuffer(path.read_bytes(), RECORD_DTYPE, 1, at).copy()
        row["epoch"] = epoch
        seal(row)
        patch(path, at, row.tobytes())
    with Opened(tmp_path / "one") as desk:
        assert desk.tier.counts["dropped_duplicate"] == 1
        assert desk.load([1], family(epoch=2)).rows(Done).tolist() == [0]


def test_a_block_needs_all_its_shards(copy: Path, tmp_path: Path) -> None:
    of = family(shards=3, length=4000)
    written(tmp_path / "one", 4, of)
    (path,) = [p for p in segment_files(tmp_path / "one") if b"HKVR" in p.read_bytes()]
    flip(path, (1 + 2 * (3 + 1)) * PAGE + 20)  # the header of block 1's second shard
    with Opened(tmp_path / "one") as desk:
        assert desk.load(range(4), of).rows(Done).tolist() == [0, 2, 3]
        assert desk.tier.counts["dropped_damaged"] == 1
        assert desk.tier.counts["dropped_incomplete"] == 2


def test_a_file_for_which_there_is_no_descriptor_is_read_later(copy: Path) -> None:
    class Short(Files):
        none_left = True

        def open(self, path: Path, *, create: bool = False) -> OpenFile:
            if self.none_left and path == sealed:
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().open(path, create=create)

    sealed, _ = files(copy)
    short = Short()
    with Opened(copy, files=short) as desk:
        assert len(desk.load(range(20)).rows(Done)) == 5
        assert desk.tier.figures().locked_files == 1
        assert desk.tier.loads_of_the_dead
        assert desk.tier.counts["segments_lost"] == 0
        reason = "no descriptor left to read a segment file back"
        until(
            lambda: any(reason in reported for reported in desk.tier.problems().values()),
            "it is told",
        )
        short.none_left = False
        until(lambda: not desk.tier.loads_of_the_dead or desk.pump(0.01), "it is read")
        assert len(desk.load(range(20)).rows(Done)) == 20
        until(
            lambda: not any(reason in reported for reported in desk.tier.problems().values()),
            "no more",
        )


def test_another_name_of_a_file_is_passed_over(copy: Path) -> None:
    sealed, _ = files(copy)
    os.link(sealed, copy / "00000055.segment")
    with Opened(copy) as desk:
        assert len(desk.load(range(20)).rows(Done)) == 20
        (reason,) = desk.tier.problems().values()
        assert "00000055.segment is another name" in reason
        assert desk.tier.figures().locked_files == 0, "slots wait for it"
        assert desk.tier.counts["dropped_duplicate"] == 0


def test_shards_whose_keys_differ_in_width_are_no_block(tmp_path: Path) -> None:
    of = family(shards=2, length=4000)
    written(tmp_path / "one", 4, of)
    (path,) = [p for p in segment_files(tmp_path / "one") if b"HKVR" in p.read_bytes()]
    at = (1 + 2 * 2 * 2) * PAGE  # the header of block 2's first shard
    row = np.frombuffer(path.read_bytes(), RECORD_DTYPE, 1, at).copy()
    row["key_bytes"] = 31
    seal(row)
    patch(path, at, row.tobytes())
    with Opened(tmp_path / "one") as desk:
        assert desk.load(range(4), of).rows(Done).tolist() == [0, 1, 3]
        assert desk.tier.counts["dropped_incomplete"] == 2
        assert desk.tier.counts["recovery_failures"] == 0


def test_garbage_of_every_kind_is_survived(copy: Path) -> None:
    random = np.random.default_rng(5)
    for path in segment_files(copy):
        data = bytearray(path.read_bytes())
        for _ in range(40):
            at = int(random.integers(0, len(data) - 600))
            data[at : at + 600] = random.bytes(600)
        path.write_bytes(data)
    (copy / "00000099.segment").write_bytes(random.bytes(5000))
    (copy / "notes.txt").write_text("not ours")
    (copy / "00000001.segment.new").write_bytes(b"half made")
    with Opened(copy) as desk:
        desk.load(range(20))  # compares every byte of the blocks that it serves
        assert (copy / "notes.txt").exists()
        assert not (copy / "00000001.segment.new").exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_reader_that_fails_over_one_file_goes_on_with_the_others(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, broken = recovery.read_segment, list[int]()
    sealed, _ = files(copy)

    def failing(segment: Segment, *rest: object) -> Recovered:
        if segment.path == sealed and not broken:
            broken.append(segment.number)
            raise RuntimeError("a bug")
        return real(segment, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(recovery, "read_segment", failing)
    with Opened(copy) as desk:
        assert len(desk.load(range(20)).rows(Done)) == 5
        assert desk.tier.counts["recovery_failures"] == 1
        assert desk.tier.counts["segments_lost"] == 1


class Gate(Files):
    """Reads only the first page of one segment file until it is released."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.proceed = threading.Event()

    def read_into(self, fd: int, memory: memoryview, offset: int) -> int:
        if offset and os.readlink(f"/proc/self/fd/{fd}") == str(self._path):
            assert self.proceed.wait(DEADLINE_S)
        return super().read_into(fd, memory, offset)


@pytest.mark.parametrize("footer", [True, False])
def test_blocks_are_served_and_stored_while_the_log_is_read_back(copy: Path, footer: bool) -> None:
    sealed, _ = files(copy)
    if not footer:
        patch(sealed, sealed.stat().st_size - PAGE, bytes(PAGE))
    # A file made ahead of need where the file system cannot reserve: its zeros are written.
    (copy / "00000009.segment").write_bytes(bytes(sealed.stat().st_size))
    gate = Gate(sealed)
    opened = Opened(copy, files=gate)
    desk, tier = opened.desk, opened.tier
    try:
        until(lambda: desk.pump(0.01) or len(tier.index), "some is read back")
        assert len(desk.load(range(15, 20)).rows(Done)) == 5
        assert len(desk.load(range(15)).rows(Missing)) == 15
        desk.store_all([3, 20, 21])
        assert len(desk.load([3, 20, 21]).rows(Done)) == 3
        assert tier.recovering
    finally:
        gate.proceed.set()
    with opened:
        assert len(desk.load(range(22)).rows(Done)) == 22
        assert tier.counts["dropped_duplicate"] == 1, "the block that was stored again is younger"
        assert tier.counts["recovered_blocks"] == 19
    with Opened(copy) as again:
        assert len(again.load(range(22)).rows(Done)) == 22


def test_nothing_is_stored_early_where_a_first_page_is_lost(copy: Path) -> None:
    sealed, unfinished = files(copy)
    patch(unfinished, 0, bytes(PAGE))
    gate = Gate(sealed)
    opened = Opened(copy, files=gate)
    try:
        refused = opened.tier.submit_store(opened.desk.store_batch([20], family()))
        opened.desk.pump(0.2)
        again = opened.tier.submit_store(opened.desk.store_batch([20], family()))
        assert refused == again == Throttled("recovering", 0.1)
    finally:
        gate.proceed.set()
    with opened as desk:
        desk.store_all([20])
        assert len(desk.load(range(21)).rows(Done)) == 21
    with Opened(copy) as desk:
        assert len(desk.load(range(21)).rows(Done)) == 21

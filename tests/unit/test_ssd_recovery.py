"""Recovery after a crash: every whole record is read back, and nothing else."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.drive import Drive, HandFiles, Hangs
from support.tiers import (
    PAGE,
    SEGMENT_BYTES,
    Opened,
    a_directory,
    family,
    flip,
    key_of,
    patch,
    segment_files,
    settings,
)

from kvhearth_server.tiers.base import BlockSpec, Missing, Throttled
from kvhearth_server.tiers.ssd.directory import Segment
from kvhearth_server.tiers.ssd.format import RECORD_BYTES, RECORD_DTYPE, Doubt, seal
from kvhearth_server.tiers.ssd.recovery import restore as recovery
from kvhearth_server.tiers.ssd.recovery.restore import Reader, Recovered, read_segment

SECTOR = 512
RECORD_PAGES = 4
"""A header and 10,000 bytes."""
ALL = list(range(20))


def written(folder: Path, count: int, of: BlockSpec | None = None) -> Path:
    """Writes a log with blocks 0 to ``count``; its last segment is unfinished. Returns the first
    file with records.
    """
    with Opened(folder) as desk:
        desk.store_all(range(count), of)
    return next(p for p in segment_files(folder) if b"HKVR" in p.read_bytes())


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """Blocks 0 to 19: one segment with a footer (15 blocks), one without (5)."""
    written(tmp_path / "log", 20)
    return tmp_path / "log"


def files(folder: Path) -> tuple[Path, Path]:
    """Returns the two files that hold records: the one with a footer, the one without."""
    found = [p for p in segment_files(folder) if p.read_bytes()[PAGE : PAGE + 4] == b"HKVR"]
    whole = [p for p in found if p.read_bytes()[-PAGE : -PAGE + 4] == b"HKVF"]
    (sealed,), (unfinished,) = whole, [p for p in found if p not in whole]
    return sealed, unfinished


def rewrite(path: Path, page: int, **fields: int) -> None:
    """Change fields of a record's header, which is whole again."""
    row = np.frombuffer(path.read_bytes(), RECORD_DTYPE, 1, page * PAGE).copy()
    for name, value in fields.items():
        row[name] = value
    seal(row)
    patch(path, page * PAGE, row.tobytes())


class Bench:
    """Reads one segment file of a directory repeatedly, as recovery does."""

    def __init__(self, folder: Path) -> None:
        self.directory = a_directory(settings(folder).places[0], SEGMENT_BYTES)
        self.segments = {s.path: s for s in self.directory.list_segments()}
        self._memory = mmap.mmap(-1, 8 << 20)

    def read(self, path: Path) -> Recovered:
        segment = self.segments[path]
        found = read_segment(segment, Reader(self._memory, HandFiles()))
        self.directory.close_segment(segment)
        assert found.failed is None
        return found


@pytest.fixture
def bench(log: Path) -> Iterator[Bench]:
    bench = Bench(log)
    yield bench
    bench.directory.close()


def numbers(found: Recovered) -> list[int]:
    """Numbers of the recovered blocks."""
    by_key = {key_of(number): number for number in range(100)}
    return [by_key[key.tobytes()[:32]] for key in found.records["key"]]


# -- one file --------------------------------------------------------------------------------------


def test_a_record_torn_at_any_sector_is_dropped_alone(log: Path, bench: Bench) -> None:
    _, path = files(log)
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


def test_a_flipped_bit_anywhere_in_a_record_drops_that_record(log: Path, bench: Bench) -> None:
    _, path = files(log)
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


def test_a_flipped_bit_anywhere_in_a_footer_costs_nothing(log: Path, bench: Bench) -> None:
    path, _ = files(log)
    assert not bench.read(path).resume
    last = SEGMENT_BYTES - PAGE
    for at in [*range(0, 64, 3), *range(-PAGE, -PAGE + 15 * RECORD_BYTES, 101)]:
        flip(path, last + at, at % 8)
        found = bench.read(path)
        assert found.resume, at
        assert numbers(found) == list(range(15)), at
        flip(path, last + at, at % 8)


def test_a_file_made_longer_is_not_read_to_its_end(log: Path, bench: Bench) -> None:
    _, path = files(log)
    os.truncate(path, 4 << 40)
    assert len(bench.read(path).records) == 5


# -- a whole log -----------------------------------------------------------------------------------


def test_records_and_files_of_another_log(log: Path, tmp_path: Path) -> None:
    written(tmp_path / "other", 20)
    sealed, unfinished = files(log)
    foreign_sealed, foreign = files(tmp_path / "other")
    size = RECORD_PAGES * PAGE
    patch(unfinished, PAGE, foreign.read_bytes()[PAGE : PAGE + size])
    shutil.copy(foreign_sealed, sealed)
    with Opened(log) as desk:
        assert desk.loaded(ALL) == [16, 17, 18, 19]
        assert desk.counts["dropped_foreign"] == 2


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
        assert desk.counts["dropped_duplicate"] == 4
        assert desk.loaded(range(4), family(epoch=2)) == [0, 1, 2, 3]


def test_of_one_segment_the_younger_epoch_is_served_where_it_lies_first(tmp_path: Path) -> None:
    """A block of old weights was carried over while one of the new weights was being written."""
    with Opened(tmp_path / "one") as desk:
        desk.store_all([1])
        desk.store_all([1], family(epoch=2))
    (path,) = [p for p in segment_files(tmp_path / "one") if b"HKVR" in p.read_bytes()]
    rewrite(path, 1, epoch=2)
    rewrite(path, 1 + RECORD_PAGES, epoch=1)
    with Opened(tmp_path / "one") as desk:
        assert desk.counts["dropped_duplicate"] == 1
        assert desk.loaded([1], family(epoch=2)) == [1]


def test_a_block_needs_all_its_shards(tmp_path: Path) -> None:
    of = family(shards=3, length=4000)
    path = written(tmp_path / "one", 4, of)
    flip(path, (1 + 2 * (3 + 1)) * PAGE + 20)  # the header of block 1's second shard
    with Opened(tmp_path / "one") as desk:
        assert desk.loaded(range(4), of) == [0, 2, 3]
        assert desk.counts["dropped_damaged"] == 1
        assert desk.counts["dropped_incomplete"] == 2


def test_shards_whose_keys_differ_in_width_are_no_block(tmp_path: Path) -> None:
    of = family(shards=2, length=4000)
    path = written(tmp_path / "one", 4, of)
    rewrite(path, 1 + 2 * 2 * 2, key_bytes=31)  # the header of block 2's first shard
    with Opened(tmp_path / "one") as desk:
        assert desk.loaded(range(4), of) == [0, 1, 3]
        assert desk.counts["dropped_incomplete"] == 2
        assert desk.counts["recovery_failures"] == 0


def test_a_file_for_which_there_is_no_descriptor_is_read_later(log: Path) -> None:
    sealed, _ = files(log)
    reason = "no descriptor left to read a segment file back"
    drive, lack = Drive(), [sealed]

    def opens(path: Path) -> None:
        if path in lack:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    drive.files.opens = opens
    with Opened(log, drive=drive) as desk:
        assert desk.loaded(ALL) == ALL[15:]
        assert desk.tier.figures().locked_files == 1
        assert desk.tier.loads_of_the_dead
        assert desk.counts["segments_lost"] == 0
        desk.until(lambda: reason in desk.reasons, "it is not told")
        lack.clear()
        desk.until(lambda: not desk.tier.loads_of_the_dead, "it is not read")
        assert desk.loaded(ALL) == ALL
        desk.until(lambda: reason not in desk.reasons, "it does not end")


def test_another_name_of_a_file_is_passed_over(log: Path) -> None:
    sealed, _ = files(log)
    os.link(sealed, log / "00000055.segment")
    with Opened(log) as desk:
        assert desk.loaded(ALL) == ALL
        assert "00000055.segment is another name" in desk.reasons
        assert desk.tier.figures().locked_files == 0, "slots wait for it"
        assert desk.counts["dropped_duplicate"] == 0


def test_garbage_of_every_kind_is_survived(log: Path) -> None:
    random = np.random.default_rng(5)
    for path in segment_files(log):
        data = bytearray(path.read_bytes())
        for _ in range(40):
            at = int(random.integers(0, len(data) - 600))
            data[at : at + 600] = random.bytes(600)
        path.write_bytes(data)
    (log / "00000099.segment").write_bytes(random.bytes(5000))
    (log / "notes.txt").write_text("not ours")
    (log / "00000001.segment.new").write_bytes(b"half made")
    with Opened(log) as desk:
        desk.load(ALL)  # compares every byte of the blocks that it serves
        assert (log / "notes.txt").exists()
        assert not (log / "00000001.segment.new").exists()


def test_a_reader_that_fails_over_one_file_goes_on_with_the_others(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, broken = recovery.read_segment, list[int]()
    sealed, _ = files(log)

    def failing(segment: Segment, *rest: object) -> Recovered:
        if segment.path == sealed and not broken:
            broken.append(segment.number)
            raise RuntimeError("a bug")
        return real(segment, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(recovery, "read_segment", failing)
    with Opened(log) as desk:
        assert desk.loaded(ALL) == ALL[15:]
        assert desk.counts["recovery_failures"] == 1
        assert desk.counts["segments_lost"] == 1


# -- while it is read back -------------------------------------------------------------------------


def held_back(path: Path) -> Drive:
    """Return a drive that gives only the first page of one segment file, until its hook is gone."""

    def reads(read: Path, offset: int) -> None:
        if offset and read == path:
            raise Hangs

    drive = Drive()
    drive.files.reads = reads
    return drive


def let_go(drive: Drive) -> None:
    """Read everything back."""
    drive.files.reads = lambda path, offset: None


@pytest.mark.parametrize("footer", [True, False])
def test_blocks_are_served_and_stored_while_the_log_is_read_back(log: Path, footer: bool) -> None:
    sealed, _ = files(log)
    if not footer:
        patch(sealed, -PAGE, bytes(PAGE))
    # A file made ahead of need where the file system cannot reserve: its zeros are written.
    (log / "00000009.segment").write_bytes(bytes(sealed.stat().st_size))
    with Opened(log, drive=(drive := held_back(sealed)), settle=False) as desk:
        desk.idle()
        assert desk.loaded(ALL) == ALL[15:]
        assert len(desk.load(range(15)).rows(Missing)) == 15
        desk.store_all([3, 20, 21])
        assert desk.loaded([3, 20, 21]) == [3, 20, 21]
        assert desk.tier.recovering
        let_go(drive)
        desk.settle()
        assert desk.loaded(range(22)) == list(range(22))
        assert desk.counts["dropped_duplicate"] == 1, "the block that was stored again is younger"
        assert desk.counts["recovered_blocks"] == 19
    with Opened(log) as again:
        assert again.loaded(range(22)) == list(range(22))


def test_nothing_is_stored_early_where_a_first_page_is_lost(log: Path) -> None:
    sealed, unfinished = files(log)
    patch(unfinished, 0, bytes(PAGE))
    with Opened(log, drive=(drive := held_back(sealed)), settle=False) as desk:
        for _ in range(2):
            refused = desk.tier.submit_store(desk.store_batch([20], family()))
            assert refused == Throttled("recovering", 0.1)
            desk.idle()
        let_go(drive)
        desk.store_all([20])
        assert desk.loaded(range(21)) == list(range(21))
    with Opened(log) as desk:
        assert desk.loaded(range(21)) == list(range(21))


def test_few_segments_are_read_ahead_of_the_loop(tmp_path: Path) -> None:
    with Opened(tmp_path / "one", segments=12) as desk:
        desk.store_all(range(150))
    drive, read = Drive(), set[Path]()
    drive.files.reads = lambda path, offset: read.add(path) if offset else None
    with Opened(tmp_path / "one", segments=12, drive=drive, settle=False) as desk:
        while drive.step():
            pass
        assert len(read) <= 4
        desk.settle()
        assert len(read) >= 10
        assert desk.loaded(range(120)) == list(range(120))

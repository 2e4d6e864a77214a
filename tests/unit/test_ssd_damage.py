"""Damage to a directory's files: the tier starts, serves the trustworthy blocks and counts the
rest.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.drive import Drive
from support.tiers import (
    PAGE,
    SEGMENT_BYTES,
    Opened,
    a_directory,
    flip,
    patch,
    segment_files,
)

from kvhearth.model import U8
from kvhearth_server.tiers.base import Corrupt, DirectoryError, Done, Throttled
from kvhearth_server.tiers.ssd.files import Files
from kvhearth_server.tiers.ssd.format import (
    DIRECTORY_DTYPE,
    FOOTER_DTYPE,
    SEGMENT_DTYPE,
    parse_segment_page,
    seal,
)
from kvhearth_server.tiers.ssd.recovery.restore import read_segment
from kvhearth_server.tiers.ssd.recovery.scanner import SCAN_BYTES, Reader
from kvhearth_server.tiers.ssd.settings import SsdDirectorySpec
from kvhearth_server.tiers.ssd.superblock import SUPERBLOCK_NAME

ALL = list(range(40))


def written(folder: Path, first: int = 0, count: int = 40) -> Path:
    """Blocks 0 to 39: two segments with a footer (15 blocks each), one without (10)."""
    with Opened(folder) as desk:
        desk.store_all(range(first, first + count))
    return folder


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return written(tmp_path / "one")


def repairs(desk: Opened) -> list[str]:
    """Repairs made when the directory was opened."""
    return desk.tier.log.directories[0].repairs


def dropped(desk: Opened) -> dict[str, int]:
    counts = desk.counts.values
    return {name: count for name, count in counts.items() if name.startswith("dropped_") and count}


# -- the directory's own file ----------------------------------------------------------------------

DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "magic": (lambda path: flip(path, 1), "damaged"),
    "log id": (lambda path: flip(path, 9), "damaged"),
    "segment bytes": (lambda path: flip(path, 18), "damaged"),
    "crc": (lambda path: flip(path, 61), "damaged"),
    "zeros": (lambda path: patch(path, 0, b"\0" * PAGE), "damaged"),
    "empty": (lambda path: os.truncate(path, 0), "truncated"),
    "cut": (lambda path: os.truncate(path, 63), "truncated"),
    "missing": (Path.unlink, "truncated"),
}


def test_a_damaged_head_is_made_again_from_the_segments(log: Path) -> None:
    path = log / SUPERBLOCK_NAME
    whole = path.read_bytes()
    for name, (damage, doubt) in DAMAGES.items():
        slow = os.open(path, os.O_RDWR)  # opened by a daemon that starts at the same time
        damage(path)
        with Opened(log, segment_bytes=2 * SEGMENT_BYTES) as desk:
            assert path.read_bytes() == whole, name
            assert desk.loaded(ALL) == ALL
            assert dropped(desk) == {f"dropped_{doubt}": 1}, name
            assert "taken from the segment files" in repairs(desk)[0]
            with pytest.raises(DirectoryError, match="another daemon"):
                Opened(log)
            if name != "missing":
                with pytest.raises(BlockingIOError):
                    fcntl.flock(slow, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(slow)
        assert not list(log.glob("*.new"))
        with Opened(log) as desk:
            assert desk.loaded(ALL) == ALL
            assert not dropped(desk)


def test_footers_and_records_say_it_too_and_foreign_files_are_outvoted(
    log: Path, tmp_path: Path
) -> None:
    for path in segment_files(log):
        patch(path, 0, b"\xff" * PAGE)
    other = written(tmp_path / "other", 100, 10)
    shutil.copy(segment_files(other)[0], log / "00000000.segment")
    whole = (log / SUPERBLOCK_NAME).read_bytes()
    (log / SUPERBLOCK_NAME).unlink()
    with Opened(log) as desk:
        assert (log / SUPERBLOCK_NAME).read_bytes() == whole
        assert desk.loaded(ALL) == ALL


def test_a_directory_in_which_nothing_can_be_believed_begins_anew(log: Path) -> None:
    random = np.random.default_rng(3)
    for path in [log / SUPERBLOCK_NAME, *segment_files(log)]:
        path.write_bytes(random.bytes(path.stat().st_size))
    with Opened(log) as desk:
        assert "a new log was begun" in repairs(desk)[0]
        assert dropped(desk)["dropped_damaged"] >= 1
        desk.store_all(range(10))
    with Opened(log) as desk:
        assert desk.loaded(range(10)) == list(range(10))


def test_a_head_of_another_version_is_refused_and_kept(log: Path) -> None:
    path = log / SUPERBLOCK_NAME
    row = np.frombuffer(path.read_bytes(), DIRECTORY_DTYPE, 1).copy()
    row["version"] = 2
    seal(row)
    patch(path, 0, row.tobytes())
    before = path.read_bytes()
    with pytest.raises(DirectoryError, match="of another version"):
        Opened(log)
    assert path.read_bytes() == before


def test_where_nothing_can_be_written_what_is_there_is_served(log: Path, tmp_path: Path) -> None:
    for name in ("", "crc", "missing"):
        folder = Path(shutil.copytree(log, tmp_path / f"copy {name}"))
        if name:
            DAMAGES[name][0](folder / SUPERBLOCK_NAME)
        (drive := Drive()).files.read_only = True
        with Opened(folder, drive=drive) as desk:
            assert desk.loaded(ALL) == ALL
            assert "may not be written to" in desk.reasons
            assert desk.store([50]).parts[0][0] == Throttled("degraded", 60.0)
            (other := Drive()).files.read_only = True
            with pytest.raises(DirectoryError, match="another daemon"):
                Opened(folder, drive=other)


# -- first pages -----------------------------------------------------------------------------------


def test_lost_first_pages_cost_nothing(log: Path, tmp_path: Path) -> None:
    for filler in (b"\0", b"\xff"):
        folder = Path(shutil.copytree(log, tmp_path / filler.hex()))
        used = [p for p in segment_files(folder) if p.read_bytes()[PAGE : PAGE + 4] == b"HKVR"]
        assert len(used) == 3
        for path in used:
            patch(path, 0, filler * PAGE)
        with Opened(folder) as desk:
            assert desk.loaded(ALL) == ALL
            assert dropped(desk) == {"dropped_damaged": 3}


@pytest.mark.parametrize("last", [False, True])
def test_a_life_after_which_there_can_be_none_is_not_believed(log: Path, last: bool) -> None:
    """Both in a first page and in the last page."""
    path = next(p for p in segment_files(log) if p.read_bytes()[-PAGE : -PAGE + 4] == b"HKVF")
    for at, kind in (0, SEGMENT_DTYPE), (path.stat().st_size - PAGE, FOOTER_DTYPE):
        row = np.frombuffer(path.read_bytes(), kind, 1, at).copy()
        row["segment_sequence"] = (1 << 64) - 1
        seal(row)
        if at == 0 or last:
            patch(path, at, row.tobytes())
    with Opened(log) as desk:
        assert desk.loaded(ALL) == ALL
        assert dropped(desk)["dropped_damaged"] == 1 + last
        desk.store_all(range(40, 60))
    with Opened(log) as desk:
        assert desk.loaded(range(40, 60)) == list(range(40, 60))


def test_a_lost_first_page_of_a_segment_that_is_filled_anew(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    with Opened(whole, segments=6) as desk:
        for start in range(0, 150, 5):
            desk.store_all(range(start, start + 5))
        newest = [n for n in range(150) if desk.loaded([n])]
    assert len(newest) > 20
    name = _filled_anew(whole)
    for filler in (b"\0", b"\xff"):
        for damaged in ([0], [0, 1], [0, 5]):
            folder = Path(shutil.copytree(whole, tmp_path / f"{filler.hex()} {damaged}"))
            for page in damaged:
                patch(folder / name, page * PAGE, filler * PAGE)
            with Opened(folder, segments=6) as desk:
                done = [desk.load([n]) for n in range(150)]
                assert not any(len(each.rows(Corrupt)) for each in done)
                served = {n for n, each in enumerate(done) if len(each.rows(Done))}
                assert len(set(newest) - served) <= len(damaged) - 1, (filler, damaged)


def _filled_anew(folder: Path) -> str:
    """Returns the file whose footer is of an earlier life than its records."""
    for path in segment_files(folder):
        data = path.read_bytes()
        head = parse_segment_page(data[:PAGE])
        life = int.from_bytes(data[PAGE + 16 : PAGE + 24], "little")
        footer = data[-PAGE:]
        stale = int.from_bytes(footer[16:24], "little")
        if footer[:4] == b"HKVF" and getattr(head, "sequence", 0) == life > stale:
            return path.name
    raise AssertionError("none was being filled anew")


class Counting(Reader):
    """A reader that counts its reads."""

    read_bytes = 0

    def lend(self, fd: int, offset: int, size: int) -> U8:
        self.read_bytes += size
        return super().lend(fd, offset, size)


@pytest.mark.parametrize(("written", "most"), [(False, PAGE), (True, SCAN_BYTES + 3 * PAGE)])
def test_files_that_were_never_used_are_not_read_through(
    tmp_path: Path, written: bool, most: int
) -> None:
    size = 4 * SCAN_BYTES
    directory = a_directory(SsdDirectorySpec(tmp_path, 20 * size), size, Files())
    made = directory.create_segment(1, prewrite=written, flush=False)
    directory.close_segment(made)
    (segment,) = directory.list_segments()
    reader = Counting(mmap.mmap(-1, SCAN_BYTES), Files())
    found = read_segment(segment, reader)
    assert found.empty
    assert not found.doubts
    assert reader.read_bytes <= most
    directory.close()


# -- capacity, names, foreign files ----------------------------------------------------------------


def test_a_capacity_too_small_for_the_old_segments_begins_anew(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    with Opened(folder, segments=8, segment_bytes=4 * SEGMENT_BYTES) as desk:
        desk.store_all(range(200))
    first = segment_files(folder)[0]
    patch(first, 0, b"\xff" * PAGE)
    shutil.copy(first, folder / "00000077.segment")
    with Opened(folder, segments=12) as desk:
        desk.store_all(range(300, 330))
        assert "begun anew" in repairs(desk)[0]
        assert dropped(desk)["dropped_outsized"] >= 4
        desk.rest()
        assert {path.stat().st_size for path in segment_files(folder)} == {SEGMENT_BYTES}
    with Opened(folder, segments=12) as desk:
        assert desk.loaded(range(300, 330)) == list(range(300, 330))
        assert not dropped(desk)


@pytest.mark.parametrize("name", ["99999999.segment", "123456789012.segment"])
def test_files_with_great_numbers(log: Path, name: str) -> None:
    segment_files(log)[0].rename(log / name)
    with Opened(log) as desk:
        desk.store_all(range(100, 150))
        served = [n for n in range(150) if desk.loaded([n])]
        assert set(range(100, 150)) <= set(served)
        assert len(served) >= 90
    with Opened(log) as desk:
        assert [n for n in range(150) if desk.loaded([n])] == served


@pytest.mark.parametrize("damage", ["none", "first page", "cut"])
def test_a_file_of_another_log_is_left_alone(log: Path, tmp_path: Path, damage: str) -> None:
    foreign = log / "00000050.segment"
    shutil.copy(segment_files(written(tmp_path / "other", 100, 30))[0], foreign)
    if damage == "first page":
        patch(foreign, 0, b"\xff" * PAGE)
    elif damage == "cut":
        os.truncate(foreign, SEGMENT_BYTES - PAGE)
    before = foreign.read_bytes()
    with Opened(log) as desk:
        assert desk.loaded(ALL) == ALL
        assert "00000050.segment is of another log: left alone" in desk.reasons
        desk.store_all(range(200, 400))
        assert desk.loaded(range(380, 400)) == list(range(380, 400))
        assert dropped(desk)["dropped_foreign"] == 1
    assert foreign.read_bytes() == before


def test_what_is_no_regular_file_is_passed_over(log: Path) -> None:
    os.mkfifo(log / "00000060.segment")
    (log / "00000061.segment").mkdir()
    (log / "00000062.segment").symlink_to(log / SUPERBLOCK_NAME)
    with Opened(log) as desk:
        assert desk.loaded(ALL) == ALL
        reported = "00000060.segment is no regular file, and 2 more: left alone"
        assert f"{log}: {reported}" in desk.reasons
        assert desk.counts["segments_lost"] == 0


# -- drives that hang while they are opened --------------------------------------------------------


def test_a_drive_that_hangs_while_it_is_opened_is_an_error(tmp_path: Path) -> None:
    drive, proceed = Drive(), threading.Event()
    drive.files.opens = lambda path: proceed.wait() and None
    with pytest.raises(DirectoryError, match=r"did not answer in 0 s"):
        Opened(tmp_path / "one", drive=drive, open_s=0.0)
    proceed.set()
    for each in threading.enumerate():
        if each.name == "kvhearth-open":
            each.join()
    with Opened(tmp_path / "one"):
        pass  # files opened too late have been closed again

"""Damage to a directory's files: the tier starts, serves the trustworthy blocks and counts the
rest.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.memory_places import mounted
from support.tiers import (
    DEADLINE_S,
    PAGE,
    SEGMENT_BYTES,
    Desk,
    Opened,
    a_directory,
    segment_files,
)

from kvhearth.model import U8
from kvhearth_server.tiers.base import Corrupt, DirectoryError, Done
from kvhearth_server.tiers.ssd.files import Files, OpenFile
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


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks 0 to 39: two segments with a footer (15 blocks each), one without (10)."""
    folder = tmp_path_factory.mktemp("log") / "one"
    with Opened(folder) as desk:
        desk.store_all(range(40))
    return folder


@pytest.fixture
def copy(log: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(log, tmp_path / "copy"))


def patch(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


def flipped(at: int) -> Callable[[Path], None]:
    return lambda path: patch(path, at, bytes([path.read_bytes()[at] ^ 4]))


def reasons(desk: Desk) -> str:
    return "; ".join(desk.tier.problems().values())  # type: ignore[attr-defined]


def repairs(desk: Desk) -> list[str]:
    """Repairs made when the directory was opened."""
    return desk.tier.log.directories[0].repairs  # type: ignore[attr-defined]


def dropped(desk: Desk) -> dict[str, int]:
    counts = desk.tier.counts.values  # type: ignore[attr-defined]
    return {name: count for name, count in counts.items() if name.startswith("dropped_") and count}


# -- the directory's own file ----------------------------------------------------------------------

DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "magic": (flipped(1), "damaged"),
    "log id": (flipped(9), "damaged"),
    "segment bytes": (flipped(18), "damaged"),
    "crc": (flipped(61), "damaged"),
    "zeros": (lambda path: patch(path, 0, b"\0" * PAGE), "damaged"),
    "empty": (lambda path: os.truncate(path, 0), "truncated"),
    "cut": (lambda path: os.truncate(path, 63), "truncated"),
    "missing": (Path.unlink, "truncated"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_head_is_made_again_from_the_segments(copy: Path, name: str) -> None:
    path = copy / SUPERBLOCK_NAME
    whole = path.read_bytes()
    damage, doubt = DAMAGES[name]
    slow = os.open(path, os.O_RDWR)  # opened by a daemon that starts at the same time
    damage(path)
    with Opened(copy, segment_bytes=2 * SEGMENT_BYTES) as desk:
        assert path.read_bytes() == whole
        assert len(desk.load(range(40)).rows(Done)) == 40
        assert dropped(desk) == {f"dropped_{doubt}": 1}
        assert "taken from the segment files" in repairs(desk)[0]  # type: ignore[attr-defined]
        with pytest.raises(DirectoryError, match="another daemon"):
            Opened(copy)
        if name != "missing":
            with pytest.raises(BlockingIOError):
                fcntl.flock(slow, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(slow)
    assert not list(copy.glob("*.new"))
    with Opened(copy) as desk:
        assert len(desk.load(range(40)).rows(Done)) == 40
        assert not dropped(desk)


def test_footers_and_records_say_it_too_and_foreign_files_are_outvoted(
    copy: Path, tmp_path: Path
) -> None:
    with Opened(tmp_path / "other") as desk:
        desk.store_all(range(100, 110))
    for path in segment_files(copy):
        patch(path, 0, b"\xff" * PAGE)
    shutil.copy(next(segment_files(tmp_path / "other")), copy / "00000000.segment")
    whole = (copy / SUPERBLOCK_NAME).read_bytes()
    (copy / SUPERBLOCK_NAME).unlink()
    with Opened(copy) as desk:
        assert (copy / SUPERBLOCK_NAME).read_bytes() == whole
        assert len(desk.load(range(40)).rows(Done)) == 40


def test_a_directory_in_which_nothing_can_be_believed_begins_anew(copy: Path) -> None:
    random = np.random.default_rng(3)
    for path in [copy / SUPERBLOCK_NAME, *segment_files(copy)]:
        path.write_bytes(random.bytes(path.stat().st_size))
    with Opened(copy) as desk:
        assert "a new log was begun" in repairs(desk)[0]
        assert dropped(desk)["dropped_damaged"] >= 1
        desk.store_all(range(10))
    with Opened(copy) as desk:
        assert len(desk.load(range(10)).rows(Done)) == 10


def test_a_head_of_another_version_is_refused_and_kept(copy: Path) -> None:
    path = copy / SUPERBLOCK_NAME
    row = np.frombuffer(path.read_bytes(), DIRECTORY_DTYPE, 1).copy()
    row["version"] = 2
    seal(row)
    patch(path, 0, row.tobytes())
    before = path.read_bytes()
    with pytest.raises(DirectoryError, match="of another version"):
        Opened(copy)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["crc", "missing"])
def test_a_damaged_head_where_nothing_can_be_written(log: Path, tmp_path: Path, name: str) -> None:
    with mounted("tmpfs", "size=16m", tmp_path / "small") as mount:
        folder = Path(shutil.copytree(log, mount / "copy"))
        DAMAGES[name][0](folder / SUPERBLOCK_NAME)
        subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
        with Opened(folder) as desk:
            assert len(desk.load(range(40)).rows(Done)) == 40
            assert "may not be written to" in reasons(desk)
            with pytest.raises(DirectoryError, match="another daemon"):
                Opened(folder)


# -- first pages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("filler", [b"\0", b"\xff"])
def test_lost_first_pages_cost_nothing(copy: Path, filler: bytes) -> None:
    used = [path for path in segment_files(copy) if path.read_bytes()[PAGE : PAGE + 4] == b"HKVR"]
    assert len(used) == 3
    for path in used:
        patch(path, 0, filler * PAGE)
    with Opened(copy) as desk:
        assert len(desk.load(range(40)).rows(Done)) == 40
        assert dropped(desk) == {"dropped_damaged": 3}


@pytest.mark.parametrize("last", [False, True])
def test_a_life_after_which_there_can_be_none_is_not_believed(copy: Path, last: bool) -> None:
    """Both in a first page and in the last page."""
    path = next(p for p in segment_files(copy) if p.read_bytes()[-PAGE : -PAGE + 4] == b"HKVF")
    for at, kind in (0, SEGMENT_DTYPE), (path.stat().st_size - PAGE, FOOTER_DTYPE):
        row = np.frombuffer(path.read_bytes(), kind, 1, at).copy()
        row["segment_sequence"] = (1 << 64) - 1
        seal(row)
        if at == 0 or last:
            patch(path, at, row.tobytes())
    with Opened(copy) as desk:
        assert len(desk.load(range(40)).rows(Done)) == 40
        assert dropped(desk)["dropped_damaged"] == 1 + last
        desk.store_all(range(40, 60))
    with Opened(copy) as desk:
        assert len(desk.load(range(40, 60)).rows(Done)) == 20


@pytest.mark.parametrize("damaged", [[0], [0, 1], [0, 5]])
@pytest.mark.parametrize("filler", [b"\0", b"\xff"])
def test_a_lost_first_page_of_a_segment_that_is_filled_anew(
    tmp_path: Path, damaged: list[int], filler: bytes
) -> None:
    folder = tmp_path / "one"
    with Opened(folder, segments=6) as desk:
        for start in range(0, 150, 5):
            desk.store_all(range(start, start + 5))
        newest = [n for n in range(150) if len(desk.load([n]).rows(Done))]
    assert len(newest) > 20
    path = _filled_anew(folder)
    for page in damaged:
        patch(path, page * PAGE, filler * PAGE)
    with Opened(folder, segments=6) as desk:
        done = [desk.load([n]) for n in range(150)]
        assert not any(len(each.rows(Corrupt)) for each in done)
        served = [n for n, each in enumerate(done) if len(each.rows(Done))]
        assert len(set(newest) - set(served)) <= len(damaged) - 1


def _filled_anew(folder: Path) -> Path:
    """Returns the file whose footer is of an earlier life than its records."""
    for path in segment_files(folder):
        data = path.read_bytes()
        head = parse_segment_page(data[:PAGE])
        life = int.from_bytes(data[PAGE + 16 : PAGE + 24], "little")
        footer = data[-PAGE:]
        stale = int.from_bytes(footer[16:24], "little")
        if footer[:4] == b"HKVF" and getattr(head, "sequence", 0) == life > stale:
            return path
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
    directory = a_directory(SsdDirectorySpec(tmp_path, 20 * size), size)
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
    patch(next(segment_files(folder)), 0, b"\xff" * PAGE)
    shutil.copy(next(segment_files(folder)), folder / "00000077.segment")
    with Opened(folder, segments=12) as desk:
        capacity = desk.tier.settings.places[0].capacity_bytes  # type: ignore[attr-defined]
        desk.store_all(range(300, 330))
        assert "begun anew" in repairs(desk)[0]
        assert dropped(desk)["dropped_outsized"] >= 4
        desk.rest()
        assert desk.tier.allocated_bytes()[str(folder)] <= capacity  # type: ignore[attr-defined]
        assert {path.stat().st_size for path in segment_files(folder)} == {SEGMENT_BYTES}
    with Opened(folder, segments=12) as desk:
        assert len(desk.load(range(300, 330)).rows(Done)) == 30
        assert not dropped(desk)


@pytest.mark.parametrize("name", ["99999999.segment", "123456789012.segment"])
def test_files_with_great_numbers(copy: Path, name: str) -> None:
    first = next(segment_files(copy))
    first.rename(copy / name)
    with Opened(copy) as desk:
        desk.store_all(range(100, 150))
        served = [n for n in range(150) if len(desk.load([n]).rows(Done))]
        assert set(range(100, 150)) <= set(served)
        assert len(served) >= 90
    with Opened(copy) as desk:
        assert [n for n in range(150) if len(desk.load([n]).rows(Done))] == served


@pytest.mark.parametrize("damage", ["none", "first page", "cut"])
def test_a_file_of_another_log_is_left_alone(copy: Path, tmp_path: Path, damage: str) -> None:
    with Opened(tmp_path / "other") as desk:
        desk.store_all(range(100, 130))
    foreign = copy / "00000050.segment"
    shutil.copy(next(segment_files(tmp_path / "other")), foreign)
    if damage == "first page":
        patch(foreign, 0, b"\xff" * PAGE)
    elif damage == "cut":
        os.truncate(foreign, SEGMENT_BYTES - PAGE)
    before = foreign.read_bytes()
    with Opened(copy) as desk:
        assert len(desk.load(range(40)).rows(Done)) == 40
        assert "00000050.segment is of another log: left alone" in reasons(desk)
        for start in range(200, 400, 20):
            desk.store_all(range(start, start + 20))
        assert len(desk.load(range(380, 400)).rows(Done)) == 20
        capacity = desk.tier.settings.places[0].capacity_bytes  # type: ignore[attr-defined]
        assert desk.tier.allocated_bytes()[str(copy)] <= capacity  # type: ignore[attr-defined]
        assert dropped(desk)["dropped_foreign"] == 1
    assert foreign.read_bytes() == before


def test_what_is_no_regular_file_is_passed_over(copy: Path) -> None:
    os.mkfifo(copy / "00000060.segment")
    (copy / "00000061.segment").mkdir()
    (copy / "00000062.segment").symlink_to(copy / SUPERBLOCK_NAME)
    with Opened(copy) as desk:
        assert len(desk.load(range(40)).rows(Done)) == 40
        reported = "00000060.segment is no regular file, and 2 more: left alone"
        assert f"{copy}: {reported}" in reasons(desk)
        assert desk.tier.counts["segments_lost"] == 0  # type: ignore[attr-defined]


# -- drives that hang while they are opened --------------------------------------------------------


class Hanging(Files):
    """Opens nothing below one folder until it is released."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.proceed = threading.Event()
        self.opened = threading.Event()

    def open(self, path: Path, *, create: bool = False) -> OpenFile:
        if self._folder in path.parents:
            self.proceed.wait(DEADLINE_S)
            self.opened.set()
        return super().open(path, create=create)


def test_a_drive_that_hangs_does_not_hold_up_the_others(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    files = Hanging(two)
    # Long enough for the other one on a busy machine: all of it is waited for.
    with Opened(one, two, files=files, open_s=3.0) as desk:
        assert f"{two} did not answer in 3 s" in reasons(desk)
        assert len(desk.tier.failed_places) == 1  # type: ignore[attr-defined]
        assert desk.tier.loads_of_the_dead
        desk.store_all(range(10))
        assert len(desk.load(range(10)).rows(Done)) == 10
        files.proceed.set()
        assert files.opened.wait(DEADLINE_S)
        for each in threading.enumerate():
            if each.name == "kvhearth-open":
                each.join(DEADLINE_S)
        with Opened(two):
            pass  # files opened too late have been closed again


def test_no_drive_that_answers_is_an_error(tmp_path: Path) -> None:
    files = Hanging(tmp_path)
    with pytest.raises(DirectoryError, match=r"did not answer in 0.2 s"):
        Opened(tmp_path / "one", files=files, open_s=0.2)
    files.proceed.set()

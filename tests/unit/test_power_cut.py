"""Files after a power cut: what was promised is there, and nothing that was taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from support.power import Drive
from support.tiers import SEGMENT_BYTES, Opened

from kvhearth_server.cli.remote import init_key
from kvhearth_server.engine.epoch_store import FILE_NAME, EpochStore
from kvhearth_server.observability.counters import Counters
from kvhearth_server.observability.metrics import COUNTERS
from kvhearth_server.ownership import replace_file
from kvhearth_server.tiers.base import Failed
from kvhearth_server.tiers.ssd.files import Files
from kvhearth_server.tiers.ssd.format import DirectoryHead, parse_directory_page
from kvhearth_server.tiers.ssd.superblock import SUPERBLOCK_NAME, Ownership, own

CONTENT = {"lineage": "one", "next_session": 7, "epoch_floor": 3, "namespaces": []}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder on the drive."""
    (found := tmp_path / "drive").mkdir()
    return found


@pytest.fixture
def drive(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    """The folder's drive."""
    drive = Drive(monkeypatch, folder)
    yield drive
    drive.close()


@pytest.fixture
def watched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    """The folder's drive; its power may fail before any sync."""
    drive = Drive(monkeypatch, folder, watched=True)
    yield drive
    drive.close()


def test_a_file_is_replaced_as_a_whole(watched: Drive, folder: Path) -> None:
    replace_file(folder / "file", b"old")
    assert watched.cut()["file"] == b"old"
    watched.moments.clear()
    replace_file(folder / "file", b"new")
    assert {each["file"] for each in watched.moments} == {b"old", b"new"}
    assert watched.cut()["file"] == b"new"


def owned(folder: Path) -> Ownership:
    """Open the directory without segments."""
    return own(Files(), folder, [], SEGMENT_BYTES)


def test_the_superblock_is_durable_once_the_directory_is_owned(
    watched: Drive, folder: Path, tmp_path: Path
) -> None:
    first = owned(folder)
    later = owned(watched.cut_to(tmp_path / "later"))
    assert (later.head, later.repairs) == (first.head, [])
    watched.moments.clear()
    new = DirectoryHead(first.head.log_id, 2 * SEGMENT_BYTES)
    first.rewrite(Files(), folder / SUPERBLOCK_NAME, new)
    heads = [parse_directory_page(each[SUPERBLOCK_NAME]) for each in watched.moments]
    assert set(heads) <= {later.head, new}
    assert parse_directory_page(watched.cut()[SUPERBLOCK_NAME]) == new
    first.close()
    later.close()


def test_a_flushed_store_is_durable_once_it_is_done(
    drive: Drive, folder: Path, tmp_path: Path
) -> None:
    with Opened(folder, flush=True, interface="threads", real=True) as desk:
        desk.store_all(range(8))
        later = drive.cut_to(tmp_path / "later")
    with Opened(later) as desk:
        assert desk.loaded(range(8)) == list(range(8))


def test_a_store_whose_flush_fails_is_not_done(drive: Drive, folder: Path) -> None:
    with Opened(folder, flush=True, interface="threads", real=True) as desk:
        desk.store_all(range(4))
        drive.broken = True
        assert len(desk.store(range(4, 8)).rows(Failed)) == 4
        drive.broken = False
        assert desk.loaded(range(8)) == [0, 1, 2, 3]


def epochs_in(folder: Path) -> EpochStore:
    """The namespaces' file of one directory."""
    return EpochStore([folder], Counters(COUNTERS))


def test_an_epoch_is_durable_once_it_is_confirmed(
    drive: Drive, folder: Path, tmp_path: Path
) -> None:
    with closing(epochs_in(folder)) as store:
        store.write(CONTENT, [])
        asyncio.run(store.confirm())
        assert epochs_in(drive.cut_to(tmp_path / "later")).read() is not None
        drive.broken = True
        store.write(CONTENT | {"epoch_floor": 4}, [])
        asyncio.run(store.confirm())
        assert FILE_NAME not in drive.cut(), "the old epoch came back"
        drive.broken = False


def test_an_epoch_is_not_confirmed_while_the_drive_is_busy(drive: Drive, folder: Path) -> None:
    async def scenario() -> None:
        store = epochs_in(folder)
        drive.awake.clear()
        store.write(CONTENT, [])
        confirmed = asyncio.ensure_future(store.confirm())
        await asyncio.sleep(0)
        assert not confirmed.done()
        assert FILE_NAME not in drive.cut()
        drive.awake.set()
        await confirmed
        assert FILE_NAME in drive.cut()
        store.close()

    asyncio.run(scenario())


def test_a_fleets_key_is_on_the_drive_once_it_is_told(drive: Drive, folder: Path) -> None:
    init_key(folder / "key")
    assert drive.cut()["key"] == (folder / "key").read_bytes() != b""

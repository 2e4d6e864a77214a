"""The SSD tier on a real file system that fills up: the daemon serves, reports why it is degraded,
and continues once there is room again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.daemon import Daemon, running_daemon, until
from support.http_door import ANY_PORT, ask
from support.memory_places import mounted
from support.raw_door import new_keys
from support.ssd_kit import CONTRACT, MEMORY_BLOCKS, SSD, fetch_all, store_all

from kvhearth_lab.harness.engine import Engine, engine_of
from kvhearth_lab.torture.damage import segment_files, taken_bytes

MIB = 1 << 20
DRIVE_BYTES = 80 * MIB
CAPACITY = 48 * MIB
LEFT_BYTES = 14 * MIB
"""Bytes that other files leave on the file system: room for some segments, but not all."""
FULL = "no space left on its file system"


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Path]:
    """A separate small file system."""
    with mounted("tmpfs", f"size={DRIVE_BYTES}", tmp_path / "drive") as place:
        yield place


def ballast(drive: Path, left_bytes: int) -> Path:
    """Makes a foreign file that leaves so much room."""
    path = drive / "ballast"
    found = os.statvfs(drive)
    size = found.f_bavail * found.f_frsize - left_bytes
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return path


@contextmanager
def full_drive(drive: Path) -> Iterator[tuple[Daemon, Engine]]:
    """A daemon on the drive, and an engine."""
    dirs = [f"{drive}/kv={CAPACITY}"]
    with (
        running_daemon(**SSD, ssd_dirs=dirs, http=ANY_PORT) as daemon,
        engine_of(daemon.url(), CONTRACT) as engine,
    ):
        yield daemon, engine


def says(daemon: Daemon, text: str) -> Callable[[], bool]:
    """A condition: the daemon's readiness contains the text; it must be ready in any case."""

    def look() -> bool:
        reply = ask(daemon, "/readyz?verbose")
        assert reply.status == 200
        return text in reply.body.decode()

    return look


def serves(daemon: Daemon, engine: Engine) -> None:
    """Stores more than memory holds: the last blocks are served, and the capacity is kept to."""
    keys = new_keys(2 * MEMORY_BLOCKS)
    store_all(engine, keys)
    last = keys[-MEMORY_BLOCKS // 4 :]
    assert sorted(fetch_all(engine, last)) == sorted(last)
    daemon.stats()


def test_a_file_system_that_runs_full(drive: Path) -> None:
    other = ballast(drive, LEFT_BYTES)
    with full_drive(drive) as (daemon, engine):
        folder = drive / "kv"
        serves(daemon, engine)
        until(says(daemon, FULL), "it says what is wrong")
        files = len(segment_files(folder))
        assert 2 <= files <= LEFT_BYTES // (2 * MIB)
        # The log's existing segments are reused.
        before = daemon.counters()["demoted_blocks"]
        serves(daemon, engine)
        assert daemon.counters()["demoted_blocks"] > before
        assert taken_bytes(folder) <= LEFT_BYTES
        other.unlink()
        boot_id = engine.client.boot_id
        daemon.restart()
        until(lambda: engine.ready and engine.client.boot_id != boot_id, "the engine is back")
        until(lambda: daemon.read_back, "it is read back")
        serves(daemon, engine)
        until(lambda: len(segment_files(folder)) > files, "it takes the room that is there")
        until(says(daemon, "[i]ssd: healthy"), "it is well again")
        assert taken_bytes(folder) <= CAPACITY


def test_a_file_system_that_is_full_from_the_start(drive: Path) -> None:
    ballast(drive, MIB)
    with full_drive(drive) as (daemon, engine):
        serves(daemon, engine)
        until(says(daemon, FULL), "it says what is wrong")
        assert not segment_files(drive / "kv")
        assert daemon.counters().get("demoted_blocks", 0) == 0
        assert taken_bytes(drive / "kv") <= MIB


@pytest.mark.slow
def test_room_that_comes_back_is_taken_without_a_restart(drive: Path) -> None:
    other = ballast(drive, LEFT_BYTES)
    with full_drive(drive) as (daemon, engine):
        serves(daemon, engine)
        until(says(daemon, FULL), "it says what is wrong")
        files = len(segment_files(drive / "kv"))
        other.unlink()
        until(says(daemon, "[i]ssd: healthy"), "it is well again")
        serves(daemon, engine)
        until(lambda: len(segment_files(drive / "kv")) > files, "it takes the room that is there")
        assert taken_bytes(drive / "kv") <= CAPACITY

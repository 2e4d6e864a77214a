"""Weights bumped while the drive accepts no file: reports, and blocks that must not come back after
a cold start.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from support.daemon import Daemon, stopped_daemon, until
from support.memory_places import mounted
from support.raw_door import new_keys
from support.ssd_kit import CONTRACT, SSD, fetch_all, saved, store_all

from kvhearth.results import CommitGroup
from kvhearth_lab.harness.engine import PAGES, Engine, engine_of
from kvhearth_lab.torture.damage import keys_on_disk
from kvhearth_server.memory.arena import CATALOGUE_NAME

BLOCKS = 20


@contextmanager
def cold_daemon(folder: Path) -> Iterator[tuple[Daemon, list[bytes]]]:
    """A daemon whose memory ends with it, with blocks on its drive."""
    with stopped_daemon(arena=False, **SSD, ssd_dirs=[f"{folder}=64MiB"]) as daemon:
        daemon.start()
        keys = new_keys(BLOCKS)
        with engine_of(daemon.url(), CONTRACT) as engine:
            store_all(engine, keys)
            saved(daemon, BLOCKS)
        yield daemon, keys


@contextmanager
def read_only(drive: Path) -> Iterator[None]:
    """A read-only mount over the drive. Files open for writing prevent remounting the file system
    itself, but not the kernel's remount after a drive's failure.
    """
    subprocess.run(["mount", "--bind", str(drive), str(drive)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", str(drive)], check=True)
        assert not os.access(drive, os.W_OK)
        yield
    finally:
        subprocess.run(["umount", "-l", str(drive)], check=True)


def assert_old_ones_stay_out(daemon: Daemon, keys: list[bytes]) -> None:
    """Kills the daemon and starts it cold: no old block may be served."""
    daemon.kill()
    daemon.start()
    with engine_of(daemon.url(), CONTRACT) as engine:
        until(lambda: daemon.read_back, "it is read back")
        found = engine.client.lookup({0: keys}, lease=False, prefetch=True)
        assert not found.reason
        assert not found.groups[0].present.any(), "blocks of old weights"


def failures(daemon: Daemon) -> int:
    """Returns the number of failed writes of the namespaces."""
    return daemon.counters().get("ssd_catalogue_failures", 0)


def said(folder: Path) -> bytes:
    """Returns the content of the namespaces file; empty without one."""
    with contextlib.suppress(FileNotFoundError):
        return (folder / "namespaces").read_bytes()
    return b""


def test_a_bump_is_not_confirmed_while_the_drive_hangs(tmp_path: Path) -> None:
    folder = tmp_path / "ssd"
    with cold_daemon(folder) as (daemon, keys):
        with engine_of(daemon.url(), CONTRACT) as engine:
            old = said(folder)
            # Opening this pipe waits for a reader, as on a drive that hangs; even root waits.
            os.mkfifo(folder / "namespaces.new")
            assert engine.client.bump_epoch() == -1
            daemon.stats()
            assert failures(daemon) > 0
            assert engine.client.lookup({0: keys}, lease=False).reason
            assert (
                "epoch bump not durable: stale blocks may reappear after a restart"
                in daemon.log_text()
            )
            # The write continues and fails: then there is no file, and no block can come back.
            fifo = os.open(folder / "namespaces.new", os.O_RDONLY | os.O_NONBLOCK)
            (folder / "namespaces.new").unlink(missing_ok=True)
            os.close(fifo)
            until(lambda: said(folder) != old, "the old file is removed or replaced")
            assert_bumped_again(engine)
        assert_old_ones_stay_out(daemon, keys)


def assert_bumped_again(engine: Engine) -> None:
    """Bumps until the engine's new weights have an epoch."""
    until(lambda: engine.client.bump_epoch() > 0, "the bump is confirmed")
    fresh = new_keys(4)
    store_all(engine, fresh)
    assert sorted(fetch_all(engine, fresh)) == sorted(fresh)


def test_a_read_only_drives_epochs_are_not_believed(tmp_path: Path) -> None:
    with (
        mounted("tmpfs", "size=128m", tmp_path / "drive") as drive,
        contextlib.ExitStack() as stack,
        cold_daemon(drive / "ssd") as (daemon, keys),
    ):
        with engine_of(daemon.url(), CONTRACT) as engine:
            stack.enter_context(read_only(drive))
            assert engine.client.bump_epoch() == -1
            assert failures(daemon) > 0
            assert engine.client.lookup({0: keys}, lease=False).reason
        assert_old_ones_stay_out(daemon, keys)
        assert "may be old" in daemon.log_text()


def test_one_damaged_half_of_the_arenas_catalogue_brings_no_epoch_back(tmp_path: Path) -> None:
    with stopped_daemon() as daemon:
        daemon.start()
        keys = new_keys(BLOCKS)
        arena = daemon.arena_dir
        assert arena is not None
        path = arena / CATALOGUE_NAME
        with engine_of(daemon.url(), CONTRACT) as engine:
            store_all(engine, keys)
            epoch = engine.client.bump_epoch()
            assert epoch > 0
            whole = path.read_bytes()
            daemon.kill()
        # The catalogue is of the instant after the bump; its most recently written half is damaged.
        assert whole == path.read_bytes()
        half = len(whole) // 2
        numbers = [int.from_bytes(whole[at + 16 : at + 24], "little") for at in (0, half)]
        assert all(numbers)
        at = half * (numbers[1] > numbers[0])
        damaged = bytearray(whole)
        damaged[at + 100] ^= 1
        path.write_bytes(damaged)
        daemon.start()
        with engine_of(daemon.url(), CONTRACT) as engine:
            found = engine.client.lookup({0: keys}, lease=False)
            assert not found.reason
            assert not found.groups[0].present.any(), "blocks of old weights"
            assert engine.client.epoch == epoch


def test_what_waits_is_written_before_an_orderly_end_in_an_arena_too(tmp_path: Path) -> None:
    with stopped_daemon(**SSD, ssd_dirs=[f"{tmp_path}/ssd=64MiB"]) as daemon:
        daemon.start()
        keys = new_keys(200)
        with engine_of(daemon.url(), CONTRACT) as engine:
            store_all(engine, keys)
            assert daemon.terminate() == 0
        assert daemon.arena_dir is not None
        for path in daemon.arena_dir.iterdir():  # after a reboot of the machine
            path.unlink()
        daemon.start()
        with engine_of(daemon.url(), CONTRACT) as engine:
            until(lambda: daemon.read_back, "it is read back")
            assert sorted(fetch_all(engine, keys)) == sorted(keys)


def test_what_is_acknowledged_while_the_doors_close_is_written_too(tmp_path: Path) -> None:
    for number in range(5):  # half of the rounds have a commit at the wrong moment
        folder = tmp_path / f"ssd{number}"
        with stopped_daemon(arena=False, **SSD, ssd_dirs=[f"{folder}=64MiB"]) as daemon:
            daemon.start()
            with engine_of(daemon.url(), CONTRACT) as engine:
                taken = engine.reserve(PAGES)
                extents, acknowledged = taken.groups[0], list[bytes]()
                keys = new_keys(len(extents))
                for rank in engine.ranks:
                    rank.store(taken.boot_id, keys, engine.client.epoch, extents[:, rank.number])
                ending = threading.Thread(target=daemon.terminate)
                ending.start()
                for row, key in enumerate(keys):
                    group = CommitGroup([key], extents[row : row + 1], None)
                    if engine.client.commit({0: group}, boot_id=taken.boot_id).reason:
                        break
                    acknowledged.append(key)
                ending.join()
            assert keys_on_disk(folder) >= set(acknowledged)

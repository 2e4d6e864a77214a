"""A daemon serves before its memory has pages, and without what the machine has not."""

from __future__ import annotations

import os
from pathlib import Path

from support.daemon import stopped_daemon, until
from support.memory_places import MIB, mounted
from support.raw_door import new_keys
from support.served import back, served

from kvhearth_lab.harness.engine import STORE_MAX, contract_of, engine_of

PAGE = 256 << 10
SLAB = 64 * MIB


def fill(path: Path, leave: int) -> None:
    """Takes the room of a file system."""
    found = os.statvfs(path.parent)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, found.f_bavail * found.f_frsize - leave)


def test_a_start_that_was_killed_goes_on_with_what_memory_there_is(tmp_path: Path) -> None:
    with (
        mounted("tmpfs", "size=400m", tmp_path / "small") as small,
        stopped_daemon(arena=False, memory="320MiB", slab_bytes="64MiB") as daemon,
    ):
        daemon.arena_dir = small / "arena"
        daemon.launch("populate.slab:3")
        until(lambda: daemon.dead, "it dies while it populates")
        fill(small / "others", leave=SLAB + MIB)
        assert daemon.start()
        assert daemon.populated()["populated_bytes"] == 3 * SLAB
        assert "128MiB of memory cannot be had (by the size of the tmpfs" in daemon.log_text()
        with engine_of(daemon.url(), contract_of(PAGE)) as engine:
            assert daemon.stats().segments[0].capacity_bytes == 3 * SLAB
            for _ in range(12):
                keys = new_keys(STORE_MAX)
                assert engine.store(keys).bound == keys
                assert served(engine, keys) == STORE_MAX
            assert daemon.stats().segments[0].capacity_bytes == 3 * SLAB
            boot_id = engine.client.boot_id
            (small / "others").unlink()
            daemon.restart()
            back(engine, boot_id)
            assert daemon.populated()["populated_bytes"] == 5 * SLAB
            assert served(engine, keys) == STORE_MAX
            assert daemon.stats().segments[0].capacity_bytes == 5 * SLAB

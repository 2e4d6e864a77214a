"""Settings changed between two starts on one arena: blocks are moved, or nothing changes."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
from pathlib import Path

import pytest
from support.daemon import Daemon, running_daemon, until

import kvhearth_server
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.engine import Engine, contract_of, engine_of

MIB = 1 << 20
PAGE = 64 << 10
CONTRACT = contract_of(PAGE)
A_SLAB = 2 * MIB // PAGE
"""Blocks in one slab of the daemon of these tests, whose 16 MiB are 8 slabs."""
A_LOAD = 16
_RESIZE = Path(kvhearth_server.__path__[0]) / "memory" / "arena.py"
POINTS = sorted(set(re.findall(r'\bhit\("(resize\.[a-z_]+)"\)', _RESIZE.read_text())))


def named(count: int, first: int = 0) -> list[bytes]:
    """Distinct keys."""
    return [number.to_bytes(32, "big") for number in range(first, first + count)]


def stored(engine: Engine, keys: list[bytes]) -> None:
    """Stores chains of 32 blocks each."""
    for start in range(0, len(keys), A_SLAB):
        part = keys[start : start + A_SLAB]
        assert engine.store(part).bound == part


def served(engine: Engine, keys: list[bytes]) -> list[bytes]:
    """Returns the keys that are served; a wrong byte fails.

    A small arena leases few blocks at once, and leases come back a moment after a load, so blocks
    that are present but got no lease are requested again.
    """
    right: set[bytes] = set()
    absent: set[bytes] = set()

    def settled() -> bool:
        left = [key for key in keys if key not in right and key not in absent]
        for start in range(0, len(left), A_LOAD):
            seen = engine.check(left[start : start + A_LOAD])
            assert seen.bad == []
            right.update(seen.right)
            absent.update(seen.absent)
        return len(right) + len(absent) == len(keys)

    until(settled, "every block is served or absent")
    return [key for key in keys if key in right]


def changed(daemon: Daemon, engine: Engine, fault: str = "", **settings: object) -> bool:
    """Kills the daemon and starts it with other settings; waits until the engine is attached."""
    boot_id = engine.client.boot_id
    daemon.kill()
    daemon.settings.update(settings)
    if not daemon.start(fault):
        return False
    until(lambda: engine.ready and engine.client.boot_id != boot_id, "the engine attaches again")
    return True


def refused(daemon: Daemon) -> str:
    """Returns the last words of a start that fails because of the arena."""
    assert daemon.launch().wait(HUNG_S) == 3, daemon.log_tail()
    assert "Traceback" not in daemon.log_text()
    return daemon.log_text().splitlines()[-1]


def arena_files(daemon: Daemon) -> dict[str, int]:
    """Names and sizes of the arena's files."""
    assert daemon.arena_dir is not None
    return {path.name: path.stat().st_size for path in daemon.arena_dir.iterdir()}


def keep(daemon: Daemon, count: int) -> None:
    """Evicts all but ``count`` blocks."""
    digest = daemon.operator().namespaces().namespaces[0].namespace
    daemon.operator().evict(digest, count * PAGE, None)


# -- memory ----------------------------------------------------------------------------------------


def test_more_memory_keeps_every_block() -> None:
    with running_daemon() as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        keys = named(6 * A_SLAB)
        stored(engine, keys)
        assert changed(daemon, engine, memory="32MiB")
        assert served(engine, keys) == keys
        more = named(8 * A_SLAB, 10_000)
        stored(engine, more)
        assert served(engine, keys + more) == keys + more
        (part,) = daemon.stats().segments
        assert part.capacity_bytes == 32 * MIB
        assert changed(daemon, engine)
        assert served(engine, keys + more) == keys + more


def test_less_memory_keeps_every_block_where_all_fit() -> None:
    """The remaining blocks lie at the arena's end, so they have to be moved."""
    with running_daemon() as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        stored(engine, named(5 * A_SLAB))
        keys = named(2 * A_SLAB, 10_000)
        stored(engine, keys)
        keep(daemon, 2 * A_SLAB)
        assert served(engine, keys) == keys
        assert changed(daemon, engine, memory="6MiB")
        assert served(engine, keys) == keys
        until(lambda: arena_files(daemon)["segment-0"] == 6 * MIB, "the memory is given back")
        assert changed(daemon, engine)
        assert served(engine, keys) == keys
        assert daemon.stats().blocks == len(keys)


def test_less_memory_evicts_only_what_has_no_room() -> None:
    with running_daemon() as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        keys = named(7 * A_SLAB)
        stored(engine, keys)
        assert changed(daemon, engine, memory="8MiB")
        left = served(engine, keys)
        assert left == keys[-4 * A_SLAB :], "the newest chains stay, whole"
        (line,) = [line for line in daemon.log_text().splitlines() if "evicted to fit" in line]
        assert f"{3 * A_SLAB} of {7 * A_SLAB}" in line
        until(lambda: not daemon.stats().leases, "leases come back, so that blocks can be evicted")
        more = named(A_SLAB, 10_000)
        stored(engine, more)
        assert served(engine, more) == more
        daemon.stats()


def test_a_chain_keeps_its_root() -> None:
    """A chain that grew recently is kept from its root on: without the root nothing hits."""
    with running_daemon() as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        root, leaf = named(A_SLAB), named(A_SLAB, 10_000)
        stored(engine, root)
        stored(engine, named(2 * A_SLAB, 20_000))
        assert engine.store(leaf, parent=root[-1]).bound == leaf
        assert changed(daemon, engine, memory="4MiB")
        assert served(engine, root + leaf) == root + leaf


def test_blocks_of_several_shards_and_sizes_move_whole() -> None:
    small, wide = contract_of(16 << 10, model="small"), contract_of(PAGE, shards=2)
    with (
        running_daemon() as daemon,
        engine_of(daemon.url(), small, "small") as first,
        engine_of(daemon.url(), wide, "wide") as second,
    ):
        stored(second, named(2 * A_SLAB))
        stored(first, named(64))
        boot_id = first.client.boot_id
        assert changed(daemon, second, memory="10MiB")
        until(lambda: first.ready and first.client.boot_id != boot_id, "it attaches again")
        assert served(second, named(2 * A_SLAB)) == named(2 * A_SLAB)
        assert served(first, named(64)) == named(64)
        until(lambda: arena_files(daemon)["segment-0"] == 10 * MIB, "the memory is given back")
        assert changed(daemon, second, memory="64MiB")
        until(lambda: first.ready, "it attaches again")
        assert served(second, named(2 * A_SLAB)) == named(2 * A_SLAB)


@pytest.mark.parametrize(("memory", "after"), [("6MiB", "6MiB"), ("32MiB", "16MiB")])
@pytest.mark.parametrize("point", POINTS)
def test_a_death_in_the_middle_loses_nothing_that_fits(point: str, memory: str, after: str) -> None:
    """After the daemon's death the old size works as well as the new one."""
    with running_daemon() as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        stored(engine, named(4 * A_SLAB))
        keys = named(2 * A_SLAB, 10_000)
        stored(engine, keys)
        keep(daemon, 2 * A_SLAB)
        boot_id = engine.client.boot_id
        assert not changed(daemon, engine, f"{point}:1", memory=memory)
        assert daemon.exit_code == -signal.SIGKILL
        daemon.settings["memory"] = after
        assert daemon.start()
        until(lambda: engine.ready and engine.client.boot_id != boot_id, "it attaches again")
        assert served(engine, keys) == keys
        names = {"arena.lock", "catalogue", "journal", "segment-0"}
        until(lambda: set(arena_files(daemon)) == names, "nothing is left lying about")
        assert daemon.stats().segments[0].capacity_bytes == int(after[:-3]) * MIB


def test_memory_that_an_old_client_maps_is_kept_until_it_lets_go() -> None:
    """Truncating a file under a client's mapping would end its process with SIGBUS."""
    with running_daemon() as daemon:
        with engine_of(daemon.url(), CONTRACT) as engine:
            stored(engine, named(A_SLAB))
        assert daemon.arena_dir is not None
        held = os.open(daemon.arena_dir / "segment-0", os.O_RDWR)
        lock = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 777, 1, 0)
        fcntl.fcntl(held, 37, lock)  # F_OFD_SETLK, as on a client's descriptor
        daemon.kill()
        daemon.settings["memory"] = "8MiB"
        daemon.start()
        assert arena_files(daemon)["segment-0"] == 16 * MIB
        # The client may still write behind the arena's new end: that part is unused until it exits.
        daemon.kill()
        daemon.settings["memory"] = "32MiB"
        assert "still map" in refused(daemon)
        daemon.settings["memory"] = "8MiB"
        daemon.start()
        os.close(held)
        until(lambda: arena_files(daemon)["segment-0"] == 8 * MIB, "the memory is given back")
        daemon.kill()
        daemon.settings["memory"] = "32MiB"
        daemon.start()
        with engine_of(daemon.url(), CONTRACT) as engine:
            assert served(engine, named(A_SLAB)) == named(A_SLAB)


def test_memory_that_is_not_there_leaves_the_arena_as_it_was() -> None:
    with running_daemon() as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        keys = named(2 * A_SLAB)
        stored(engine, keys)
        daemon.kill()
        before = arena_files(daemon)
        daemon.settings["memory"] = "900TiB"
        daemon.settings["slab_bytes"] = "2MiB"
        assert "less" in refused(daemon)
        assert arena_files(daemon) == before
        assert changed(daemon, engine, memory="16MiB")
        assert served(engine, keys) == keys


# -- arenas that cannot be adopted -----------------------------------------------------------------

CHANGES: list[dict[str, object]] = [
    {"slot_bytes_min": "64KiB"},
    {"slab_bytes": "4MiB"},
    {"tenants": f"a={os.getuid()}:8MiB"},
    {"tenants": f"default={os.getuid()}:8MiB b=4242:8MiB"},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_an_arena_is_discarded_only_if_that_is_asked_for(change: dict[str, object]) -> None:
    with running_daemon() as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        keys = named(A_SLAB)
        stored(engine, keys)
        old = dict(daemon.settings)
        daemon.kill()
        before = arena_files(daemon)
        daemon.settings.update(change)
        words = refused(daemon)
        assert "--discard-arena" in words
        assert "16MiB" in words, "the settings it was made with"
        assert arena_files(daemon) == before
        daemon.settings = old
        assert changed(daemon, engine)
        assert served(engine, keys) == keys
        assert changed(daemon, engine, discard_arena=True, **change)  # type: ignore[arg-type]
        assert [line for line in daemon.own_lines() if "discard" in line and "warning" in line]
        assert served(engine, keys) == []
        stored(engine, keys)
        # If the flag stays in a unit's file, a restart keeps all that fits its settings.
        assert changed(daemon, engine)
        assert served(engine, keys) == keys


def test_an_arena_of_another_version_is_refused() -> None:
    from kvhearth_server.memory.durable_file import DurableBlob, peek
    from kvhearth_server.memory.segments import open_segment

    with running_daemon() as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        stored(engine, named(A_SLAB))
        daemon.kill()
        assert daemon.arena_dir is not None
        catalogue = daemon.arena_dir / "catalogue"
        segment, data = open_segment(catalogue), peek(catalogue) or b""
        DurableBlob(segment).write(data.replace(b'"journal_version":2', b'"journal_version":9'))
        segment.close()
        assert "--discard-arena" in refused(daemon)

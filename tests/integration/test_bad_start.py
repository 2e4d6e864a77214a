"""Starts that must fail: an exit status, and one line with the problem and its fix.

test_preflight.py has those that the doctor foretells.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cases import cases
from support.daemon import Daemon, running_daemon, stopped_daemon, until
from support.raw_door import PAGE_BYTES, end_well, goes_on

from kvhearth.memory_limits import memory_groups
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.daemon import Starter, tied
from kvhearth_lab.harness.engine import contract_of, engine_of

CONFIG, MEMORY, OTHER = 2, 3, 1


def last_words(daemon: Daemon, status: int) -> str:
    """Returns the one line with which a start fails; its exit status must be ``status``."""
    process = daemon.launch()
    assert process.wait(HUNG_S) == status, daemon.log_tail()
    lines = daemon.log_text().splitlines()
    assert "Traceback" not in daemon.log_text(), daemon.log_tail()
    assert lines[-1].startswith("kvhearth: error: ")
    assert len([line for line in lines if line.startswith("kvhearth:")]) == 1
    return lines[-1]


@contextlib.contextmanager
def failing(
    status: int, *, arena: bool = False, starter: Starter | None = None, **settings: object
) -> Iterator[str]:
    """Starts a daemon with these settings and yields its last words."""
    with stopped_daemon(arena=arena, starter=starter, **settings) as daemon:
        yield last_words(daemon, status)


# -- memory --------------------------------------------------------------------------------------


UNMAPPABLE = "9000000TiB"
"""More memory than an address space could hold the table of slots for."""


@cases(("memory", "arena"), [("64TiB", True), (UNMAPPABLE, False)])
def test_memory_that_does_not_fit(memory: str, arena: bool) -> None:
    with failing(MEMORY, arena=arena, memory=memory, slab_bytes="64MiB") as words:
        assert "memory" in words
        assert "less" in words


def started_in(program: str) -> Starter:
    """Returns a starter of a daemon in a shell that ran ``program`` first."""
    return tied(before=["sh", "-c", f'{program}; exec "$@"', "sh"])


def test_more_memory_than_address_space() -> None:
    starter = started_in(f"ulimit -v {1400 << 10}")
    with failing(MEMORY, starter=starter, memory="1GiB", slab_bytes="64MiB") as words:
        assert "by RLIMIT_AS (ulimit -v" in words


@contextlib.contextmanager
def group_of_version_1(limit_bytes: int) -> Iterator[Path]:
    """Make a control group with a limit of memory, for the time of a test."""
    *_, top = [each for each in memory_groups() if each.files.limit.endswith("in_bytes")] or [None]
    if top is None or not os.access(top.folder, os.W_OK):
        pytest.skip("needs root, and a hierarchy of version 1 for memory")
    folder = Path(tempfile.mkdtemp(prefix="kvhearth-test-", dir=top.folder))
    try:
        (folder / top.files.limit).write_text(str(limit_bytes))
        yield folder
    finally:
        until(lambda: not (folder / "cgroup.procs").read_text(), "the group is empty")
        folder.rmdir()


def test_more_memory_than_a_control_group_of_version_1() -> None:
    with group_of_version_1(400 << 20) as folder:
        starter = started_in(f"echo $$ > {folder}/cgroup.procs")
        with failing(MEMORY, starter=starter, memory="1GiB", slab_bytes="64MiB") as words:
            assert f"by {folder}/memory.limit_in_bytes" in words


# -- settings ------------------------------------------------------------------------------------


def test_bad_settings() -> None:
    """One start; tests/unit/test_config.py has the refusals."""
    with failing(CONFIG, keys_max="many", message_bytes_max=100) as words:
        assert "--keys-max: 'many'" in words
        assert "--message-bytes-max: '100'" in words


def test_settings_at_their_bounds_start() -> None:
    """Valid ones that a conversion further on may not take."""
    forever = "9" * 300
    bounds: dict[str, object] = {
        **{"held_fraction_max": 1e-320, "stock_fraction_max": 1e-320, "pins_max": 65535},
        **{"message_bytes_max": 1 << 30, "sessions_max": 65536, "namespaces_max": 1 << 20},
        **{"attach_timeout_s": forever, "drain_timeout_s": forever, "drain_grace_s": forever},
        **{"switch_interval_s": "0.0000000001", "sum_threads": 64, "http": "localhost:0"},
    }
    with running_daemon(arena=False, **bounds) as daemon:
        assert daemon.terminate() == 0, daemon.log_tail()


# -- other daemons -------------------------------------------------------------------------------


def test_another_daemon_on_the_same_sockets() -> None:
    with running_daemon(arena=False) as first, stopped_daemon(arena=False) as second:
        with engine_of(first.url(), contract_of(PAGE_BYTES)) as engine:
            second.socket_dir = first.socket_dir
            words = last_words(second, OTHER)
            assert "another daemon serves" in words
            assert "--socket-dir" in words
            goes_on(engine)
            assert engine.client.counters()["attaches"] == 1
        end_well(first)


def test_another_daemon_in_the_same_arena() -> None:
    with running_daemon(arena=True) as first, stopped_daemon(arena=False) as second:
        with engine_of(first.url(), contract_of(PAGE_BYTES)) as engine:
            second.arena_dir = first.arena_dir
            words = last_words(second, MEMORY)
            assert "another daemon uses the arena directory" in words
            goes_on(engine)
        end_well(first)


def test_sockets_of_a_daemon_that_was_killed() -> None:
    with running_daemon(arena=False) as daemon:
        daemon.kill()
        assert daemon.exit_code == -signal.SIGKILL
        assert (daemon.socket_dir / "attach.sock").exists()
        assert daemon.start()
        end_well(daemon)
        assert list(daemon.socket_dir.iterdir()) == []


# -- files of an earlier run ---------------------------------------------------------------------


@cases("damage", [b"\0", b"\xff" * 100_000, b"KVHBLOB1" + b"\xff" * 5000, 0, 3_000_001])
def test_a_catalogue_that_is_garbage_or_cut_is_a_cold_start(damage: bytes | int) -> None:
    with running_daemon(arena=True) as daemon:
        end_well(daemon)
        assert daemon.arena_dir is not None
        path = daemon.arena_dir / "catalogue"
        if isinstance(damage, int):
            os.truncate(path, damage)
        else:
            path.write_bytes(damage.ljust(path.stat().st_size, b"\0"))
        for _ in range(2):
            assert daemon.start()
            with engine_of(daemon.url(), contract_of(PAGE_BYTES)) as engine:
                goes_on(engine)
            end_well(daemon)


BAD_ENTRIES = {
    "a broken contract": {"number": 1, "tenant": "default", "epoch": 1, "contract": "{}"},
    "no contract": {"number": 1, "tenant": "default", "epoch": 1},
    "a list": [],
}


@cases("name", BAD_ENTRIES)
def test_a_catalogue_that_lies_is_named(name: str) -> None:
    """Well-formed, but not content that we write: a failed start is better than a wrong one."""
    from kvhearth_server.memory.durable_file import DurableBlob, peek
    from kvhearth_server.memory.segments import open_segment

    with running_daemon(arena=True) as daemon:
        end_well(daemon)
        assert daemon.arena_dir is not None
        catalogue = daemon.arena_dir / "catalogue"
        segment = open_segment(catalogue)
        content = json.loads(peek(catalogue) or b"")
        content["namespaces"] = [BAD_ENTRIES[name]]
        DurableBlob(segment).write(json.dumps(content).encode())
        segment.close()
        words = last_words(daemon, MEMORY)
    assert "catalogue" in words
    assert "remove the files" in words

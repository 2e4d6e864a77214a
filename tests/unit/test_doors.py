"""When doors that cannot be opened again call for a restart."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from support.core_shell import Shell

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.core.slot_table import Geometry
from kvhearth_server.core.state import Limits
from kvhearth_server.doors import OpenDoors, SocketDirectory
from kvhearth_server.engine.engine import RESTART_AFTER_S


def taken() -> KVHearthError:
    return KVHearthError(Reason.SOCKET_UNUSABLE, "another daemon serves it")


def failed(number: int) -> OSError:
    return OSError(number, os.strerror(number))


@pytest.mark.parametrize(
    ("error", "lasts"),
    [
        (partial(failed, errno.ENOSPC), False),
        (taken, False),
        (partial(failed, errno.EACCES), True),
    ],
)
def test_a_restart_is_asked_for_after_a_minute(
    tmp_path: Path, error: Callable[[], Exception], *, lasts: bool
) -> None:
    """Where the cause does not end by itself: the minute begins with the first failure."""
    shell = Shell(Geometry.of([("t", 1 << 21)], 1 << 21, 16384), Limits())
    engine, directory = shell.engine, SocketDirectory(tmp_path / "sockets")
    fails = False

    def make(path: Path) -> None:
        if fails:
            raise error()
        path.write_text("a door")

    directory.claim()
    doors = OpenDoors(engine, directory, {"attach": ("attach.sock", make)})
    asyncio.run(doors.open())
    for _ in range(2):
        (directory.path / "attach.sock").unlink()
        fails = True
        asyncio.run(doors.look())
        shell.now += RESTART_AFTER_S
        assert "attach" in engine.doors_shut
        assert engine.needs_restart == ""
        shell.now += 1
        assert bool(engine.needs_restart) is lasts
        fails = False
        asyncio.run(doors.look())
        assert (engine.doors_shut, engine.needs_restart) == ({}, "")
    directory.leave()

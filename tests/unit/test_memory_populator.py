"""The arena gets its memory while the daemon serves, and does without what there is not."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.memory_places import mounted, tmpfs_directory

from kvhearth.errors import KVHearthError, Reason
from kvhearth.memory_limits import MemoryLimit
from kvhearth.model import EXTENT_DTYPE
from kvhearth_server.core.slot_table import Geometry
from kvhearth_server.core.state import Limits
from kvhearth_server.engine.engine import Engine, EngineLimits
from kvhearth_server.memory import populator as module
from kvhearth_server.memory.arena import Arena, open_arena
from kvhearth_server.memory.mapping import HugepagePolicy, KernelMemory
from kvhearth_server.memory.numa import KernelTopology
from kvhearth_server.memory.plan import ArenaPlan
from kvhearth_server.memory.segments import create_segment
from kvhearth_server.observability.counters import Counters
from kvhearth_server.observability.metrics import COUNTERS

MIB = 1 << 20
OFF = HugepagePolicy.OFF
GEOMETRY = Geometry.of([("a", 6 * MIB), ("b", 2 * MIB)], MIB, 4096)
ROWS_BYTES = 100_000
"""At the start: the rows of two slabs, and no slab."""


class Nodes(KernelTopology):
    """Two nodes; where a page lies is decided by the plan."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes = (0, 1)
        self.ran: list[int] = []

    def run_on(self, node: int) -> None:
        self.ran.append(node)

    def prefer(self, address: int, size_bytes: int, node: int) -> None:
        raise OSError(errno.EPERM, "no such node")

    def node_of(self, address: int) -> int:
        raise OSError(errno.EPERM, "no such node")


class Told(list[tuple[str, list[int]]]):
    """What a populator tells."""

    def run(self, arena: Arena, node: int = 0, stopped: bool = False) -> None:
        """Runs it for a node."""
        event = threading.Event()
        if stopped:
            event.set()
        arena.populator.run(
            node,
            event,
            lambda slabs: self.append(("rows", slabs)),
            lambda slabs: self.append(("none", slabs)),
        )


@pytest.fixture(autouse=True)
def little_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_AT_START_BYTES", ROWS_BYTES)


@pytest.fixture
def folder() -> Iterator[Path]:
    with tmpfs_directory() as found:
        yield found


def taken(arena: Arena) -> list[int]:
    """Bytes that the segments have taken."""
    return [os.fstat(segment.fd).st_blocks * 512 for segment in arena.segments]


def test_nothing_is_taken_before_the_daemon_serves_and_all_of_it_then(folder: Path) -> None:
    arena, told = open_arena(ArenaPlan(GEOMETRY, folder / "arena", OFF)), Told()
    populator = arena.populator
    assert taken(arena) == [0, 0]
    assert populator.without_rows == set(range(2, 8))
    assert populator.unpopulated(0) == [0, 6 * MIB]
    told.run(arena, stopped=True)
    assert (told, taken(arena)) == ([], [0, 0])
    told.run(arena)
    assert told == [("rows", [2, 3]), ("rows", [4, 5]), ("rows", [6, 7])]
    assert taken(arena) == [6 * MIB, 2 * MIB]
    assert populator.populated.all()
    assert (populator.unpopulated(0), populator.unpopulated(1)) == ([], [])
    assert (populator.populated_in(1), populator.given_up) == (2 * MIB, {})
    arena.close()


def test_the_largest_machine_s_arena_is_open_with_next_to_nothing_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KernelMemory, "limits", lambda _: [])
    geometry = Geometry.of([("a", 1 << 40)], 64 * MIB, 16384)
    with mounted("tmpfs", "size=1100g", tmp_path / "large") as large:
        arena = open_arena(ArenaPlan(geometry, large / "arena", OFF))
        Engine(arena, Limits(), EngineLimits(1 << 22, 1.0, 1.0), Counters(COUNTERS))
        found = os.statvfs(large)
        assert (found.f_blocks - found.f_bfree) * found.f_frsize < 64 * MIB
        arena.close()


def test_a_thread_of_each_node_takes_its_part(folder: Path) -> None:
    nodes, told = Nodes(), Told()
    arena = open_arena(ArenaPlan(GEOMETRY, folder / "arena", OFF), nodes)
    assert arena.populator.nodes == [0, 1]
    told.run(arena, 1)
    assert nodes.ran == [1]
    assert told == [("rows", [3, 4]), ("rows", [5]), ("rows", [7])]
    assert arena.populator.unpopulated(0) == [0, 3 * MIB]
    assert arena.populator.unpopulated(1) == [0, MIB]
    arena.close()


def test_what_the_machine_has_not_is_given_up_and_told(tmp_path: Path) -> None:
    with mounted("tmpfs", f"size={48 * MIB}", tmp_path / "small") as small:
        arena, told = open_arena(ArenaPlan(GEOMETRY, small / "arena", OFF)), Told()
        fill(small / "others", leave=4 * MIB)
        told.run(arena)
        lost = np.flatnonzero(~arena.populator.populated).tolist()
        assert told[-1] == ("none", lost)
        assert lost[-1] == 7
        assert lost == list(range(lost[0], 8))
        assert 2 <= lost[0] <= 4
        (reason,) = arena.populator.given_up.values()
        assert f"{len(lost)}MiB of memory cannot be had" in reason
        assert "the size of the tmpfs" in reason
        arena.populator.touch(extents(0))
        fill(small / "rest", leave=0)
        with pytest.raises(KVHearthError) as refused:
            arena.populator.touch(extents(0, 7))
        assert refused.value.reason is Reason.MEMORY_UNAVAILABLE
        arena.write_catalogue(arena.catalogue_head({}), [])
        arena.close()
        again = open_arena(ArenaPlan(GEOMETRY, small / "arena", OFF))
        assert again.catalogue is not None
        (small / "others").unlink()
        told.run(again)
        assert again.populator.populated.all()
        again.close()


def fill(path: Path, leave: int) -> None:
    """Takes the room of a file system."""
    found = os.statvfs(path.parent)
    size = found.f_bavail * found.f_frsize - leave
    with path.open("wb") as file:
        if size:
            os.posix_fallocate(file.fileno(), 0, size)


def extents(*slabs: int) -> np.ndarray:
    """An extent at the begin of each slab."""
    found = np.zeros(len(slabs), EXTENT_DTYPE)
    found["slot"] = np.array(slabs) * GEOMETRY.stride
    found["segment"] = np.array(slabs) >= 6
    found["offset"] = np.array([slab - 6 if slab >= 6 else slab for slab in slabs]) * MIB
    found["length"] = 4096
    return found


def test_pages_that_are_there_need_no_memory(folder: Path) -> None:
    class Full(KernelMemory):
        free_bytes = 4 * MIB

        def page_limits(self) -> list[MemoryLimit]:
            return [MemoryLimit("the test", 4 * MIB, self.free_bytes)]

    kernel = Full()
    segment = create_segment(2 * MIB, OFF, path=folder / "segment", populated=False, kernel=kernel)
    segment.populate(0, MIB)
    kernel.free_bytes = 0
    assert segment.source.limits(0, MIB) == []
    limit, *_ = segment.source.limits(0, 2 * MIB)
    assert limit.free_bytes < 0
    segment.close()

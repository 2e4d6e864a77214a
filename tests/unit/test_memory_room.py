"""The memory that an arena needs, computed once for errors, ``doctor`` and the files themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cases import cases
from support.memory_places import tmpfs_directory

from kvhearth.errors import KVHearthError, Reason
from kvhearth_server.core.slot_table import Geometry
from kvhearth_server.memory.arena import open_arena
from kvhearth_server.memory.mapping import (
    GIB,
    MIB,
    Filesystem,
    FilesystemKind,
    HugepagePolicy,
    KernelMemory,
    filesystem_kind,
)
from kvhearth_server.memory.plan import ArenaPlan, Step, check_room, room_of

POOL = "sys/kernel/mm/hugepages/hugepages-2048kB"
GEOMETRY = Geometry.of([("a", 16 * MIB), ("b", 8 * MIB)], 2 * MIB, 16 << 10)
PREFER, REQUIRE, OFF = HugepagePolicy.PREFER, HugepagePolicy.REQUIRE, HugepagePolicy.OFF


def machine(root: Path, *, pages: int, available_mib: int) -> KernelMemory:
    """A kernel that reports these free pages and this available memory."""
    for name, text in {
        "proc/meminfo": f"MemAvailable: {available_mib * 1024} kB\nHugepagesize: 2048 kB\n",
        f"{POOL}/nr_hugepages": str(pages),
        f"{POOL}/free_hugepages": str(pages),
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return KernelMemory(root)


@cases("page_bytes", [2 * MIB, GIB])
def test_files_are_whole_pages(page_bytes: int) -> None:
    geometry = Geometry.of([("a", 8 * GIB)], 64 * MIB, 16 << 10)
    room = room_of(geometry, Filesystem(FilesystemKind.HUGETLBFS, page_bytes, 0, 0))
    assert [part % page_bytes for part in (room.segments, room.journal, room.catalogue)] == [0] * 3
    assert room.segments == 8 * GIB
    assert room.journal > 0
    assert room.catalogue > 24 * MIB


def test_what_is_counted_is_what_is_made() -> None:
    with tmpfs_directory() as folder:
        wanted = room_of(GEOMETRY, filesystem_kind(folder))
        arena = open_arena(ArenaPlan(GEOMETRY, folder, OFF))
        try:
            made = sum(path.stat().st_size for path in folder.iterdir())
            assert made == wanted.bytes
        finally:
            arena.close()


def test_an_anonymous_arena_takes_its_segments_only(tmp_path: Path) -> None:
    assert room_of(GEOMETRY, None).bytes == 24 * MIB
    exact = machine(tmp_path, pages=12, available_mib=0)
    plan = ArenaPlan(GEOMETRY, None, REQUIRE)
    assert check_room(plan, exact).step is Step.COLD
    short = machine(tmp_path, pages=11, available_mib=1000)
    with pytest.raises(KVHearthError, match=r"run: sysctl -w vm\.nr_hugepages=12") as caught:
        check_room(plan, short)
    assert caught.value.reason is Reason.HUGEPAGES_UNAVAILABLE


def test_segments_that_get_no_pages_need_memory(tmp_path: Path) -> None:
    """The first tenant's segment takes the huge pages, the second one's consists of small pages."""
    plan = ArenaPlan(GEOMETRY, None, PREFER)
    check_room(plan, machine(tmp_path, pages=8, available_mib=8))
    with pytest.raises(KVHearthError, match="8MiB of memory are asked for, 7MiB are available"):
        check_room(plan, machine(tmp_path, pages=8, available_mib=7))


def test_an_unfinished_run_makes_room(tmp_path: Path) -> None:
    """Unfinished files of a killed daemon are deleted, so their room counts as free."""
    with tmpfs_directory() as folder:
        needed = -(-room_of(GEOMETRY, filesystem_kind(folder)).bytes // MIB)
        plan = ArenaPlan(GEOMETRY, folder, OFF)
        kernel = machine(tmp_path, pages=0, available_mib=needed - 8)
        with pytest.raises(KVHearthError):
            check_room(plan, kernel)
        (folder / "segment-0.new").write_bytes(bytes(8 * MIB))
        check_room(plan, kernel)

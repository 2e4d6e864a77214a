"""Segments: the pages they get, their refusals, and the processes that still map them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.daemon import until
from support.memory_places import Child, mounted, need_hugepages, tmpfs_directory

from kvhearth.errors import KVHearthError, Reason
from kvhearth.memory_limits import MemoryLimit
from kvhearth_lab.harness import HUNG_S
from kvhearth_server.memory.mapping import (
    HugepagePolicy,
    KernelMemory,
    PageKind,
    Segment,
    map_file,
)
from kvhearth_server.memory.segments import create_segment, open_segment

MIB = 1 << 20
SIZE = 4 * MIB
OFF, PREFER, REQUIRE = HugepagePolicy.OFF, HugepagePolicy.PREFER, HugepagePolicy.REQUIRE
THP = "sys/kernel/mm/transparent_hugepage/shmem_enabled"

CREATOR = """
from pathlib import Path
from kvhearth_server.memory.mapping import HugepagePolicy
from kvhearth_server.memory.segments import create_segment
path = Path(arguments[0]) if arguments[0] else None
made = create_segment(4 << 20, HugepagePolicy(arguments[1]), path=path)
made.view[:] = 7
made.view[-1] = 9
socket.send_fds(peer, [b"made"], [made.reopen()])
peer.recv(1)
"""

# Maps the descriptors it receives, closes them, forks on request, and waits to be killed.
CLIENT = """
import mmap, os
fd = socket.recv_fds(peer, 4, 1)[1][0]
mapping = mmap.mmap(fd, 4 << 20, trackfd=False) if sys.version_info >= (3, 13) else None
if mapping is None:
    import ctypes
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    assert libc.mmap(None, 4 << 20, 3, mmap.MAP_SHARED, fd, 0) != 2**64 - 1
os.close(os.dup(fd))
os.close(fd)
if arguments[0] == "fork" and os.fork() == 0:
    peer.sendall(b"forked")
    peer.recv(1)
    os._exit(0)
peer.sendall(b"mapped")
peer.recv(1)
"""


@pytest.fixture(params=["memfd", "memfd-huge", "tmpfs", "hugetlbfs"])
def where(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[Path | None, HugepagePolicy]]:
    """A place for a segment of each kind, with its page policy."""
    kind: str = request.param
    with contextlib.ExitStack() as stack:
        if kind in ("memfd-huge", "hugetlbfs"):
            need_hugepages(4)
        if kind == "tmpfs":
            yield stack.enter_context(tmpfs_directory()) / "segment", OFF
        elif kind == "hugetlbfs":
            mount = stack.enter_context(mounted("hugetlbfs", "pagesize=2M", tmp_path / "huge"))
            yield mount / "segment", REQUIRE
        else:
            yield None, OFF if kind == "memfd" else REQUIRE


@contextlib.contextmanager
def made(
    size: int, policy: HugepagePolicy, path: Path | None = None, kernel: KernelMemory | None = None
) -> Iterator[Segment]:
    segment = create_segment(size, policy, path=path, kernel=kernel)
    try:
        yield segment
    finally:
        segment.close()


class ScriptedKernel(KernelMemory):
    """The real kernel, except for the facts that a test sets."""

    def __init__(self, root: Path, available_bytes: int | None = None, thp: str = "never") -> None:
        super().__init__(root)
        (root / THP).parent.mkdir(parents=True, exist_ok=True)
        (root / THP).write_text(f"[{thp}]")
        self._given_bytes = available_bytes

    def limits(self) -> list[MemoryLimit]:
        given = self._given_bytes
        return [] if given is None else [MemoryLimit("the test", given, given)]


def test_it_is_zeroed_populated_and_shared(where: tuple[Path | None, HugepagePolicy]) -> None:
    path, policy = where
    segment = create_segment(SIZE, policy, path=path)
    assert (segment.bytes, segment.path) == (SIZE, path)
    assert segment.view.shape == (SIZE,)
    assert segment.view.ctypes.data == segment.address
    assert not segment.view.any()
    assert segment.steps_down == []
    assert segment.page_kind is (PageKind.BASE if policy is OFF else PageKind.HUGE_2M)
    assert segment.bytes % segment.page_bytes == 0
    assert os.fstat(segment.fd).st_blocks * 512 >= SIZE
    assert not os.get_inheritable(segment.fd)
    segment.view[:] = 3
    again = segment.reopen()
    assert os.fstat(again).st_ino == os.fstat(segment.fd).st_ino
    os.close(again)
    inode = f" {os.fstat(segment.fd).st_ino} "
    assert inode in Path("/proc/self/maps").read_text()
    segment.close()
    segment.close()
    assert segment.view.size == 0
    del segment
    assert inode not in Path("/proc/self/maps").read_text(), "its pages do not go back"


def test_reopened_is_another_description(where: tuple[Path | None, HugepagePolicy]) -> None:
    with made(SIZE, where[1], where[0]) as segment:
        other = segment.reopen()
        os.lseek(other, 1, os.SEEK_SET)
        assert os.lseek(segment.fd, 0, os.SEEK_CUR) == 0
        assert fcntl.fcntl(other, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR
        os.close(other)


def test_bytes_outlive_a_killed_creator(where: tuple[Path | None, HugepagePolicy]) -> None:
    path, policy = where
    with Child(CREATOR, str(path or ""), policy) as child:
        _, (descriptor,), _, _ = socket.recv_fds(child.socket, 4, 1)
        child.kill()
        with mmap.mmap(descriptor, SIZE) as mapping:
            assert (mapping[0], mapping[SIZE // 2], mapping[SIZE - 1]) == (7, 7, 9)
        os.close(descriptor)
    if path is not None:
        adopted = open_segment(path, policy)
        assert adopted.bytes == SIZE
        assert (adopted.view[:-1] == 7).all()
        assert adopted.view[-1] == 9
        assert (adopted.page_kind is PageKind.HUGE_2M) == (policy is REQUIRE)
        adopted.close()


def test_client_lock_lasts_as_long_as_a_mapping(
    where: tuple[Path | None, HugepagePolicy],
) -> None:
    with made(SIZE, where[1], where[0]) as segment, Child(CLIENT, "alone") as child:
        assert not segment.client_byte_held(5)
        descriptor = segment.lock_client_byte(5)
        assert segment.client_byte_held(5)
        with pytest.raises(KVHearthError, match="client byte 5") as caught:
            segment.lock_client_byte(5)
        assert caught.value.reason is Reason.ARENA_BUSY
        socket.send_fds(child.socket, [b"take"], [descriptor])
        os.close(descriptor)
        child.expect(b"mapped")  # and has closed the descriptor and a copy of it
        assert segment.client_byte_held(5)
        assert not segment.client_byte_held(4)
        assert not segment.client_byte_held(6)
        child.kill()
        until(lambda: not segment.client_byte_held(5), "byte 5 comes free")
        os.close(segment.lock_client_byte(5))
        assert not segment.client_byte_held(5)


def test_client_lock_outlives_the_client_in_a_forked_child(
    where: tuple[Path | None, HugepagePolicy],
) -> None:
    with made(SIZE, where[1], where[0]) as segment, Child(CLIENT, "fork") as child:
        descriptor = segment.lock_client_byte(0)
        socket.send_fds(child.socket, [b"take"], [descriptor])
        os.close(descriptor)
        child.socket.recv(12, socket.MSG_WAITALL)
        child.process.kill()
        child.process.wait(HUNG_S)
        assert segment.client_byte_held(0)
        child.socket.close()  # the forked child reads end-of-file and exits
        until(lambda: not segment.client_byte_held(0), "byte 0 comes free")


def test_an_adopter_sees_the_locks_of_the_daemon_before() -> None:
    with tmpfs_directory() as path, Child(CREATOR, str(path / "segment"), "off") as child:
        _, (descriptor,), _, _ = socket.recv_fds(child.socket, 4, 1)
        os.close(descriptor)
        child.kill()
        first = open_segment(path / "segment", OFF)
        held = first.lock_client_byte(3)
        first.close()
        second = open_segment(path / "segment", OFF)
        assert second.client_byte_held(3)
        os.close(held)
        assert not second.client_byte_held(3)
        second.close()


def test_a_memfd_cannot_be_cut_off_by_a_client() -> None:
    with made(SIZE, OFF) as segment:
        other = segment.reopen()
        with pytest.raises(PermissionError):
            os.ftruncate(other, 0)
        os.close(other)


def test_a_view_that_is_kept_stays_readable_after_close() -> None:
    segment = create_segment(SIZE, OFF)
    kept = segment.view[:10]
    segment.close()
    assert not kept.any()


@pytest.fixture
def no_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pools of huge pages are empty."""
    create = os.memfd_create

    def refuse(name: str, flags: int) -> int:
        if flags & os.MFD_HUGETLB:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", refuse)


def test_prefer_steps_down_with_the_fixes_in_words(tmp_path: Path, no_huge_pages: None) -> None:
    with made(SIZE, PREFER, kernel=ScriptedKernel(tmp_path, thp="never")) as segment:
        assert segment.page_kind is PageKind.BASE
        assert len(segment.steps_down) == 2
        assert "nr_hugepages" in segment.steps_down[0]
        assert "echo advise" in segment.steps_down[1]
    kernel = ScriptedKernel(tmp_path, available_bytes=MIB)
    with pytest.raises(KVHearthError, match="memory_unavailable") as caught:
        create_segment(SIZE, PREFER, kernel=kernel)
    assert "nr_hugepages" in caught.value.message


def test_require_names_pages_and_fix(no_huge_pages: None) -> None:
    with pytest.raises(KVHearthError) as caught:
        create_segment(SIZE, REQUIRE)
    error = caught.value
    assert error.reason is Reason.HUGEPAGES_UNAVAILABLE
    assert error.details["needed_pages"] == "2"
    assert "nr_hugepages" in error.message


def test_a_gibibyte_tries_the_largest_pages_first() -> None:
    pool = KernelMemory().pool(1 << 30)
    if pool.free == 0:
        need_hugepages(512)
    with made(1 << 30, REQUIRE) as segment:
        if pool.free:
            assert segment.page_kind is PageKind.HUGE_1G
        else:
            assert segment.page_kind is PageKind.HUGE_2M
            assert len(segment.steps_down) == 1
            assert "hugepagesz=1G" in segment.steps_down[0]


@pytest.mark.parametrize("policy", [OFF, PREFER])
def test_more_than_the_available_memory_is_refused(tmp_path: Path, policy: HugepagePolicy) -> None:
    size = 1 << 46  # 64 TiB
    with pytest.raises(KVHearthError, match="64TiB") as caught:
        create_segment(size, policy)
    assert caught.value.reason is Reason.MEMORY_UNAVAILABLE
    assert caught.value.details["needed_bytes"] == str(size)
    with tmpfs_directory() as path:
        with pytest.raises(KVHearthError) as caught:
            create_segment(size, policy, path=path / "segment")
        assert caught.value.reason is Reason.MEMORY_UNAVAILABLE
        assert list(path.iterdir()) == []
        kernel = ScriptedKernel(tmp_path, available_bytes=SIZE - 1)
        with pytest.raises(KVHearthError, match="4MiB of memory are asked for, 3MiB"):
            create_segment(SIZE, policy, path=path / "segment", kernel=kernel)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_small_tmpfs_is_refused_with_what_is_free(tmp_path: Path, hidden: bool) -> None:
    """``hidden``: another writer takes the room between the check and the allocation."""
    with mounted("tmpfs", "size=6M", tmp_path / "small") as path:

        class Racing(KernelMemory):
            def limits(self) -> list[MemoryLimit]:
                if hidden and not (path / "other").exists():
                    (path / "other").write_bytes(bytes(4 * MIB))
                return super().limits()

        size = SIZE if hidden else 8 * MIB
        with pytest.raises(KVHearthError, match=f"the size of the tmpfs of {path}") as caught:
            create_segment(size, OFF, path=path / "segment", kernel=Racing())
        assert caught.value.reason is Reason.MEMORY_UNAVAILABLE
        assert ("of which others have 4MiB; free those" in caught.value.message) is hidden
        assert not (path / "segment").exists()
        assert not (path / "segment.new").exists()


def test_transparent_huge_pages_where_a_tmpfs_allows_them(tmp_path: Path) -> None:
    with mounted("tmpfs", "size=64M,huge=advise", tmp_path / "thp") as path:
        if KernelMemory().shmem_thp() == "deny":
            pytest.skip("shmem_enabled is 'deny'")
        with made(16 * MIB, PREFER, path / "segment") as segment:
            assert "on tmpfs" in segment.steps_down[0]
            if segment.page_kind is PageKind.THP:
                assert segment.page_bytes == KernelMemory().thp_bytes()
                assert len(segment.steps_down) == 1 + (segment.huge_bytes < segment.bytes)
            else:
                assert "in huge pages" in segment.steps_down[1]
        with pytest.raises(KVHearthError, match="on tmpfs") as caught:
            create_segment(SIZE, REQUIRE, path=path / "other")
        assert caught.value.reason is Reason.HUGEPAGES_UNAVAILABLE


def test_a_full_hugetlbfs_is_refused(tmp_path: Path) -> None:
    need_hugepages(4)
    with mounted("hugetlbfs", "pagesize=2M,size=2M", tmp_path / "huge") as path:
        with pytest.raises(KVHearthError, match="limits of the mount") as caught:
            create_segment(SIZE, PREFER, path=path / "segment")
        assert caught.value.reason is Reason.HUGEPAGES_UNAVAILABLE
        assert list(path.iterdir()) == []
        with pytest.raises(KVHearthError, match="huge pages are off"):
            create_segment(2 * MIB, OFF, path=path / "segment")
        with pytest.raises(KVHearthError, match="multiple of 2MiB"):
            create_segment(3 * MIB, PREFER, path=path / "segment")


@pytest.mark.parametrize(
    ("size", "policy"), [(0, OFF), (-4096, OFF), (4097, OFF), (4096, PREFER), (MIB, REQUIRE)]
)
def test_partial_pages_are_refused(size: int, policy: HugepagePolicy) -> None:
    with pytest.raises(KVHearthError, match="give a multiple of") as caught:
        create_segment(size, policy)
    assert caught.value.reason is Reason.ARENA_UNUSABLE


def test_files_are_neither_overwritten_nor_followed() -> None:
    with tmpfs_directory() as path:
        (path / "taken").write_bytes(b"precious")
        with pytest.raises(KVHearthError, match="exists already"):
            create_segment(SIZE, OFF, path=path / "taken")
        assert (path / "taken").read_bytes() == b"precious"
        (path / "link").symlink_to(path / "taken")
        for name in ("link", "absent", "absent/deep"):
            with pytest.raises(KVHearthError) as caught:
                open_segment(path / name)
            assert caught.value.reason is Reason.ARENA_UNUSABLE
        (path / "empty").touch()
        os.mkfifo(path / "pipe")
        for name in ("empty", "pipe"):
            with pytest.raises(KVHearthError, match="no segment"):
                open_segment(path / name)


def test_what_a_killed_creator_left_is_no_obstacle() -> None:
    with tmpfs_directory() as path:
        (path / "segment.new").write_bytes(b"half made")
        with made(SIZE, OFF, path / "segment") as segment:
            assert not segment.view.any()
        assert [entry.name for entry in path.iterdir()] == ["segment"]


def test_holes_of_an_adopted_file_are_filled(tmp_path: Path) -> None:
    with tmpfs_directory() as path:
        file = path / "segment"
        file.write_bytes(b"start")
        os.truncate(file, SIZE)
        kernel = ScriptedKernel(tmp_path, available_bytes=MIB)
        with pytest.raises(KVHearthError, match="memory_unavailable"):
            open_segment(file, kernel=kernel)
        segment = open_segment(file)
        assert bytes(segment.view[:6]) == b"start\0"
        assert os.fstat(segment.fd).st_blocks * 512 == SIZE
        np.testing.assert_array_equal(segment.view[5:], 0)
        assert len(segment.steps_down) >= 1
        segment.close()


def test_a_disk_is_no_place_for_an_arena() -> None:
    with pytest.raises(KVHearthError, match="neither on hugetlbfs nor on tmpfs") as caught:
        create_segment(SIZE, OFF, path=Path("/proc/segment"))
    assert caught.value.reason is Reason.ARENA_UNUSABLE


def test_a_core_dump_leaves_the_arena_out() -> None:
    descriptor = os.memfd_create("kvh-dump")
    os.ftruncate(descriptor, 1 << 20)
    mapping = map_file(descriptor, 1 << 20)
    start = f"{mapping.address:x}-"
    after = Path("/proc/self/smaps").read_text().partition(f"\n{start}")[2]
    flags = re.search(r"^VmFlags: (.*)$", after, re.MULTILINE)
    assert flags is not None
    assert "dd" in flags[1].split()
    os.close(descriptor)

"""Background prefault: no page faults afterwards, unchanged contents, and a clean end."""

from __future__ import annotations

import ctypes
import mmap
import resource
import threading
from pathlib import Path

import numpy as np
import pytest
from support.attached import attached
from support.daemon import until
from support.threads import left_since, own_threads

from kvhearth import prefault as populate
from kvhearth.page_layout import PagedKV
from kvhearth.prefault import Populate, Span

PAGE = mmap.PAGESIZE
PAGES = 9000
"""More pages than two pieces have."""


def memory(pages: int = PAGES) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Anonymous memory without populated pages."""
    return np.frombuffer(mmap.mmap(-1, pages * PAGE), np.uint8)


def span(area: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Span:
    return Span(int(area.ctypes.data), area.nbytes, PAGE)


def faults_of_writing(area: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    area[::PAGE] = 1
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before


needs_populate = pytest.mark.skipif(
    ctypes.CDLL(None).madvise(ctypes.c_void_p(0), 0, 23) != 0, reason="needs Linux 5.14"
)


@needs_populate
def test_what_was_touched_faults_no_more() -> None:
    area, other = memory(), memory()
    work = Populate([span(area)], [area])
    assert work.wait(20)
    assert work.done_bytes == area.nbytes
    assert faults_of_writing(area) < 100
    assert faults_of_writing(other) > 100
    assert work.close()


@needs_populate
def test_contents_stay() -> None:
    area = memory(64)
    area[:] = np.arange(area.nbytes, dtype=np.uint64).astype(np.uint8)
    before = area.copy()
    assert Populate([Span(int(area.ctypes.data) + 5, area.nbytes - 9, PAGE)], [area]).wait(20)
    assert np.array_equal(area, before)


@needs_populate
def test_it_ends_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, held = threading.Event(), threading.Event()
    real = populate.advise

    def slow(*arguments: int) -> int:
        reached.set()
        assert held.wait(20)
        return int(real(*arguments))

    monkeypatch.setattr(populate, "advise", slow)
    area = memory()
    work = Populate([span(area)], [area])
    assert reached.wait(20)
    assert not work.close(0.01)
    held.set()
    assert work.close(20)
    assert work.done_bytes == populate._PIECE_PAGES * PAGE < area.nbytes


def test_memory_that_is_not_there_is_no_error() -> None:
    work = Populate([Span(1 << 20, 1 << 20, PAGE)], [])
    assert work.wait(20)
    assert work.done_bytes == 0


@needs_populate
def test_scarce_memory_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 1060000 kB\n")
    monkeypatch.setattr(populate, "_ROOT", tmp_path)
    area = memory()

    def taken_bytes() -> int:
        work = Populate([span(area)], [area], allocates=True)
        assert work.wait(20)
        return work.done_bytes

    assert taken_bytes() == 0
    write("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 8000000 kB\n")
    write("proc/self/cgroup", "4:memory:/\n")
    write("proc/self/mountinfo", "35 31 0:32 / /sys/fs/cgroup rw - cgroup cgroup rw,memory\n")
    write("sys/fs/cgroup/memory.limit_in_bytes", f"{4 << 30}")
    write("sys/fs/cgroup/memory.usage_in_bytes", f"{3 << 30}")
    assert taken_bytes() == 0
    write("sys/fs/cgroup/memory.limit_in_bytes", "9223372036854771712")
    write("sys/devices/system/node/online", "0-1\n")
    assert taken_bytes() == 0
    write("sys/devices/system/node/online", "0\n")
    assert taken_bytes() == area.nbytes


def test_spans_of_pages_cover_them_once() -> None:
    whole = np.zeros((3, 8, 4, PAGE), np.uint8)
    apart = PagedKV([whole[0], whole[2]])
    inside = PagedKV([whole[0, :, 0], whole[0, :, 2]])
    base = int(whole.ctypes.data)
    assert [(one.address - base, one.size_bytes) for one in apart.host_spans()] == [
        (0, 32 * PAGE),
        (64 * PAGE, 32 * PAGE),
    ]
    assert [(one.address - base, one.size_bytes) for one in inside.host_spans()] == [(0, 31 * PAGE)]


def test_an_attached_client_leaves_no_thread(tmp_path: Path) -> None:
    others = own_threads()
    with attached(tmp_path) as (_, client):
        assert client.arena is not None
        until(lambda: client.arena._populate.wait(0))  # type: ignore[union-attr]
    assert left_since(others) == []

"""Memory without pages: filled in the background, or as another process populates it."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.arena_fake import FakeArena
from support.attached import attached
from support.cases import cases
from support.daemon import until
from support.memory_places import mounted

from kvhearth import prefault
from kvhearth.codec import encoding_of
from kvhearth.copiers import BlockFailure
from kvhearth.copiers.host import HostCopier
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import EXTENT_DTYPE, U8, Records
from kvhearth.page_layout import PagedKV
from kvhearth.prefault import Populate, Span, Unpopulated
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.session.arena import ArenaMapping
from kvhearth.wire.frames import DONE
from kvhearth.wire.handshake import SegmentInfo, Welcome
from kvhearth.wire.remote import Outcome
from kvhearth_lab.harness import HUNG_S
from kvhearth_server.gateway.calls import CallsConnection
from kvhearth_server.gateway.data import DataConnection
from kvhearth_server.gateway.grants import Grants, extents_of

PAGE = mmap.PAGESIZE
SLOTS = 64


class Kernel:
    """``advise`` that records what it is asked, and has no memory for some pages."""

    def __init__(self, *errors: int, lacks: range = range(0)) -> None:
        self.asked: list[tuple[int, int]] = []
        self._errors = list(errors)
        self._lacks = lacks

    def __call__(self, address: int, size_bytes: int, advice: int) -> int:
        self.asked.append((address, size_bytes))
        if self._errors:
            return self._errors.pop(0)
        none = any(address <= each < address + size_bytes for each in self._lacks)
        return errno.EFAULT if none else 0


# -- in the background --------------------------------------------------------------------------

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
    assert work.wait(HUNG_S)
    assert work.done_bytes == area.nbytes
    assert faults_of_writing(area) < 100
    assert faults_of_writing(other) > 100
    assert work.close()


@needs_populate
def test_contents_stay() -> None:
    area = memory(64)
    area[:] = np.arange(area.nbytes, dtype=np.uint64).astype(np.uint8)
    before = area.copy()
    assert Populate([Span(int(area.ctypes.data) + 5, area.nbytes - 9, PAGE)], [area]).wait(HUNG_S)
    assert np.array_equal(area, before)


@needs_populate
def test_it_ends_when_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    reached, held = threading.Event(), threading.Event()
    real = prefault.advise

    def slow(*arguments: int) -> int:
        reached.set()
        assert held.wait(HUNG_S)
        return int(real(*arguments))

    monkeypatch.setattr(prefault, "advise", slow)
    area = memory()
    work = Populate([span(area)], [area])
    assert reached.wait(HUNG_S)
    assert not work.close(0.01)
    held.set()
    assert work.close(20)
    assert work.done_bytes == prefault._PIECE_PAGES * PAGE < area.nbytes


def test_memory_that_is_not_there_is_no_error() -> None:
    work = Populate([Span(1 << 20, 1 << 20, PAGE)], [])
    assert work.wait(HUNG_S)
    assert work.done_bytes == 0


@needs_populate
def test_scarce_memory_is_not_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def write(name: str, text: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)

    write("proc/meminfo", "MemTotal: 8388608 kB\nMemAvailable: 1060000 kB\n")
    monkeypatch.setattr(prefault, "_ROOT", tmp_path)
    area = memory()

    def taken_bytes() -> int:
        work = Populate([span(area)], [area], allocates=True)
        assert work.wait(HUNG_S)
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
    with attached(tmp_path) as (_, client):
        assert client.arena is not None
        assert client.arena._populate.wait(HUNG_S)


# -- ranges ----------------------------------------------------------------------------------------


@given(
    st.lists(st.sets(st.integers(0, 40), max_size=8), min_size=2, max_size=2),
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 20)), max_size=20),
)
def test_runs_of_memory_touch_ranges_of_any_span(
    cuts: list[set[int]], runs: list[tuple[int, int]]
) -> None:
    found, without_pages = Unpopulated(), set[int]()
    for start, its in zip((50, 5), cuts, strict=True):
        bounds = sorted(its)[: len(its) // 2 * 2]
        found.report(Span(start, 41, 1), bounds)
        for low, high in zip(bounds[::2], bounds[1::2], strict=True):
            without_pages |= set(range(start + low, start + high))
    addresses, sizes = np.array(runs, np.int64).reshape(-1, 2).T
    assert found.touched_by(addresses, sizes).tolist() == [
        not without_pages.isdisjoint(range(low, low + size)) for low, size in runs
    ]
    assert (found.bounds is None) == (not without_pages)


def reported(kernel: Kernel, *bounds: int, page_bytes: int = 100) -> Unpopulated:
    found = Unpopulated(kernel)
    found.report(Span(1000, 1000, page_bytes), bounds)
    return found


def test_neighbours_are_populated_by_one_call_in_whole_pages() -> None:
    kernel = Kernel()
    found = reported(kernel, 100, 900)
    blocks = np.array([1750, 1000, 1130, 1210, 1500, 1910])
    assert not found.populate(blocks, 40).any()
    assert kernel.asked == [(1100, 200), (1500, 100), (1700, 100)]
    kernel.asked.clear()
    assert not found.populate(np.array([1000, 1900]), np.array([100, 100])).any()
    assert kernel.asked == []


def test_a_block_without_memory_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    found = reported(Kernel(lacks=range(1300, 1400)), 0, 1000)
    assert found.populate(np.array([1400, 1200, 1300, 1800]), 100).tolist() == [0, 0, 1, 0]
    assert caplog.text.count("arena.no_memory") == 1


def test_an_interrupted_call_is_made_again_and_an_old_kernel_is_not_asked_for_more() -> None:
    kernel = Kernel(errno.EINTR, errno.EINTR)
    assert not reported(kernel, 0, 1000).populate(np.array([1000]), 100).any()
    assert len(kernel.asked) == 3
    assert not reported(Kernel(errno.EINVAL), 0, 1000).populate(np.array([1000]), 100).any()


# -- stores ----------------------------------------------------------------------------------------


class Mapped:
    """A segment of ``SLOTS`` pages, mapped as a client does; nothing of it is there."""

    def __init__(self, descriptor: int, *, populate: bool = False) -> None:
        self.descriptor = descriptor
        os.ftruncate(descriptor, SLOTS * PAGE)
        generations = os.memfd_create("generations")
        os.ftruncate(generations, SLOTS * 4)
        info = SegmentInfo(0, SLOTS * PAGE, PAGE, [0, SLOTS * PAGE])
        welcome = Welcome("b", 1, "t", 1, "n", 1, SLOTS, 9, 9, 9, [info])
        self.arena = ArenaMapping(
            welcome, [descriptor, generations], lambda: True, populate=populate
        )
        os.close(generations)

    def pages(self) -> int:
        """Return the number of pages that the segment has."""
        return os.fstat(self.descriptor).st_blocks * 512 // PAGE

    def close(self) -> None:
        self.arena.close()
        os.close(self.descriptor)


def extents(*slots: int) -> Records:
    found = np.zeros(len(slots), EXTENT_DTYPE)
    found["slot"], found["length"] = slots, PAGE
    found["offset"] = found["slot"].astype(np.uint64) * PAGE
    return found


@pytest.fixture
def empty() -> Iterator[Mapped]:
    mapped = Mapped(os.memfd_create("segment"))
    yield mapped
    mapped.close()


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Mapped]:
    """A segment whose file system has room for eight of its pages."""
    with ExitStack() as undo:
        place = undo.enter_context(mounted("tmpfs", f"size={8 * PAGE}", tmp_path / "full"))
        mapped = Mapped(os.open(place / "segment", os.O_RDWR | os.O_CREAT))
        yield mapped
        mapped.close()


def pages_of(count: int = 32) -> tuple[U8, PagedKV]:
    pages: U8 = np.random.default_rng(7).integers(0, 256, (count, PAGE), np.uint8)
    return pages, PagedKV([pages])


def test_a_store_populates_its_slots_only(empty: Mapped) -> None:
    pages, kv = pages_of()
    copier = HostCopier(kv, empty.arena)
    assert copier.store_now("b", np.array([3]), extents(10)).ok.all()
    assert empty.pages() == 1
    assert copier.store_now("b", np.arange(4), extents(20, 21, 22, 40)).ok.all()
    assert empty.pages() == 5
    assert np.array_equal(empty.arena.view(0)[20 * PAGE : 23 * PAGE], pages[:3].reshape(-1))
    empty.arena.heard([])
    assert empty.arena.unpopulated.bounds is None
    assert copier.close()


def test_a_store_without_memory_fails_its_blocks(full: Mapped) -> None:
    _, kv = pages_of()
    copier = HostCopier(kv, full.arena)
    done = copier.store_now("b", np.arange(12), extents(*range(12)))
    assert np.count_nonzero(done.ok) == 8
    assert done.reasons == {BlockFailure.COPY_FAILED: 4}
    done = copier.store_now("b", np.array([0]), extents(30))
    assert done.reasons == {BlockFailure.COPY_FAILED: 1}
    assert copier.close()


@cases("encoded", [False, True])
def test_a_kernel_without_memory_is_not_touched(encoded: bool) -> None:
    kv = PagedKV([np.zeros((8, PAGE), np.uint8)])
    encoding = encoding_of("fp8", "bfloat16", PAGE) if encoded else None
    slot_bytes = encoding.stored_bytes if encoding else PAGE
    arena = FakeArena(slot_bytes, 8)
    span = Span(arena.address(0), arena.segments[0], 1)
    arena.unpopulated = Unpopulated(Kernel(lacks=range(span.address, span.address + slot_bytes)))
    arena.unpopulated.report(span, [0, span.size_bytes])
    copier = HostCopier(kv, arena, encoding=encoding)
    done = copier.store_now("boot-1", np.array([0, 1]), arena.extents([0, 1]))
    assert done.ok.tolist() == [False, True]
    assert not copier.store_now("boot-1", np.array([0]), arena.extents([0])).ok.any()
    assert (arena.slot(0) == 0xA5).all()
    assert copier.close()


def received(mapped: Mapped, *slots: int) -> list[int]:
    """Return the outcomes of a put of a page for each slot at a gateway."""
    grants = Grants()
    records = extents(*slots).tobytes()
    with grants.reserving(1) as granted:
        granted.append(records)

    def fill(parts: list[memoryview], end: float) -> None:
        for part in parts:
            part[:] = bytes(len(part))

    stream: Any = SimpleNamespace(fill=fill)
    session: Any = SimpleNamespace(mapping=mapped.arena, grants=grants)
    counters: Any = SimpleNamespace(add=lambda *_: None)
    connection = DataConnection(stream, session, counters)
    return connection._store(extents_of(records), 0.0)


def test_a_gateway_populates_what_it_receives_into(empty: Mapped) -> None:
    assert received(empty, 1, 2, 9) == [Outcome.OK] * 3
    assert empty.pages() == 3


def test_a_gateway_without_memory_tells_which_slots_lack_it(full: Mapped) -> None:
    found = received(full, *range(12))
    assert sorted(found) == [Outcome.OK] * 8 + [Outcome.NO_MEMORY] * 4
    assert received(full, 40) == [Outcome.NO_MEMORY]


# -- what follows ----------------------------------------------------------------------------------


@pytest.mark.realtime("watches a thread that the kernel lets populate")
def test_page_tables_are_filled_as_the_daemon_populates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvhearth.prefault._PIECE_PAGES", 4)
    mapped = Mapped(os.memfd_create("segment"), populate=True)
    filling, generations_bytes = mapped.arena._populate, SLOTS * 4

    def filled(pages: int) -> bool:
        return filling.done_bytes == generations_bytes + pages * PAGE

    # Pages that no daemon made show where the thread was.
    for begin, pages in ((0, 0), (31, 28), (60, 60)):
        mapped.arena.heard([begin * PAGE, SLOTS * PAGE])
        until(lambda pages=pages: filled(pages))
        assert mapped.pages() == pages
    mapped.arena.heard([])
    assert filling.wait(HUNG_S)
    assert mapped.pages() == SLOTS
    mapped.close()


def test_filling_ends_with_the_mapping_although_a_range_stays() -> None:
    mapped = Mapped(os.memfd_create("segment"), populate=True)
    mapped.arena.close()
    assert mapped.arena._populate.wait(0)
    assert mapped.pages() == 0
    os.close(mapped.descriptor)


# -- reports ---------------------------------------------------------------------------------------


@cases("bounds", [[1], [2, 1], [0, 4, 4, 8], [0, SLOTS * PAGE + 1], [-1, 5]])
def test_a_report_beyond_the_segment_is_refused(empty: Mapped, bounds: list[int]) -> None:
    with pytest.raises(KVHearthError) as refused:
        empty.arena.heard(bounds)
    assert refused.value.reason is Reason.BAD_MESSAGE


def test_heartbeats_tell_the_arena(tmp_path: Path) -> None:
    with attached(tmp_path) as (daemon, client):
        arena = client.arena
        assert isinstance(arena, ArenaMapping)

        def say(*bounds: int) -> None:
            reply = pb.HeartbeatResponse(epoch=1, group_complete=True, unpopulated=bounds)
            daemon.answer("Heartbeat", lambda _: reply)

        base = arena.address(1)
        say(0, PAGE)
        client.clock.until(lambda: arena.unpopulated.bounds is not None)
        assert arena.unpopulated.bounds.tolist() == [base, base + PAGE]  # type: ignore[union-attr]
        failures = client.counters().get("heartbeat_failures", 0)
        say(0, 1 << 60)
        client.clock.until(lambda: client.counters().get("heartbeat_failures", 0) > failures)
        assert client.arena is arena


def test_a_gateway_hears_the_heartbeats_that_it_relays(empty: Mapped) -> None:
    session: Any = SimpleNamespace(_session=SimpleNamespace(mapping=empty.arena))
    body = pb.HeartbeatResponse(unpopulated=[0, PAGE]).SerializeToString()
    answer = DONE, body
    assert CallsConnection._heartbeat(session, b"", lambda _: answer) == answer
    base = empty.arena.address(0)
    assert empty.arena.unpopulated.bounds is not None
    assert empty.arena.unpopulated.bounds.tolist() == [base, base + PAGE]

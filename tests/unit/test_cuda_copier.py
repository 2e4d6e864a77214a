"""The CUDA copier on the scripted device: order, portions, failures, verification."""

from __future__ import annotations

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import xxhash
from support.arena_fake import GUARD_BYTE, FakeArena, summed
from support.cuda_fake import FakeCuda, FakeDevice
from support.scripted_clock import ScriptedClock

from kvhearth.copiers import BlockFailure, CopyKind, Done, Ticket
from kvhearth.copiers.batch import Batch
from kvhearth.copiers.cuda import REGISTERED_LOOK_S, CudaCopier
from kvhearth.copiers.device import numa_node
from kvhearth.copiers.methods import AUTO, FRAGMENT_BYTES, METHOD_ENV, CopyMethod, Rates
from kvhearth.errors import KVHearthError
from kvhearth.model import FLAG_SUMMED, FLAG_VERIFY, Records
from kvhearth.page_layout import PagedKV
from kvhearth.prefault import Span, Unpopulated
from kvhearth_lab.harness import HUNG_S

torch: Any = pytest.importorskip("torch")

PAGE_BYTES = 32
PAGES = 12
BOOT = "boot-1"


class Bench:
    """A copier of stacked pages on a scripted device, with portions of two blocks."""

    def __init__(self, method: str, parts: int = 2, **options: Any) -> None:
        self.cuda = FakeCuda()
        self.device = FakeDevice(
            self.cuda, portion_bytes=2 * PAGE_BYTES, window_bytes=4 * PAGE_BYTES
        )
        self.arena = FakeArena(PAGE_BYTES)
        self.cuda.pin(self.arena)
        self.base = torch.arange(PAGES * PAGE_BYTES, dtype=torch.int64).to(torch.uint8)
        self.base = self.base.view(parts, PAGES, PAGE_BYTES // parts)
        kv = PagedKV(list(self.base))
        options = {"verify_fraction": 1.0, **options}
        self.copier = CudaCopier(kv, self.arena, device=self.device, method=method, **options)

    def page(self, page: int) -> bytes:
        return bytes(self.base[:, page].contiguous().view(-1).tolist())

    def slot(self, slot: int) -> bytes:
        return self.arena.slot(slot).tobytes()

    def store(self, pages: list[int], slots: list[int]) -> Ticket:
        ticket = self.copier.store(BOOT, np.array(pages), self.arena.extents(slots))
        assert ticket is not None
        return ticket

    def load(self, extents: Records, pages: list[int]) -> Ticket:
        ticket = self.copier.load(BOOT, extents, np.array(pages))
        assert ticket is not None
        return ticket

    def outcome(self, ticket: Ticket) -> Done:
        done = self.copier.wait(ticket, HUNG_S)
        assert done is not None
        return done

    def stored(self, slots: list[int], flags: int = FLAG_SUMMED | FLAG_VERIFY) -> Records:
        """Extents of the first pages, stored into ``slots``, to be verified."""
        assert self.outcome(self.store(list(range(len(slots))), slots)).ok.all()
        sums = b"".join(xxhash.xxh3_128_digest(self.slot(slot)) for slot in slots)
        digests = np.frombuffer(sums, np.uint8).reshape(-1, 16)
        return summed(self.arena.extents(slots), digests, flags)

    def stands(self, ticket: Ticket) -> bool:
        """Whether a batch has not ended when no stream can go on."""
        self.cuda.wait_still()
        return self.copier.wait(ticket, 0) is None

    def fill_window(self) -> None:
        """Wait until two portions are under way, as many as the window takes."""
        flights = self.copier._flights
        self.cuda.wait_for(lambda: sum(len(flight.under_way) for flight in flights) == 2)

    @contextlib.contextmanager
    def other(self, **options: Any) -> Iterator[Any]:
        """A second copier of the same pages, arena and device."""
        copier = CudaCopier(PagedKV(list(self.base)), self.arena, device=self.device, **options)
        yield copier
        assert copier.close(HUNG_S)

    def close(self) -> None:
        self.cuda.held = self.cuda.engine_held = False
        assert self.copier.close(HUNG_S)
        self.copier.check_books()
        self.device.check_end()


@pytest.fixture(params=list(CopyMethod))
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(request.param)
    yield bench
    bench.close()


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(method: str = CopyMethod.BATCH, **options: Any) -> Bench:
        benches.append(Bench(method, **options))
        return benches[-1]

    yield make
    for bench in benches:
        bench.close()


class TestOrder:
    def test_a_store_reads_what_the_engine_was_about_to_write(self, bench: Bench) -> None:
        bench.cuda.engine_held = True
        bench.cuda.engine(lambda: bench.base.fill_(9))
        ticket = bench.store([3, 7, 5], [1, 2, 3])
        assert bench.stands(ticket)
        assert bench.arena.untouched()
        bench.cuda.engine_held = False
        assert bench.outcome(ticket).ok.all()
        assert [bench.slot(slot) for slot in (1, 2, 3)] == [bytes([9] * PAGE_BYTES)] * 3

    def test_a_page_that_is_being_zeroed_is_loaded_after_it(self, bench: Bench) -> None:
        wanted = bench.page(0)
        extents = bench.stored([4])
        bench.cuda.engine_held = True
        bench.cuda.engine(bench.base.zero_)
        ticket = bench.load(extents, [6])
        assert bench.stands(ticket)
        bench.cuda.engine_held = False
        assert bench.outcome(ticket).ok.all()
        assert bench.page(6) == wanted

    def test_copies_wait_for_a_mark_and_for_nothing_after_it(self, bench: Bench) -> None:
        mark = bench.device.mark()
        bench.cuda.engine_held = True
        bench.cuda.engine(lambda: bench.base.fill_(9))
        before = bench.page(3)
        ticket = bench.copier.store(BOOT, np.array([3]), bench.arena.extents([1]), after=mark)
        assert ticket is not None
        assert bench.outcome(ticket).ok.all()
        assert bench.slot(1) == before

    def test_each_batch_waits_for_its_own_mark(self, bench: Bench) -> None:
        first = bench.store([0], [0])
        bench.cuda.engine_held = True
        bench.cuda.engine(lambda: bench.base.fill_(9))
        second = bench.store([1], [1])
        assert bench.outcome(first).ok.all()
        assert bench.stands(second)
        bench.cuda.engine_held = False
        assert bench.outcome(second).ok.all()
        assert bench.slot(1) == bytes([9] * PAGE_BYTES)

    @pytest.mark.parametrize("kind", list(CopyKind))
    def test_an_outcome_comes_after_the_last_byte(self, bench: Bench, kind: CopyKind) -> None:
        slots, pages = [9, 3, 4, 12, 1, 0, 7], [0, 1, 2, 3, 4, 5, 6]
        extents = bench.stored(slots)
        wanted = [bench.page(page) for page in pages]
        if kind is CopyKind.STORE:
            bench.arena.view(0)[:] = 0
            done = bench.outcome(bench.store(pages, slots))
            found = [bench.slot(slot) for slot in slots]
        else:
            bench.base.zero_()
            done = bench.outcome(bench.load(extents, pages))
            found = [bench.page(page) for page in pages]
        assert done.ok.all()
        assert bench.cuda.unfinished() == 0
        assert found == wanted

    @pytest.mark.parametrize("ends", list(CopyKind))
    def test_one_direction_ends_before_the_other(self, bench: Bench, ends: CopyKind) -> None:
        extents = bench.stored([0, 2, 4])
        assert bench.outcome(bench.load(extents, [9, 10, 11])).ok.all()
        other = next(kind for kind in CopyKind if kind is not ends)
        bench.cuda.held_streams = {bench.device._streams[other]}
        load = bench.load(extents, [5, 6, 7])
        store = bench.store([8], [1])
        early, late = (store, load) if ends is CopyKind.STORE else (load, store)
        assert bench.outcome(early).ok.all()
        assert bench.stands(late)
        bench.cuda.held_streams.clear()
        assert bench.outcome(late).ok.all()

    def test_events_are_used_again(self, bench: Bench) -> None:
        for _ in range(6):
            assert bench.outcome(bench.store([0, 1, 2, 3], [0, 2, 4, 6])).ok.all()
        assert bench.cuda.event_count() <= 3

    def test_a_callers_thread_only_marks(self, bench: Bench) -> None:
        bench.outcome(bench.store([0, 1, 2], [0, 1, 2]))
        callers = set().union(*bench.cuda.callers.values())
        assert len(callers) == 1, "several threads called CUDA"
        assert threading.get_ident() not in callers


class TestPortions:
    def test_a_bounded_number_of_bytes_is_under_way(self, bench: Bench) -> None:
        bench.outcome(bench.store(list(range(9)), [0, 2, 4, 6, 8, 10, 12, 14, 15]))
        assert bench.cuda.under_way_max == 4 * PAGE_BYTES
        assert sum(size for _, _, size in bench.cuda.submitted) == 9 * PAGE_BYTES
        if bench.copier._wanted != CopyMethod.LOOP:
            assert max(size for _, _, size in bench.cuda.submitted) == 2 * PAGE_BYTES

    @pytest.mark.parametrize("kind", list(CopyKind))
    def test_a_slot_that_leaves_use_between_portions(self, bench: Bench, kind: CopyKind) -> None:
        slots, pages = [0, 2, 4, 6, 8, 10, 12, 14], [0, 1, 2, 3, 4, 5, 6, 7]
        extents = bench.stored(slots)
        wanted = [bench.page(page) for page in pages]
        bench.base.zero_() if kind is CopyKind.LOAD else bench.arena.view(0).fill(7)
        bench.cuda.held = True
        storing = kind is CopyKind.STORE
        ticket = bench.store(pages, slots) if storing else bench.load(extents, pages)
        bench.fill_window()
        bench.arena.bump(12)
        bench.cuda.held = False
        done = bench.outcome(ticket)
        assert done.ok.tolist() == [True] * 6 + [False, True]
        assert done.reasons == {"stale_generation": 1}
        if kind is CopyKind.STORE:
            found = [bench.slot(slot) for slot in slots]
            wanted[6] = bytes([7] * PAGE_BYTES)
        else:
            found = [bench.page(page) for page in pages]
            wanted[6] = bytes(PAGE_BYTES)
        assert found == wanted

    def test_copiers_of_one_device_share_its_window(self, bench: Bench) -> None:
        with bench.other(method=bench.copier._wanted) as other:
            bench.cuda.held = True
            first = bench.store([0, 1, 2, 3, 4, 5], [0, 2, 4, 6, 8, 10])
            bench.fill_window()
            second = other.store(BOOT, np.array([6]), bench.arena.extents([12]))
            bench.cuda.wait_still()
            assert other.wait(second, 0) is None
            assert bench.cuda.under_way_max == 4 * PAGE_BYTES
            bench.cuda.held = False
            assert bench.outcome(first).ok.all()
            assert other.wait(second, HUNG_S).ok.all()

    @pytest.mark.parametrize("gone", [False, True])
    def test_copiers_of_one_device_take_turns(
        self, make_bench: Callable[..., Bench], gone: bool
    ) -> None:
        bench = make_bench()
        with bench.other() as other:
            bench.cuda.held = True
            first = bench.store(list(range(10)), list(range(10)))
            bench.fill_window()
            second = other.store(BOOT, np.array([10]), bench.arena.extents([12]))
            bench.cuda.wait_for(lambda: other in bench.device._waiting[CopyKind.STORE])
            if gone:
                bench.arena.bump(12)
            bench.cuda.held = False
            assert bench.outcome(first).ok.all(), "who has nothing left gives up its turn"
            assert other.wait(second, HUNG_S).ok.all() != gone
            sizes = [size for _, _, size in bench.cuda.submitted]
            turns = [number for number, size in enumerate(sizes) if size == PAGE_BYTES]
            assert turns == ([] if gone else [3]), "the other copier's turn came late"

    def test_a_copier_that_fails_gives_up_its_turn(self, make_bench: Callable[..., Bench]) -> None:
        bench = make_bench()
        with bench.other() as other:
            bench.cuda.held = True
            first = bench.store(list(range(10)), list(range(10)))
            bench.cuda.wait_for(lambda: bench.device._waiting[CopyKind.STORE])
            bench.cuda.fail_call = "cudaEventQuery"
            assert bench.outcome(first).reasons == {"copy_failed": 10}
            bench.cuda.fail_call, bench.cuda.held = "", False
            second = other.store(BOOT, np.array([10]), bench.arena.extents([12]))
            assert other.wait(second, HUNG_S).ok.all()

    def test_close_waits_for_portions_that_were_not_submitted(self, bench: Bench) -> None:
        bench.cuda.held = True
        ticket = bench.store(list(range(8)), list(range(8)))
        bench.fill_window()
        assert not bench.copier.close(0)
        bench.cuda.held = False
        assert bench.copier.close(HUNG_S)
        assert bench.cuda.unfinished() == 0
        assert bench.outcome(ticket).ok.all()
        assert [bench.slot(slot) for slot in range(8)] == [bench.page(page) for page in range(8)]


CALLS = {
    CopyMethod.LOOP: "cudaMemcpyAsync",
    CopyMethod.BATCH: "cuMemcpyBatchAsync",
    CopyMethod.KERNEL: "kernel",
}


class TestFailures:
    @pytest.mark.parametrize(
        "call",
        [
            "copy",
            "mark",
            "cudaSetDevice",
            "cudaStreamCreateWithPriority",
            "cudaStreamWaitEvent",
            "cudaEventCreateWithFlags",
            "cudaEventRecord",
            "cudaEventQuery",
            "cudaThreadExchangeStreamCaptureMode",
        ],
    )
    def test_a_cuda_error_is_an_outcome(self, bench: Bench, call: str) -> None:
        bench.cuda.fail_call = CALLS[CopyMethod(bench.copier._wanted)] if call == "copy" else call
        assert bench.outcome(bench.store([0, 1], [0, 1])).reasons == {"copy_failed": 2}
        bench.cuda.fail_call = ""
        assert bench.outcome(bench.store([2, 3], [2, 3])).ok.all()
        assert [bench.slot(slot) for slot in (2, 3)] == [bench.page(2), bench.page(3)]
        while bench.cuda.advance():  # a broken context took its copies along
            pass

    @pytest.mark.parametrize("step", ["judge", "__init__"])
    def test_a_batch_that_breaks_is_an_outcome(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        def break_down(*_: Any) -> None:
            raise OSError("scripted")

        with monkeypatch.context() as patch:
            patch.setattr(Batch, step, break_down)
            assert bench.outcome(bench.store([1], [1])).reasons == {"copy_failed": 1}
        assert bench.outcome(bench.store([2], [2])).ok.all()

    def test_issued_copies_hold_their_batch_after_an_error(self, bench: Bench) -> None:
        bench.cuda.fail_late = CALLS[CopyMethod(bench.copier._wanted)]
        bench.cuda.held = True
        ticket = bench.store(list(range(5)), list(range(5)))
        assert bench.stands(ticket), "copies issued before it may still run"
        assert len({size for _, _, size in bench.cuda.submitted}) == 1, "it went on after an error"
        bench.cuda.held = False
        assert bench.outcome(ticket).reasons == {"copy_failed": 5}
        assert bench.cuda.unfinished() == 0
        bench.cuda.fail_late = ""
        assert bench.outcome(bench.store([7], [0])).ok.all()
        assert bench.slot(0) == bench.page(7)


class TestVerification:
    def test_summed_blocks_are_sampled(self, bench: Bench) -> None:
        extents = summed(bench.arena.extents([0]), np.zeros((1, 16), np.uint8))
        assert bench.outcome(bench.load(extents, [0])).reasons == {"checksum_mismatch": 1}

    def test_checksums_are_taken_on_a_thread_of_their_own(self, bench: Bench) -> None:
        extents = bench.stored([0, 1])
        summing, go, threads = threading.Event(), threading.Event(), set()

        def stall() -> None:
            threads.add(threading.get_ident())
            summing.set()
            go.wait(HUNG_S)

        bench.arena.on_look = stall
        ticket = bench.load(extents, [2, 3])
        assert summing.wait(HUNG_S)
        assert bench.copier.poll() == [], "a load was reported before its checksums were compared"
        assert bench.copier.wait(ticket, 0) is None
        assert not bench.copier.close(0)
        go.set()
        assert bench.outcome(ticket).ok.all()
        assert threading.get_ident() not in threads

    def test_checksums_are_taken_after_the_copies(self, bench: Bench) -> None:
        extents = bench.stored([0, 1, 3, 5, 7])
        looks: list[int] = []
        bench.arena.on_look = lambda: looks.append(bench.cuda.unfinished())
        assert bench.outcome(bench.load(extents, [2, 3, 4, 5, 6])).ok.all()
        assert looks == [0] * 5

    def test_a_slot_that_leaves_use_while_it_is_verified(self, bench: Bench) -> None:
        extents = bench.stored([0, 1])
        arena = bench.arena
        arena.on_look = lambda: arena.bump(1) if arena.generations[1] == 1 else None
        done = bench.outcome(bench.load(extents, [2, 3]))
        assert done.ok.tolist() == [True, False]
        assert done.reasons == {"stale_generation": 1}

    def test_copies_go_on_between_checksums(
        self, make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvhearth.copiers.cuda.VERIFY_STEP_BYTES", PAGE_BYTES)
        bench = make_bench()
        extents, submitted = bench.stored([0, 1, 2]), []

        def submit_more() -> None:
            if not submitted:
                submitted.append(bench.store([7], [9]))

        bench.arena.on_look = submit_more
        first = bench.load(extents, [2, 3, 4])
        assert bench.outcome(first).ok.all()
        # The store went out after one checksum of three, and was reported among the others.
        assert submitted
        assert bench.outcome(submitted[0]).ok.all()

    def test_batches_that_wait_for_their_checksums_count_in_the_queue(
        self, make_bench: Callable[..., Bench]
    ) -> None:
        bench, go = make_bench(queue_max=2), threading.Event()
        due = summed(bench.arena.extents([0]), np.zeros((1, 16), np.uint8), FLAG_VERIFY)
        bench.arena.on_look = lambda: go.wait(HUNG_S) and None
        due["flags"] = FLAG_SUMMED | FLAG_VERIFY
        tickets = [bench.copier.load(BOOT, due, np.array([page])) for page in range(3)]
        assert tickets[2] is None
        go.set()
        assert bench.copier.drain(HUNG_S)
        assert [done.ticket for done in bench.copier.poll()] == tickets[:2]


class TestMethods:
    def test_memory_that_is_not_registered_is_looped(
        self, make_bench: Callable[..., Bench], clock: ScriptedClock
    ) -> None:
        bench = make_bench(CopyMethod.KERNEL, clock=clock)
        (begin,), size_bytes = bench.cuda.registered, bench.arena.segments[0]
        bench.cuda.registered.clear()
        assert bench.outcome(bench.store([0], [0])).ok.all()
        assert {method for method, _, _ in bench.cuda.submitted} == {"loop"}
        bench.cuda.registered[begin] = size_bytes

        for look_s, method in ((0, "loop"), (REGISTERED_LOOK_S, "kernel")):
            clock.pass_time(look_s)
            assert bench.outcome(bench.store([0], [0])).ok.all()
            assert bench.cuda.submitted[-1][0] == method

    def test_a_long_loop_gives_the_lock_away(
        self, make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvhearth.copiers.device.BRIEF_COPIES_MAX", 3)
        bench = make_bench(CopyMethod.LOOP)
        assert bench.outcome(bench.store([0, 5], [0, 5])).ok.all()
        assert sum(count for _, count, _ in bench.cuda.submitted) == 4
        assert bench.cuda.brief_copies == 3

    def test_portions_beside_unregistered_pieces_are_not_looped(
        self, make_bench: Callable[..., Bench]
    ) -> None:
        bench = make_bench(CopyMethod.BATCH, piece_bytes=PAGE_BYTES)
        bench.cuda.registered.clear()
        bench.cuda.pin(bench.arena, PAGE_BYTES)
        del bench.cuda.registered[bench.arena.address(0) + 5 * PAGE_BYTES]
        assert bench.outcome(bench.store([0, 1, 2, 3], [2, 3, 4, 5])).ok.all()
        assert [method for method, _, _ in bench.cuda.submitted[:1]] == ["batch"]
        assert {method for method, _, _ in bench.cuda.submitted[1:]} == {"loop"}
        bench.cuda.submitted.clear()
        loaded = bench.arena.extents([5, 4, 3, 2])
        assert bench.outcome(bench.load(loaded, [8, 9, 10, 11])).ok.all()
        assert {method for method, _, _ in bench.cuda.submitted} == {"batch", "loop"}
        assert bench.cuda.misuse == []

    def test_a_slot_without_memory_is_not_written(self, bench: Bench) -> None:
        missing = bench.arena.address(0) + PAGE_BYTES
        span = Span(bench.arena.address(0), bench.arena.segments[0], 1)
        unpopulated = bench.copier._arena.unpopulated = Unpopulated(
            lambda begin, size, _: errno.EFAULT if begin <= missing < begin + size else 0
        )
        unpopulated.report(span, [0, span.size_bytes])
        done = bench.outcome(bench.store([0, 1, 2], [0, 1, 2]))
        assert done.ok.tolist() == [True, False, True]
        assert done.reasons == {BlockFailure.COPY_FAILED: 1}
        assert bench.slot(1) == bytes([GUARD_BYTE]) * PAGE_BYTES
        assert bench.slot(2) == bench.page(2)

    def test_a_method_that_is_missing(
        self, make_bench: Callable[..., Bench], caplog: pytest.LogCaptureFixture
    ) -> None:
        bench = make_bench(CopyMethod.KERNEL)
        bench.cuda.missing = {"kernel": "no compiler", "batch": "an old driver"}
        for _ in range(2):
            assert bench.outcome(bench.store([0], [0])).ok.all()
        assert {method for method, _, _ in bench.cuda.submitted} == {"loop"}
        assert caplog.text.count("no compiler") == 1

    def test_the_environment_names_a_method(
        self, make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(METHOD_ENV, "kernel")
        bench = make_bench(AUTO)
        assert bench.outcome(bench.store([0], [0])).ok.all()
        assert {method for method, _, _ in bench.cuda.submitted} == {"kernel"}

    def test_what_was_measured_decides(self, make_bench: Callable[..., Bench]) -> None:
        bench = make_bench(AUTO)
        slow, fast = (1.0,) * len(FRAGMENT_BYTES), (9.0,) * len(FRAGMENT_BYTES)
        bench.device.rates = Rates(
            {
                CopyKind.STORE: {CopyMethod.LOOP: slow, CopyMethod.KERNEL: fast},
                CopyKind.LOAD: {CopyMethod.LOOP: fast, CopyMethod.KERNEL: slow},
            }
        )
        bench.load(bench.stored([0]), [5])
        assert bench.copier.drain(HUNG_S)
        assert bench.cuda.submitted[0][0] == "kernel"
        assert bench.cuda.submitted[-1][0] == "loop"

    def test_no_copy_crosses_a_registered_piece(self, make_bench: Callable[..., Bench]) -> None:
        piece = PAGE_BYTES * 3 // 4
        for parts, method in ((1, "loop"), (2, "batch"), (4, "kernel")):
            bench = make_bench(method, parts=parts, piece_bytes=piece)
            bench.cuda.registered.clear()
            bench.cuda.pin(bench.arena, piece)
            assert bench.outcome(bench.store([0, 1, 2, 3], [0, 1, 2, 3])).ok.all()
            assert [bench.slot(at) for at in range(4)] == [bench.page(at) for at in range(4)]

    def test_cpu_pages_need_a_scripted_device(self) -> None:
        with pytest.raises(KVHearthError, match="host copier"):
            CudaCopier(PagedKV([torch.zeros(4, PAGE_BYTES)]), FakeArena(PAGE_BYTES))

    def test_a_cpu_has_no_numa_node(self) -> None:
        assert numa_node("cpu") == -1

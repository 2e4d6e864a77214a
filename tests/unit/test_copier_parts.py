"""Parts of the copiers: runs, the ticket book, the host copier's synchronous calls."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import Any

import numpy as np
import pytest
from support.arena_fake import FakeArena, summed
from support.native import without_native

from kvhearth import failpoints
from kvhearth.copiers import CopyKind, Done, HostCopier, Ticket
from kvhearth.copiers.base import TicketBook
from kvhearth.copiers.batch import Batch, HeldArena, as_arrays, as_single
from kvhearth.errors import KVHearthError, Reason
from kvhearth.page_layout import PagedKV
from kvhearth_lab.harness import HUNG_S

PAGE_BYTES = 32
BOOT = "boot-1"


def _batch(pages: list[int], slots: list[int], slot_bytes: int = PAGE_BYTES) -> Batch:
    kv = PagedKV([np.zeros((16, PAGE_BYTES), np.uint8)])
    arena = FakeArena(slot_bytes)
    extents = arena.extents(slots, PAGE_BYTES)
    return Batch(kv, HeldArena(arena), BOOT, np.array(pages), extents)


def _cut(batch: Batch, blocks_max: int = 8) -> list[list[int]]:
    return [run.positions for run in batch.runs(blocks_max)]


class TestRuns:
    def test_neighbours_join(self) -> None:
        assert _cut(_batch([3, 4, 5, 7], [1, 2, 3, 4])) == [[0, 1, 2], [3]]
        assert _cut(_batch([3, 4, 5, 6], [1, 2, 9, 10])) == [[0, 1], [2, 3]]
        assert _cut(_batch([3, 2, 1], [1, 2, 3])) == [[0], [1], [2]]
        assert _cut(_batch([1, 2, 3], [3, 2, 1])) == [[0], [1], [2]]
        assert _cut(_batch([], [])) == []

    def test_runs_are_bounded(self) -> None:
        assert _cut(_batch([0, 1, 2, 3, 4], [0, 1, 2, 3, 4]), 2) == [[0, 1], [2, 3], [4]]

    def test_slots_with_gaps_join(self) -> None:
        (run,) = _batch([0, 1, 2], [0, 1, 2], slot_bytes=40).runs(8)
        assert (run.positions, run.step_bytes, run.offset) == ([0, 1, 2], 40, 0)

    def test_pages_apart_do_not_join(self) -> None:
        assert _cut(_batch([5, 3, 9], [0, 1, 2])) == [[0], [1], [2]]

    def test_failed_blocks_are_left_out(self) -> None:
        batch = _batch([0, 99, 1, 2], [0, 7, 1, 2])
        (run,) = batch.runs(8)
        assert (run.positions, run.page) == ([0, 2, 3], 0)

    @pytest.mark.parametrize("seed", range(20))
    def test_runs_are_those_of_one_look_at_each_block(self, seed: int) -> None:
        draw = random.Random(seed)
        count = draw.randrange(1, 16)
        slots, pages = draw.sample(range(16), count), draw.sample(range(16), count)
        if draw.random() < 0.7:
            slots, pages = sorted(slots), sorted(pages)
        batch, most = _batch(pages, slots), draw.choice([1, 2, 5])
        steps = {
            at: slots[at] - slots[at - 1]
            for at in range(1, count)
            if pages[at] == pages[at - 1] + 1
        }
        nearest = min((step for step in steps.values() if step > 0), default=1)
        runs: list[list[int]] = []
        for at in range(count):
            follows = steps.get(at) == nearest
            if follows and len(runs[-1]) < most:
                runs[-1].append(at)
            else:
                runs.append([at])
        found = list(batch.runs(most))
        assert [run.positions for run in found] == runs
        assert len(batch.runs(most)) == len(runs)
        assert [run.page for run in found] == [pages[run[0]] for run in runs]
        assert [run.offset for run in found] == [slots[run[0]] * PAGE_BYTES for run in runs]


def _done(ticket: Ticket) -> Done:
    return Done(ticket, np.ones(1, np.bool_), None, 0, 0.0, {})


class TestTicketBook:
    def test_outcomes_that_nobody_fetches_throttle(self) -> None:
        book = TicketBook(pending_max=4, finished_max=2)
        for _ in range(2):
            ticket = book.open(CopyKind.STORE, 1, 0.0)
            assert ticket is not None
            book.finish(_done(ticket))
        assert book.open(CopyKind.STORE, 1, 0.01) is None
        assert len(book.claim_all()) == 2
        assert book.open(CopyKind.STORE, 1, 0.0) is not None
        book.check_books()

    def test_lost_tickets_are_noticed(self) -> None:
        book = TicketBook(pending_max=1)
        book.open(CopyKind.LOAD, 1, 0.0)
        book._pending.clear()
        with pytest.raises(AssertionError, match="opened 1"):
            book.check_books()

    def test_quiet_is_waited_for_until_the_last_batch_without_a_ticket_ends(self) -> None:
        book = TicketBook(pending_max=1)
        book.begin_unticketed()
        book.begin_unticketed()
        assert not book.wait_idle(0.01)
        found: list[bool] = []
        waiter = threading.Thread(target=lambda: found.append(book.wait_idle(30.0)))
        waiter.start()
        book.end_unticketed()
        waiter.join(0.05)
        assert found == []
        book.end_unticketed()
        waiter.join(HUNG_S)
        assert found == [True]

    def test_a_closed_book_takes_no_batch_without_a_ticket_either(self) -> None:
        book = TicketBook(pending_max=1)
        book.close()
        with pytest.raises(KVHearthError) as caught:
            book.begin_unticketed()
        assert caught.value.reason is Reason.CLOSED
        assert book.wait_idle(0.0)


class TestOwnOne:
    def test_it_reads_what_own_arrays_copies(self) -> None:
        extents = FakeArena(PAGE_BYTES).extents(range(6)).reshape(3, 2)[1:2, 1]
        pages = np.arange(9, dtype=np.uint16)[4:5]
        own_pages, own_extents = as_arrays(pages, extents)
        assert as_single(pages, extents) == (int(own_pages[0]), own_extents.tobytes())

    def test_all_else_is_left_to_own_arrays(self) -> None:
        extents, pages = FakeArena(PAGE_BYTES).extents([0, 1]), np.array([0, 1])
        others: list[tuple[Any, Any]] = [
            (pages, extents),
            (pages[:0], extents[:0]),
            (pages, extents[:1]),
            (pages[:1], extents),
            (pages[:1].reshape(1, 1), extents[:1].reshape(1, 1)),
            ([0], extents[:1]),
            (pages[:1], extents[0]),
            (pages[:1].astype(float), extents[:1]),
            (pages[:1], pages[:1]),
        ]
        assert [as_single(*other) for other in others] == [None] * len(others)


class _MovingGenerations:
    """Generations, one of which changes at a given read."""

    def __init__(self, arena: FakeArena, read: int, slot: int) -> None:
        self._arena, self._read, self._slot = arena, read, slot

    def __len__(self) -> int:
        return self._arena.slot_count

    def __getitem__(self, slots: Any) -> Any:
        self._read -= 1
        if not self._read:
            self._arena.bump(self._slot)
        return self._arena._generations[slots]


class TestRunsOfTheFallback:
    @pytest.mark.parametrize("read", [2, 3])
    def test_a_slot_that_leaves_use_before_its_run_is_not_written(self, read: int) -> None:
        """Read 1 is the batch's; each run, here of two blocks, then reads once more."""
        run_bytes = 1 << 20
        pages = np.ones((4, run_bytes), np.uint8)
        arena = FakeArena(run_bytes, 4)
        extents = arena.extents(range(4))
        arena.generations = _MovingGenerations(arena, read, 3)
        with without_native():
            copier = HostCopier(PagedKV([pages]), arena)
        done = copier.store_now(BOOT, np.arange(4), extents)
        assert done.ok.tolist() == [True, True, True, False]
        assert arena.slot(2)[0] == 1
        assert (arena.slot(3) == 0xA5).all()
        assert copier.close()


@pytest.mark.usefixtures("native")
class TestHostCopier:
    def test_synchronous_calls(self) -> None:
        pages = np.random.default_rng(3).integers(0, 256, (8, PAGE_BYTES), np.uint8)
        before = pages.copy()
        arena = FakeArena(PAGE_BYTES)
        copier = HostCopier(PagedKV([pages]), arena)
        extents = arena.extents([3, 4])
        stored = copier.store_now(BOOT, np.array([0, 1]), extents)
        assert stored.ok.all()
        assert stored.checksums is not None
        assert stored.ticket == Ticket(0, CopyKind.STORE, 2)
        loaded = copier.load_now(BOOT, summed(extents, stored.checksums), np.array([6, 7]))
        assert loaded.ok.all()
        assert (pages[6:] == before[:2]).all()
        assert copier.poll() == []
        assert copier.close()
        with pytest.raises(KVHearthError) as caught:
            copier.store_now(BOOT, np.array([0, 1]), extents)
        assert caught.value.reason is Reason.CLOSED

    @pytest.mark.parametrize("slot_bytes", [PAGE_BYTES, 3 * PAGE_BYTES])
    @pytest.mark.parametrize("shape", ["single", "stacked", "ragged"])
    def test_one_block_is_copied_as_in_a_batch(self, shape: str, slot_bytes: int) -> None:
        size = PAGE_BYTES // 2
        base = np.random.default_rng(5).integers(0, 256, (4, 8, size), np.uint8)
        tensors = {
            "single": [base[:2].reshape(8, PAGE_BYTES)],
            "stacked": [base[0], base[2]],
            "ragged": [base[0], base[1, :, :8], base[3, :, 4:12]],
        }[shape]
        kv = PagedKV(tensors)
        assert kv.shape == shape
        before = np.concatenate([tensor.copy() for tensor in tensors], axis=1)
        arena = FakeArena(slot_bytes)
        copier = HostCopier(kv, arena)
        extents = arena.extents(range(16), PAGE_BYTES)
        whole = copier.store_now(BOOT, np.arange(2), extents[:2])
        one = copier.store_now(BOOT, np.array([1], np.uint8), extents[9:10])
        assert whole.ok.all()
        assert one.ok.all()
        assert one.checksums is not None
        assert whole.checksums is not None
        assert one.checksums.tolist() == whole.checksums[1:].tolist()
        assert (one.ticket, one.bytes) == (Ticket(0, CopyKind.STORE, 1), PAGE_BYTES)
        assert arena.slot(9)[:PAGE_BYTES].tobytes() == before[1].tobytes()
        assert (arena.slot(9)[PAGE_BYTES:] == 0xA5).all()
        assert (arena.slot(10) == 0xA5).all()
        loaded = copier.load_now(BOOT, summed(extents[9:10], one.checksums), np.array([6]))
        assert loaded.ok.all()
        assert loaded.ticket == Ticket(0, CopyKind.LOAD, 1)
        after = np.concatenate(tensors, axis=1)
        assert after[6].tolist() == before[1].tolist()
        assert np.delete(after, 6, 0).tolist() == np.delete(before, 6, 0).tolist()
        assert copier.close()

    def test_one_block_of_no_page_is_not_touched(self) -> None:
        arena = FakeArena(PAGE_BYTES)
        copier = HostCopier(PagedKV([np.ones((8, PAGE_BYTES), np.uint8)]), arena)
        for page in (np.array([8]), np.array([-1]), np.array([(1 << 64) - 8], np.uint64)):
            done = copier.store_now(BOOT, page, arena.extents([0]))
            assert (done.ok.tolist(), done.reasons) == ([False], {"bad_page": 1})
        assert (arena.slot(0) == 0xA5).all()
        assert copier.close()

    def test_without_verification_only_due_blocks_are_compared(self) -> None:
        arena = FakeArena(PAGE_BYTES)
        copier = HostCopier(PagedKV([np.zeros((8, PAGE_BYTES), np.uint8)]), arena, verify=False)
        extents = summed(arena.extents([0, 1]), np.zeros((2, 16), np.uint8))
        extents["flags"] = [1, 3]
        assert copier.load_now(BOOT, extents, np.array([0, 1])).ok.tolist() == [True, False]
        copier.close()

    def test_without_sums_there_are_none(self) -> None:
        arena = FakeArena(PAGE_BYTES)
        copier = HostCopier(PagedKV([np.ones((8, PAGE_BYTES), np.uint8)]), arena, sums=False)
        assert copier.store_now(BOOT, np.array([0]), arena.extents([0])).checksums is None
        assert (arena.slot(0) == 1).all()
        copier.close()

    def test_a_broken_arena_is_an_outcome(self, caplog: pytest.LogCaptureFixture) -> None:
        arena = FakeArena(PAGE_BYTES)
        copier = HostCopier(PagedKV([np.ones((8, PAGE_BYTES), np.uint8)]), arena)

        def break_down(question: int) -> None:
            raise OSError("scripted")

        arena.on_alive = break_down
        ticket = copier.store(BOOT, np.array([0, 1]), arena.extents([0, 1]))
        assert ticket is not None
        done = copier.wait(ticket, 10.0)
        assert done is not None
        assert done.reasons == {"copy_failed": 2}
        assert not done.ok.any()
        assert "scripted" in caplog.text
        assert copier.close()
        copier.check_books()

    def test_several_workers_finish_everything(self) -> None:
        pages = np.random.default_rng(3).integers(0, 256, (16, PAGE_BYTES), np.uint8)
        arena = FakeArena(PAGE_BYTES)
        copier = HostCopier(PagedKV([pages]), arena, threads=3, queue_max=16)
        for index in range(16):
            assert copier.store(BOOT, np.array([index]), arena.extents([index])) is not None
        assert copier.close()
        assert sum(int(done.ok.sum()) for done in copier.poll()) == 16
        assert (arena.view(0).reshape(16, -1) == pages).all()
        copier.check_books()

    def test_large_runs_and_small_ones(self) -> None:
        """Both ways of copying, with runs bounded by the cache's size."""
        random = np.random.default_rng(5)
        for run_bytes in (100, 8 << 10, 300_000, 2 << 20):
            base = random.integers(0, 256, (2, 3, run_bytes), np.uint8)
            before = base.copy()
            for tensors in ([base[0]], list(base)):
                kv = PagedKV(tensors)
                arena = FakeArena(kv.page_bytes, 3)
                copier = HostCopier(kv, arena)
                extents, pages = arena.extents([0, 1, 2]), np.arange(3)
                done = copier.store_now(BOOT, pages, extents)
                assert done.checksums is not None
                base[: len(tensors)] = 0
                assert copier.load_now(BOOT, summed(extents, done.checksums), pages).ok.all()
                assert (base == before).all()
                copier.close()

    def test_fault_points(self, monkeypatch: pytest.MonkeyPatch) -> None:
        signals = list[int]()
        monkeypatch.setattr(os, "kill", lambda _, number: signals.append(number))
        monkeypatch.setattr(signal, "pthread_kill", lambda _, number: signals.append(number))
        arena = FakeArena(PAGE_BYTES)
        copier = HostCopier(PagedKV([np.zeros((8, PAGE_BYTES), np.uint8)]), arena)
        extents, pages = arena.extents([0, 1]), np.arange(2)
        kill, stop = signal.SIGKILL, signal.SIGSTOP
        points = {"store_copying": kill, "store_block:2": kill, "store_done": kill}
        points |= {"store_done:1:stop": stop, "load_block": kill, "load_done": kill}
        for point, number in points.items():
            signals.clear()
            failpoints.arm(f"copier.{point}")
            done = copier.store_now(BOOT, pages, extents)
            copier.load_now(BOOT, summed(extents, done.checksums), pages)
            failpoints.arm(None)
            assert set(signals) == {number}, point
        copier.close()

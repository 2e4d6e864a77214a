"""Registration of the arena with CUDA, in the scripted runtime: when it begins and ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.arena_fake import FakeArena
from support.attached import connected
from support.cuda_fake import FakeCuda, FakeDevice
from support.fake_daemon import PAGE_BYTES, FakeDaemon, extents, running, small_contract
from support.scripted_clock import ScriptedClock

from kvhearth.client import KVClient
from kvhearth.copiers.base import ArenaView
from kvhearth.copiers.device import (
    HUGEPAGE_BYTES,
    PIECE_BYTES,
    PIECE_BYTES_MAX,
    ArenaRegistration,
    Cudart,
    Registrations,
)
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import Records
from kvhearth.page_layout import PagedKV
from kvhearth.prefault import Span
from kvhearth.transfer.copier_pool import CopierFactory, CopierPool, default_copier
from kvhearth_lab.harness import HUNG_S

LOG_TEXT = "the arena stays unregistered"


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    cuda = FakeCuda()
    yield cuda
    cuda.gate.set()
    assert cuda.contexts == {cuda.device}, "a context was made on a GPU that is not the engine's"
    assert cuda.left_behind() == []
    assert cuda.broken_by == []
    assert cuda.unpinned_under_copies == []
    threads = cuda.callers.get("cudaHostRegister", set()) | cuda.callers.get(
        "cudaHostUnregister", set()
    )
    assert threading.get_ident() not in threads


def _arena() -> FakeArena:
    return FakeArena(1 << 20, 5, segments=2)


def _begun(cuda: FakeCuda, arena: FakeArena | None = None, **options: Any) -> ArenaRegistration:
    arena = arena or _arena()
    return ArenaRegistration(arena, cuda, cuda.device, piece_bytes=HUGEPAGE_BYTES, **options)


def test_pieces_cover_every_segment_once(cuda: FakeCuda) -> None:
    arena = _arena()
    registration = _begun(cuda, arena)
    assert registration.wait(HUNG_S)
    assert (registration.ready, registration.error) == (True, "")
    starts = [arena.address(segment) for segment in (0, 1)]
    assert cuda.calls == [
        (start + offset, size)
        for start in starts
        for offset, size in ((0, 2 << 20), (2 << 20, 2 << 20), (4 << 20, 1 << 20))
    ]
    assert registration.close(HUNG_S)
    assert cuda.registered == {}
    assert not registration.ready
    assert registration.close(HUNG_S)


def test_pieces_are_registered_once_they_are_populated(cuda: FakeCuda) -> None:
    arena = _arena()
    base, span = arena.address(0), Span(arena.address(0), 5 << 20, 4096)
    arena.unpopulated.report(span, [0, 4096, (4 << 20) - 1, 5 << 20])
    registration = _begun(cuda, arena)
    cuda.wait_for(lambda: len(cuda.registered) == 3)
    assert base not in cuda.registered
    arena.unpopulated.report(span, [(4 << 20) - 1, 4 << 20])
    cuda.wait_for(lambda: len(cuda.registered) == 5)
    assert base + (2 << 20) not in cuda.registered
    assert not registration.wait(0)
    assert (registration.ready, registration.error) == (False, "")
    arena.unpopulated.report(span, [])
    assert registration.wait(HUNG_S)
    assert len(cuda.calls) == 6
    assert registration.close(HUNG_S)
    assert cuda.registered == {}


def test_a_piece_without_memory_is_never_registered(cuda: FakeCuda) -> None:
    arena = _arena()
    arena.unpopulated.report(Span(arena.address(1), 5 << 20, 4096), [0, 4096])
    registration = _begun(cuda, arena)
    cuda.wait_for(lambda: len(cuda.registered) == 5)
    assert registration.close(HUNG_S)
    assert len(cuda.calls) == 5
    assert cuda.registered == {}


def test_nothing_breaks_a_capture_under_way(cuda: FakeCuda) -> None:
    cuda.capturing = True
    registration = _begun(cuda)
    assert registration.wait(HUNG_S), registration.error
    assert registration.close(HUNG_S)
    assert cuda.registered == {}


@pytest.mark.parametrize("fail_at", [1, 2, 6])
def test_pieces_before_a_refused_one_stay_until_the_copies_have_ended(
    cuda: FakeCuda, fail_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    failures: list[str] = []
    cuda.fail_at, cuda.copying = fail_at, True
    registration = _begun(cuda, failed=lambda: failures.append("failed"))
    assert not registration.wait(HUNG_S)
    assert not registration.ready
    assert f"piece {fail_at} of 6" in registration.error
    assert "returned 2" in registration.error
    assert cuda.left_behind() == [], "the thread's next call would report it"
    assert len(cuda.calls) == fail_at
    assert len(cuda.registered) == fail_at - 1
    cuda.copying = False
    assert registration.close(HUNG_S)
    assert cuda.registered == {}
    assert len(cuda.calls) == fail_at
    assert failures == ["failed"]
    assert caplog.text.count(LOG_TEXT) == 1


def test_every_code_is_looked_at() -> None:
    for call in ("cudaSetDevice", "cudaThreadExchangeStreamCaptureMode", "cudaHostRegister"):
        cuda = FakeCuda()
        cuda.fail_call = call
        registration = _begun(cuda)
        assert not registration.wait(HUNG_S)
        assert f"{call}" in registration.error
        assert "returned 2" in registration.error
        assert cuda.registered == {}
        assert registration.close(HUNG_S)


def test_a_library_that_lacks_a_call(cuda: FakeCuda) -> None:
    cuda.raise_call = "cudaHostRegister"
    registration = _begun(cuda)
    assert not registration.wait(HUNG_S)
    assert "scripted" in registration.error
    assert registration.close(HUNG_S)


@pytest.mark.parametrize("call", ["cudaSetDevice", "cudaHostUnregister"])
def test_a_refused_unregistration_leaves_no_error_behind(cuda: FakeCuda, call: str) -> None:
    registration = _begun(cuda)
    assert registration.wait(HUNG_S)
    cuda.fail_call = call
    assert registration.close(HUNG_S)
    assert len(cuda.registered) == 6


def test_closing_while_it_registers(cuda: FakeCuda) -> None:
    cuda.gate.clear()
    registration = _begun(cuda)
    assert cuda.stalled.wait(HUNG_S)
    assert not registration.wait(0)
    assert not registration.close(0)
    cuda.gate.set()
    assert registration.close(HUNG_S)
    assert len(cuda.calls) == 1
    assert cuda.registered == {}
    assert (registration.ready, registration.error) == (False, "")


def test_bad_pieces_are_refused() -> None:
    for piece_bytes in (0, -HUGEPAGE_BYTES, 5000, 3 << 19, PIECE_BYTES_MAX * 2):
        with pytest.raises(KVHearthError) as caught:
            ArenaRegistration(_arena(), FakeCuda(), 0, piece_bytes=piece_bytes)
        assert caught.value.reason is Reason.CONFIG_INVALID
    assert 1 << 30 <= PIECE_BYTES <= PIECE_BYTES_MAX <= 2 << 30


def test_a_torch_without_cuda_is_said() -> None:
    torch = pytest.importorskip("torch")
    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    with pytest.raises(KVHearthError, match="no CUDA"):
        Cudart()


def test_a_forked_child_leaves_the_registration_alone(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    registration = _begun(cuda)
    assert registration.wait(HUNG_S)
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        assert not registration.wait(HUNG_S)
        assert registration.close(HUNG_S)
        assert len(cuda.registered) == 6
    assert registration.close(HUNG_S)


class TestRegistrations:
    def test_an_arena_of_two_users_is_registered_once(self, cuda: FakeCuda) -> None:
        """Also if they are on two GPUs of the process."""
        arena, shared = FakeArena(4096), Registrations(lambda: cuda)
        for number, user in enumerate("ab"):
            shared.acquire(arena, user, cuda.device + number, lambda: None)
        cuda.wait_for(lambda: cuda.registered)
        for _ in range(2):
            assert shared.release(arena, "a", HUNG_S)
            assert len(cuda.registered) == 1
        assert shared.release(arena, "b", HUNG_S)
        assert (cuda.registered, len(cuda.calls)) == ({}, 1)

    def test_each_process_registers_its_own_mapping(self) -> None:
        arena, processes = FakeArena(4096), [FakeCuda(), FakeCuda()]
        shared = [Registrations(lambda cuda=cuda: cuda) for cuda in processes]
        for own in shared:
            own.acquire(arena, "a", 1, lambda: None)
        for cuda in processes:
            cuda.wait_for(lambda cuda=cuda: cuda.registered)
        assert shared[0].release(arena, "a", HUNG_S)
        assert [bool(cuda.registered) for cuda in processes] == [False, True]
        assert shared[1].release(arena, "a", HUNG_S)

    def test_nobody_waits_for_another_users_unregistration(self, cuda: FakeCuda) -> None:
        shared = Registrations(lambda: cuda)
        first, second = FakeArena(4096), FakeArena(4096)
        shared.acquire(first, "a", cuda.device, lambda: None)
        cuda.wait_for(lambda: cuda.registered)
        cuda.gate.clear()
        with ThreadPoolExecutor(1) as threads:
            ending = threads.submit(shared.release, first, "a", HUNG_S)
            assert cuda.stalled.wait(HUNG_S)
            shared.acquire(second, "b", cuda.device, lambda: None)
            assert not ending.done(), "this thread has waited for it"
            cuda.gate.set()
            assert ending.result()
        assert shared.release(second, "b", HUNG_S)

    def test_what_does_not_end_in_time_is_asked_again(self, cuda: FakeCuda) -> None:
        arena, shared = FakeArena(4096), Registrations(lambda: cuda)
        shared.acquire(arena, "a", cuda.device, lambda: None)
        cuda.wait_for(lambda: cuda.registered)
        cuda.gate.clear()
        assert not shared.release(arena, "a", 0)
        cuda.gate.set()
        assert shared.release(arena, "a", HUNG_S)
        assert cuda.registered == {}

    def test_a_process_without_cuda_goes_on(self, caplog: pytest.LogCaptureFixture) -> None:
        def missing() -> FakeCuda:
            raise KVHearthError(Reason.COPY_FAILED, "scripted")

        arena, shared, failures = FakeArena(4096), Registrations(missing), []
        for user in ("a", "b"):
            shared.acquire(arena, user, 0, lambda: failures.append(1))
        assert failures == [1]
        assert caplog.text.count(LOG_TEXT) == 1
        assert shared.release(arena, "a", HUNG_S)
        assert shared.release(arena, "b", HUNG_S)


# -- beside a client ---------------------------------------------------------------------------


class _Impatient(Registrations):
    """Waits for no unregistration while ``hurried``, since that takes real time."""

    hurried = False

    def release(self, arena: ArenaView, user: object, deadline_s: float) -> bool:
        return super().release(arena, user, 0.0 if self.hurried else deadline_s)


class _Gpu:
    """A rank with pages on the scripted GPU 0: its copiers take their device from the tensors."""

    def __init__(self, client: KVClient, cuda: FakeCuda) -> None:
        self.client = client
        self.device = FakeDevice(cuda)
        self.kv = {0: PagedKV([np.zeros((8, PAGE_BYTES), np.uint8)])}
        self.registrations = _Impatient(lambda: cuda)
        self.copier_pool: list[CopierPool] = []

    def add_movers(self, make: CopierFactory | None = None) -> CopierPool:
        copier_pool = CopierPool(self.client, self.kv, make, registrations=self.registrations)
        self.copier_pool.append(copier_pool)
        return copier_pool

    def free_extent(self) -> Records:
        """Return the extent of slot 0, as the daemon would grant it now."""
        arena = self.client.arena
        assert arena is not None
        return extents(1, generation=int(arena.generations[0]))

    def add_cuda_movers(self) -> CopierPool:
        torch = pytest.importorskip("torch")
        self.kv = {0: PagedKV([torch.zeros((8, PAGE_BYTES), dtype=torch.uint8)])}
        return self.add_movers(default_copier(device=self.device))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with running(tmp_path, small_contract()) as daemon:
        yield daemon


@pytest.fixture
def gpu(daemon: FakeDaemon, clock: ScriptedClock, tmp_path: Path) -> Iterator[_Gpu]:
    cuda = FakeCuda(device=0)
    with connected(tmp_path, clock=clock) as client:
        assert client.wait_ready(HUNG_S)
        gpu = _Gpu(client, cuda)
        yield gpu
        gpu.device.held = False
        cuda.gate.set()
        assert cuda.misuse == []
        for copier_pool in gpu.copier_pool:
            assert copier_pool.close(HUNG_S)
        assert cuda.registered == {}
        assert cuda.left_behind() == []


def test_an_arena_is_registered_from_the_attach_on(
    gpu: _Gpu, clock: ScriptedClock, daemon: FakeDaemon
) -> None:
    cuda = gpu.device.cuda
    gpu.add_movers()
    gpu.add_movers()
    cuda.wait_for(lambda: len(cuda.registered) == len(gpu.client.arena.segments))
    session = gpu.client.session_id
    daemon.drop_lines()
    clock.until(lambda: gpu.client.session_id not in ("", session))
    cuda.wait_for(lambda: len(cuda.calls) == 2 * len(gpu.client.arena.segments))


def test_a_client_that_attaches_later(
    tmp_path: Path, cuda: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    cuda.device, cuda.contexts, cuda.fail_at = 0, {0}, 1
    with connected(tmp_path) as client:
        copier_pool = CopierPool(
            client,
            {0: PagedKV([np.zeros((8, PAGE_BYTES), np.uint8)])},
            registrations=Registrations(lambda: cuda),
        )
        assert cuda.calls == []
        with running(tmp_path, small_contract()):
            client.clock.until(lambda: client.counters().get("registration_failed"))
            assert copier_pool.copier(0, client.boot_id) is not None, "copies go on unregistered"
            assert caplog.text.count(LOG_TEXT) == 1
            assert client.counters()["registration_failed"] == 1
            assert copier_pool.close(HUNG_S)


def test_copies_go_on_while_the_arena_is_being_registered(gpu: _Gpu) -> None:
    cuda, boot_id = gpu.device.cuda, gpu.client.boot_id
    cuda.gate.clear()
    copier_pool = gpu.add_cuda_movers()
    assert cuda.stalled.wait(HUNG_S)
    copier = copier_pool.copier(0, boot_id)
    assert copier is not None
    ticket = copier.store(boot_id, np.array([0]), gpu.free_extent())
    assert ticket is not None
    done = copier.wait(ticket, HUNG_S)
    assert done is not None
    assert done.ok.all(), done.reasons
    assert not cuda.registered
    cuda.gate.set()
    cuda.wait_for(lambda: cuda.registered)


def test_an_engines_thread_does_not_wait_while_the_arena_is_unregistered(gpu: _Gpu) -> None:
    cuda, copier_pool = gpu.device.cuda, gpu.add_movers()
    boot_id = gpu.client.boot_id
    cuda.wait_for(lambda: cuda.registered)
    assert copier_pool.copier(0, boot_id) is not None
    cuda.gate.clear()
    with ThreadPoolExecutor(1) as threads:
        ending = threads.submit(copier_pool.drain, HUNG_S)
        assert cuda.stalled.wait(HUNG_S)
        assert copier_pool.copier(0, boot_id) is None
        assert not ending.done(), "this thread has waited for it"
        cuda.gate.set()
        assert ending.result()
    assert copier_pool.copier(0, boot_id) is not None


def test_an_engines_thread_does_not_wait_while_copies_end(gpu: _Gpu) -> None:
    copier_pool, boot_id = gpu.add_cuda_movers(), gpu.client.boot_id
    copier = copier_pool.copier(0, boot_id)
    assert copier is not None
    gpu.device.held = True
    ticket = copier.store(boot_id, np.array([0]), gpu.free_extent())
    assert ticket is not None
    with ThreadPoolExecutor(1) as threads:
        ending = threads.submit(copier_pool.drain, HUNG_S)
        gpu.device.cuda.wait_for(lambda: copier_pool.copier(0, boot_id) is None)
        assert not ending.done(), "this thread has waited for it"
        gpu.device.held = False
        assert ending.result()
    assert copier.wait(ticket, HUNG_S) is not None


def test_a_session_ends_only_after_its_arena_is_unregistered(
    gpu: _Gpu, clock: ScriptedClock, daemon: FakeDaemon
) -> None:
    cuda, client = gpu.device.cuda, gpu.client
    copier_pool = gpu.add_movers()
    cuda.wait_for(lambda: cuda.registered)
    gpu.registrations.hurried = True
    cuda.gate.clear()
    attaches = client.counters()["attaches"]
    daemon.drop_lines()
    clock.until(lambda: client.counters().get("drains_unfinished"))
    assert client.counters()["attaches"] == attaches
    assert copier_pool.copier(0, client.boot_id) is None
    gpu.registrations.hurried = False
    cuda.gate.set()
    clock.until(lambda: client.counters()["attaches"] > attaches)
    clock.until(lambda: copier_pool.copier(0, client.boot_id) is not None)


def test_copies_end_before_their_memory_is_unregistered(gpu: _Gpu) -> None:
    cuda, copier_pool, boot_id = gpu.device.cuda, gpu.add_cuda_movers(), gpu.client.boot_id
    cuda.wait_for(lambda: cuda.registered)
    copier = copier_pool.copier(0, boot_id)
    assert copier is not None
    gpu.device.held = True
    assert copier.store(boot_id, np.array([0]), gpu.free_extent()) is not None
    assert not copier_pool.close(0.05)
    assert cuda.registered
    assert not cuda.unpinned_under_copies
    gpu.device.held = False
    assert copier_pool.close(HUNG_S)
    assert cuda.registered == {}
    assert not cuda.unpinned_under_copies

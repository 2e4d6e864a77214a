"""Tests of the CUDA copier and the arena's registration on a real device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.arena_fake import FakeArena, summed

import kvhearth
from kvhearth import Contract, GroupKind, GroupSpec, connect
from kvhearth.copiers.methods import CopyMethod
from kvhearth.model import FLAG_SUMMED, FLAG_VERIFY
from kvhearth.page_layout import PagedKV
from kvhearth.results import CommitGroup

pytestmark = pytest.mark.gpu

LAYERS, PAGES, BLOCK_TOKENS, HEAD_BYTES = 8, 64, 16, 1024
PAGE_BYTES = LAYERS * BLOCK_TOKENS * HEAD_BYTES
DEADLINE_S = 30.0


@pytest.fixture
def torch() -> Any:
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    return module


@pytest.fixture
def daemon(tmp_path: Path, torch: Any) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    command = [sys.executable, "-m", "kvhearth_server", "serve", "--socket-dir", tmp_path]
    process = subprocess.Popen([*map(str, command), "--memory", "256MiB"])
    yield f"kvhearth+unix://{tmp_path}", process
    process.kill()
    process.wait(DEADLINE_S)


def _until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline, "deadline"
        time.sleep(0.01)


def _contract() -> Contract:
    group = GroupSpec(
        GroupKind.FULL,
        block_tokens=BLOCK_TOKENS,
        page_bytes=PAGE_BYTES,
        layers=LAYERS,
        token_bytes=HEAD_BYTES,
    )
    return Contract(model="gpu-smoke", revision="1", kv_dtype="bfloat16", groups=(group,))


def test_store_load_compare_and_a_daemon_that_dies(torch: Any, daemon: Any) -> None:
    from kvhearth.copiers.cuda import CudaCopier
    from kvhearth.copiers.cudart import Cudart
    from kvhearth.copiers.device import ArenaRegistration

    url, process = daemon
    client = connect(url, _contract(), engine_id="gpu-smoke")
    assert client.wait_ready(DEADLINE_S)
    arena = client.arena
    assert arena is not None
    kv_cache = torch.randn(
        LAYERS, PAGES, BLOCK_TOKENS, HEAD_BYTES // 2, device="cuda", dtype=torch.bfloat16
    )
    registration = ArenaRegistration(arena, Cudart(), torch.cuda.current_device())
    assert registration.wait(DEADLINE_S), registration.error
    copier = CudaCopier(PagedKV(list(kv_cache)), arena, verify_fraction=1.0)

    pages = np.random.default_rng(1).permutation(PAGES)[:20]
    reserved = client.reserve({0: len(pages)})
    extents = reserved.groups[0][:, 0]
    # The kernel that makes the pages' content must have run before the copy reads them.
    kv_cache.mul_(2)
    before = kv_cache.clone()
    stored = copier.wait(copier.store(reserved.boot_id, pages, extents), DEADLINE_S)
    assert stored.ok.all(), stored.reasons
    for page, extent in zip(pages.tolist(), extents, strict=True):
        start = int(extent["offset"])
        in_arena = arena.view(int(extent["segment"]))[start : start + PAGE_BYTES]
        page_bytes = before[:, page].contiguous().view(torch.uint8).cpu().numpy().reshape(-1)
        assert (in_arena == page_bytes).all()

    keys = [os.urandom(32) for _ in pages]
    client.commit({0: CommitGroup(keys=keys, extents=extents[:, None], checksums=None)})
    _until(lambda: bool(client.lookup({0: keys}, lease=False).groups[0].ready.all()))
    found = client.lookup({0: keys})
    kv_cache.zero_()
    targets = np.random.default_rng(2).permutation(PAGES)[:20]
    loading = copier.load(found.boot_id, found.groups[0].extents, targets)
    loaded = copier.wait(loading, DEADLINE_S)
    assert loaded.ok.all(), loaded.reasons
    assert torch.equal(kv_cache[:, targets], before[:, pages])

    process.send_signal(signal.SIGKILL)
    process.wait(DEADLINE_S)
    _until(lambda: not arena.alive())
    orphaned = copier.wait(copier.load(found.boot_id, found.groups[0].extents, targets), DEADLINE_S)
    assert orphaned.reasons == {"stale_boot": 20}
    assert copier.close()
    assert registration.close()
    torch.cuda.synchronize()
    client.close()


def test_the_simple_api_moves_gpu_pages(torch: Any, daemon: Any) -> None:
    url, _ = daemon
    shape = (PAGES, BLOCK_TOKENS, PAGE_BYTES // BLOCK_TOKENS // 2)
    pages = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    contract = kvhearth.contract_for(pages, model="gpu", revision="1", block_tokens=BLOCK_TOKENS)
    with kvhearth.open(url, contract, wait_s=DEADLINE_S) as cache:
        for turn, stored in enumerate((pages, list(pages))):
            keys = [f"{turn} {index}" for index in range(PAGES)]
            wanted = pages.clone()
            assert cache.store(keys, stored).result(DEADLINE_S).stored == PAGES
            for whole in (True, False):
                blocks = torch.zeros_like(pages)
                done = cache.load(keys, blocks if whole else list(blocks)).result(DEADLINE_S)
                assert done.usable_blocks == PAGES
                assert torch.equal(blocks, wanted)


def _pinned(torch: Any, arena: Any) -> bool:
    """Whether CUDA has page-locked the beginning and the end of each segment."""
    views = [torch.from_numpy(arena.view(segment)) for segment in arena.segments]
    return all(part.is_pinned() for view in views for part in (view[:4096], view[-4096:]))


def test_an_arena_is_registered_from_the_attach_on(torch: Any, daemon: Any) -> None:
    from kvhearth.transfer import CopierPool

    url, _ = daemon
    kv_cache = torch.zeros(
        LAYERS, PAGES, BLOCK_TOKENS, HEAD_BYTES // 2, device="cuda", dtype=torch.bfloat16
    )
    client = connect(url, _contract(), engine_id="gpu-smoke")
    copier_pool = CopierPool(client, {0: PagedKV(list(kv_cache))})
    assert client.wait_ready(DEADLINE_S)
    arena = client.arena
    assert arena is not None
    _until(lambda: _pinned(torch, arena))
    assert copier_pool.close(DEADLINE_S)
    assert not _pinned(torch, arena)
    assert "registration_failed" not in client.counters()
    torch.cuda.synchronize()
    assert client.close()


def _verified(torch: Any, copier: Any, arena: FakeArena, pages: int) -> bool:
    """Store the first pages and load them with their checksums into the next ones."""
    import xxhash

    slots = list(range(pages))
    extents = arena.extents(slots)
    # A stream of its own: the default one belongs to the engine.
    with torch.cuda.stream(torch.cuda.Stream()):
        stored = copier.wait(copier.store("boot-1", np.arange(pages), extents), DEADLINE_S)
        digests = b"".join(xxhash.xxh3_128_digest(arena.slot(slot)) for slot in slots)
        sums = np.frombuffer(digests, np.uint8).reshape(-1, 16)
        due = summed(extents, sums, FLAG_SUMMED | FLAG_VERIFY)
        loaded = copier.wait(copier.load("boot-1", due, np.arange(pages, 2 * pages)), DEADLINE_S)
    return bool(stored.ok.all() and loaded.ok.all())


def test_a_capture_survives_registration_and_copies_of_other_threads(torch: Any) -> None:
    from kvhearth.copiers.cuda import CudaCopier
    from kvhearth.copiers.cudart import Cudart
    from kvhearth.copiers.device import HUGEPAGE_BYTES, ArenaRegistration

    arena = FakeArena(1 << 20, 64)
    kv_cache = torch.randint(0, 255, (16, 1 << 20), device="cuda", dtype=torch.uint8)
    index = torch.cuda.current_device()
    copier = CudaCopier(PagedKV([kv_cache]), arena, piece_bytes=HUGEPAGE_BYTES)
    ones, graph = torch.ones(1024, device="cuda"), torch.cuda.CUDAGraph()
    with ThreadPoolExecutor(1) as threads:
        # A first run outside the capture loads the libraries that a thread loads at its first copy.
        assert threads.submit(_verified, torch, copier, arena, 8).result(DEADLINE_S)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="global"):
            twice = ones * 2
            registration = ArenaRegistration(arena, Cudart(), index, piece_bytes=HUGEPAGE_BYTES)
            assert registration.wait(DEADLINE_S), registration.error
            assert threads.submit(_verified, torch, copier, arena, 8).result(DEADLINE_S)
            assert copier.close(DEADLINE_S)
            assert registration.close(DEADLINE_S)
            thrice = twice + ones
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(thrice, torch.full_like(thrice, 3))
    assert torch.equal(kv_cache[:8], kv_cache[8:])


def test_blocks_may_cross_the_bounds_of_registered_pieces(torch: Any) -> None:
    from kvhearth.copiers.cuda import CudaCopier
    from kvhearth.copiers.cudart import Cudart
    from kvhearth.copiers.device import HUGEPAGE_BYTES, ArenaRegistration

    arena = FakeArena(3 << 20, 8)
    registration = ArenaRegistration(
        arena, Cudart(), torch.cuda.current_device(), piece_bytes=HUGEPAGE_BYTES
    )
    assert registration.wait(DEADLINE_S), registration.error
    for shape in ((8, 3 << 20), (2, 8, 3 << 19)):
        kv_cache = torch.randint(0, 255, shape, device="cuda", dtype=torch.uint8)
        pages = kv_cache if len(shape) == 2 else kv_cache.transpose(0, 1)
        kv = PagedKV([kv_cache] if len(shape) == 2 else list(kv_cache))
        copier = CudaCopier(kv, arena, piece_bytes=HUGEPAGE_BYTES)
        torch.cuda.synchronize()
        assert _verified(torch, copier, arena, 4)
        assert torch.equal(pages[:4], pages[4:])
        assert copier.close(DEADLINE_S)
    assert registration.close(DEADLINE_S)


def test_another_thread_may_end_a_registration(torch: Any) -> None:
    from kvhearth.copiers.cudart import Cudart
    from kvhearth.copiers.device import ArenaRegistration

    arena = FakeArena(1 << 20, 64)
    torch.zeros(1, device="cuda")
    registration = ArenaRegistration(arena, Cudart(), torch.cuda.current_device())
    assert registration.wait(DEADLINE_S), registration.error
    assert _pinned(torch, arena)
    closed: list[bool] = []
    closer = threading.Thread(target=lambda: closed.append(registration.close(DEADLINE_S)))
    closer.start()
    closer.join(DEADLINE_S)
    assert closed == [True]
    assert not _pinned(torch, arena)
    assert Cudart().last_error() == 0


ONE_CONTEXT = """
import ctypes, threading
import numpy as np, torch
from support.arena_fake import FakeArena
from kvhearth.copiers.cuda import CudaCopier
from kvhearth.copiers.cudart import Cudart
from kvhearth.copiers.device import ArenaRegistration
from kvhearth.page_layout import PagedKV

torch.cuda.set_device(1)
kv_cache = torch.ones(8, 1 << 20, device="cuda:1", dtype=torch.uint8)
torch.cuda.synchronize()
arena = FakeArena(1 << 20, 16)

def work():
    # This thread is on device 0, like each that begins.
    registration = ArenaRegistration(arena, Cudart(), 1)
    assert registration.wait(30), registration.error
    copier = CudaCopier(PagedKV([kv_cache]), arena)
    with torch.cuda.stream(torch.cuda.Stream(device="cuda:1")):
        ticket = copier.store("boot-1", np.arange(8), arena.extents(range(8)))
    assert copier.wait(ticket, 30).ok.all()
    assert copier.close(30)
    assert registration.close(30)

worker = threading.Thread(target=work)
worker.start()
worker.join(60)
flags, active = ctypes.c_uint(), ctypes.c_int()
driver = ctypes.CDLL("libcuda.so.1")
for device, wanted in ((0, 0), (1, 1)):
    code = driver.cuDevicePrimaryCtxGetState(device, ctypes.byref(flags), ctypes.byref(active))
    assert (code, active.value) == (0, wanted), (device, code, active.value)
print("one context")
"""


def test_no_thread_makes_a_context_on_another_gpu(torch: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU: there is no other one")
    tests = Path(__file__).resolve().parents[2] / "tests"
    environment = {**os.environ, "PYTHONPATH": str(tests)}
    found = subprocess.run(
        [sys.executable, "-c", ONE_CONTEXT],
        check=False,
        env=environment,
        capture_output=True,
        timeout=120,
    )
    assert found.stdout == b"one context\n", found.stderr.decode()


@pytest.mark.parametrize("method", list(CopyMethod))
def test_copies_wait_for_the_engines_kernels(torch: Any, method: CopyMethod) -> None:
    from kvhearth.copiers.cuda import CudaCopier
    from kvhearth.copiers.cudart import Cudart
    from kvhearth.copiers.device import ArenaRegistration

    arena, index = FakeArena(1 << 20, 16), torch.cuda.current_device()
    kv_cache = torch.zeros(64, 32, 1 << 14, device="cuda", dtype=torch.uint8)
    registration = ArenaRegistration(arena, Cudart(), index)
    assert registration.wait(DEADLINE_S), registration.error
    copier = CudaCopier(PagedKV(list(kv_cache)), arena, method=method)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    kv_cache.copy_(torch.randint(0, 255, kv_cache.shape, device="cuda", dtype=torch.uint8))
    extents, pages = arena.extents(range(16)), np.random.default_rng(3).permutation(32)[:16]
    stored = copier.wait(copier.store("boot-1", pages, extents), DEADLINE_S)
    assert stored.ok.all(), stored.reasons
    before = kv_cache.clone()
    kv_cache.fill_(1)
    torch.cuda._sleep(200_000_000)
    kv_cache.zero_()
    loaded = copier.wait(copier.load("boot-1", extents, pages), DEADLINE_S)
    assert loaded.ok.all(), loaded.reasons
    assert torch.equal(kv_cache[:, pages], before[:, pages])
    assert copier.close(DEADLINE_S)
    assert registration.close(DEADLINE_S)


def test_methods_are_measured(torch: Any, tmp_path: Path) -> None:
    from kvhearth.copiers.device import CopyDevice
    from kvhearth.copiers.measure import Measurement

    device = CopyDevice(torch.cuda.current_device())
    measurement = Measurement(device, tmp_path / "rates.json")
    assert measurement.wait(DEADLINE_S)
    assert device.rates is not None
    print(device.problems, device.rates)
    for rates in device.rates.values.values():
        assert all(max(row) > 0 for row in rates.values()), rates


def test_copiers_made_after_each_attach_take_no_more_memory_or_streams(torch: Any) -> None:
    from kvhearth.copiers.cuda import CudaCopier

    kv_cache = torch.zeros(2, 16, 1 << 19, device="cuda", dtype=torch.uint8)
    reserved: list[int] = []
    used = set()
    for _ in range(40):
        arena = FakeArena(1 << 20, 16)
        copier = CudaCopier(PagedKV(list(kv_cache)), arena, method=CopyMethod.LOOP)
        extents = arena.extents(range(8))
        assert copier.wait(copier.load("boot-1", extents, np.arange(8)), DEADLINE_S).ok.all()
        used |= set(copier._device._streams.values())
        assert copier.close(DEADLINE_S)
        reserved.append(torch.cuda.memory_reserved())
    assert len(used) == 1
    assert reserved[-1] == reserved[0]

"""The CUDA copier on a real device, with a real daemon that is killed in between."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvhearth import Contract, GroupKind, GroupSpec, connect
from kvhearth.layout import PagedKV
from kvhearth.results import CommitGroup

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

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
    command = [Path(sys.executable).parent / "kvhearth", "serve", "--socket-dir", tmp_path]
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
    from kvhearth.copiers.register import ArenaRegistration, CudartRegistrar

    url, process = daemon
    client = connect(url, _contract(), engine_id="gpu-smoke")
    assert client.wait_ready(DEADLINE_S)
    arena = client.arena
    assert arena is not None
    kv_cache = torch.randn(
        LAYERS, PAGES, BLOCK_TOKENS, HEAD_BYTES // 2, device="cuda", dtype=torch.bfloat16
    )
    registration = ArenaRegistration(arena, CudartRegistrar(torch.cuda.current_device()))
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

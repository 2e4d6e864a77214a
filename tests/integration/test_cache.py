"""The simple API with a real daemon: order, bounds, no lost blocks, and every way to die."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cached import (
    CONTRACT,
    PAGE_BYTES,
    CachedEngine,
    GateCopier,
    cached_engine,
    computed,
)
from support.daemon import Daemon, running_daemon, stopped_daemon, until
from support.raw_door import new_keys

import kvhearth
from kvhearth.copiers.host import HostCopier
from kvhearth.errors import ClientReason, Reason
from kvhearth_lab.harness import HUNG_S

ROOT = Path(__file__).resolve().parents[2]
AWAY_S = 3.0
"""Time for which stores wait for an absent daemon; calls that do not wait take far less."""


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """A daemon whose books must balance at the end, with nothing left that a client held."""
    with running_daemon() as daemon:
        yield daemon
        if not daemon.dead:
            daemon.wait_quiet()


@pytest.fixture(autouse=True)
def _open_gate() -> Iterator[None]:
    GateCopier.reset()
    yield
    GateCopier.reset()


# -- without failures --------------------------------------------------------------------------


def test_the_readmes_example_runs(daemon: Daemon) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "kvhearth.open(" in block]
    assert len(code.splitlines()) <= 20
    assert '"kvhearth+unix:"' in code
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "error",
            "-c",
            code.replace("kvhearth+unix:", daemon.url()),
        ],
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines == ["8 of 8 blocks stored", "128 tokens need no prefill"]


def test_blocks_come_back_and_a_second_store_of_them_is_a_duplicate(daemon: Daemon) -> None:
    keys = new_keys(100)
    with cached_engine(daemon.url()) as engine:
        done = engine.begin_store(keys)
        stored = done.result(HUNG_S)
        assert (stored.stored, stored.duplicate, stored.failed, stored.reason) == (100, 0, 0, "")
        assert (done.blocks_done, done.blocks_total) == (100, 100)
        for _ in range(3):  # each kind of pages
            loaded = engine.load(keys)
            assert loaded.hit_blocks == loaded.usable_blocks == 100
            assert loaded.loaded.all()
            assert (loaded.reason, loaded.bytes) == ("", 100 * PAGE_BYTES)
        again = engine.store([*keys[90:], *new_keys(2)], parent=keys[89])
        assert (again.stored, again.duplicate, again.failed) == (2, 10, 0)
        assert engine.load(new_keys(3)).reason == ""  # a miss is no failure
        found = engine.cache.lookup([*keys[:5], *new_keys(2)])
        assert (found.hit_blocks, found.present.sum(), found.reason) == (5, 5, "")


def test_any_pages_and_keys_that_fit_are_taken(daemon: Daemon) -> None:
    torch = pytest.importorskip("torch")
    half = np.random.default_rng(3).random((6, 2, 16, 4, 64)).astype(np.float16)
    contract = kvhearth.contract_for(half, model="m", revision="r")
    wide = np.zeros((6, 2, 16, 4, 128), np.float16)
    strided = wide[..., ::2]
    targets: list[Any] = [np.zeros_like(half), [np.zeros_like(each) for each in half], strided]
    targets += [torch.zeros(half.shape, dtype=torch.float16), half.view(np.uint16) * 0]
    with torch.inference_mode():
        targets.append([torch.zeros(half.shape[1:], dtype=torch.float16) for _ in half])
    frozen = half.copy()
    frozen.flags.writeable = False
    swapped = np.ascontiguousarray(half.transpose(0, 2, 1, 3, 4)).transpose(0, 2, 1, 3, 4)
    sources = [half, frozen, list(half), torch.from_numpy(half), np.asfortranarray(half), swapped]
    with kvhearth.open(daemon.url(), contract) as cache:
        for turn, (source, target) in enumerate(zip(sources, targets, strict=True)):
            keys = [f"block {turn} {index}" for index in range(5)] + [1000 + turn]
            assert cache.store(keys, source).result(HUNG_S).stored == 6
            assert cache.load(keys, target).result(HUNG_S).usable_blocks == 6
            got = np.array([np.asarray(each) for each in target])
            assert got.tobytes() == half.tobytes(), turn
    assert not wide[..., 1::2].any()


def test_touched_blocks_outlive_others_of_their_age(daemon: Daemon) -> None:
    keys = new_keys(100)
    with cached_engine(daemon.url()) as engine:
        assert engine.store(keys).stored == 100
        engine.cache.touch(keys[:50])
    with cached_engine(daemon.url(), engine_id="other") as engine:
        for _ in range(3):  # more than the memory holds
            assert engine.store(new_keys(100)).stored == 100
        present = engine.cache.lookup(keys).present
    assert present[:50].all(), present
    assert not present[50:].any(), present


def test_stores_end_in_the_order_of_their_calls(daemon: Daemon) -> None:
    order: list[int] = []
    with cached_engine(daemon.url()) as engine:
        futures = []
        for index in range(12):
            future = engine.begin_store(new_keys(1 + index * 7 % 20))
            future.add_done_callback(lambda _, index=index: order.append(index))
            futures.append(future)
        assert {future.result(HUNG_S).failed for future in futures} == {0}
    assert order == list(range(12))


def test_a_full_queue_refuses_at_once_and_holds_its_bound(daemon: Daemon) -> None:
    GateCopier.gate.clear()
    with cached_engine(daemon.url(), queue_blocks_max=40, copiers=GateCopier) as engine:
        keys = new_keys(60)
        taken = [engine.begin_store(keys[i : i + 12]) for i in (0, 12, 24)]
        refused = engine.begin_store(keys[36:48])
        assert refused.result(0).reason is ClientReason.QUEUE_FULL
        taken.append(engine.begin_store(keys[36:40]))  # 40 of 40
        assert engine.begin_store(keys[40:41]).result(0).reason is ClientReason.QUEUE_FULL
        assert engine.begin_store(new_keys(41)).result(0).reason == Reason.TOO_MANY_KEYS
        assert engine.counter("store_throttled") == 13
        assert not any(future.done() for future in taken)
        GateCopier.gate.set()
        assert sum(future.result(HUNG_S).stored for future in taken) == 40
        assert engine.store(keys[40:]).stored == 20
        assert engine.loadable(keys) == 60


# -- a daemon that dies ------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["reserve.after:4", "commit.after:4"])
def test_a_daemon_that_dies_in_mid_store(fault: str) -> None:
    with stopped_daemon() as daemon:
        assert daemon.start(fault)
        with cached_engine(daemon.url(), store_wait_s=2.0) as engine:
            die_in_mid_store(daemon, engine)
        daemon.wait_quiet()


def test_a_daemon_that_dies_under_a_copy(daemon: Daemon) -> None:
    GateCopier.on_store = staticmethod(lambda number: daemon.kill() if number == 4 else None)
    with cached_engine(daemon.url(), store_wait_s=2.0, copiers=GateCopier) as engine:
        die_in_mid_store(daemon, engine)


def die_in_mid_store(daemon: Daemon, engine: CachedEngine) -> None:
    """Stores until the daemon is dead, restarts it, stores again, and checks every byte."""
    keys = new_keys(160)
    futures = [
        engine.begin_store(keys[start : start + 32], keys[start - 1] if start else None)
        for start in range(0, 160, 32)
    ]
    done = [future.result(HUNG_S) for future in futures]
    until(lambda: daemon.dead, "the daemon dies")
    assert sum(one.stored + one.duplicate + one.failed for one in done) == 160
    failed = [one for one in done if one.failed]
    assert failed
    assert all(one.reason for one in failed)
    # While the daemon is away: answers without waiting.
    until(lambda: not engine.client.session_id, "the loss is noticed")
    assert engine.load(keys[:10]).reason == Reason.DAEMON_AWAY
    assert engine.cache.lookup(keys[:10]).reason == Reason.DAEMON_AWAY
    assert engine.store(new_keys(4)).reason

    daemon.start()
    until(lambda: engine.client.wait_ready(0.1), "it attaches anew")
    fresh = new_keys(100)
    again = engine.store(fresh)
    assert (again.stored, again.failed, again.reason) == (100, 0, "")
    assert engine.load(fresh).usable_blocks == 100
    # Acknowledged blocks are served unless evicted; their bytes are right (see close).
    assert engine.loadable(keys) >= 0


def test_a_daemon_that_dies_in_mid_load(daemon: Daemon) -> None:
    with cached_engine(daemon.url(), queue_blocks_max=40 * 32) as engine:
        keys = new_keys(128)
        assert engine.store(keys).stored == 128
        parts = [keys[start : start + 32] for start in (0, 32, 64, 96)]
        futures = [engine.begin_load(parts[index % 4]) for index in range(40)]
        futures[0].result(HUNG_S)
        daemon.kill()
        for future in futures:
            done = future.result(HUNG_S)
            assert done.usable_blocks == 32 or done.reason
        daemon.start()
        until(lambda: engine.client.wait_ready(0.1), "it attaches anew")
        until(lambda: engine.load(keys).usable_blocks == 128, "all is served again")
        assert engine.store(new_keys(30)).stored == 30


def test_without_a_daemon_everything_has_an_outcome_a_reason_and_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with (
        stopped_daemon(arena=False) as daemon,
        cached_engine(daemon.url(), ready=False, store_wait_s=AWAY_S) as engine,
    ):
        keys = new_keys(32)
        futures = [engine.begin_store(keys) for _ in range(8)]
        assert engine.begin_store(keys).result(0).reason is ClientReason.QUEUE_FULL  # 256 of 256
        loaded = engine.load(keys)
        assert (loaded.reason, loaded.usable_blocks) == (Reason.DAEMON_AWAY, 0)
        assert not loaded.loaded.any()
        assert not any(future.done() for future in futures), "a load waits for no store"
        done = [future.result(HUNG_S) for future in futures]
        assert [(one.failed, one.reason) for one in done] == [(32, "daemon_away")] * 8
        assert engine.store(keys).reason == Reason.DAEMON_AWAY
        assert engine.counter("store_dropped") == 9 * 32
        assert [line.partition(":")[0] for line in caplog.messages] == ["session.attach_failed"]


# -- blocks that fail --------------------------------------------------------------------------


def test_a_block_whose_copy_fails_gives_its_slot_back(daemon: Daemon) -> None:
    class OneFails(HostCopier):
        def store_now(self, boot_id: str, pages: Any, extents: Any) -> Any:
            pages = np.where(pages == 4, 99_999, pages)
            return super().store_now(boot_id, pages, extents)

    with cached_engine(daemon.url(), copiers=OneFails) as engine:
        keys = new_keys(10)
        done = engine.begin_store(keys).result(HUNG_S)
        assert (done.stored, done.failed, done.reason) == (9, 1, "bad_page")
        assert engine.counter("abort") == 1
        assert engine.load(keys).usable_blocks == 4
        assert engine.loadable(keys) == 9


def test_bytes_that_rot_are_a_shorter_hit_and_are_reported(daemon: Daemon) -> None:
    with cached_engine(daemon.url()) as engine:
        keys = new_keys(10)
        assert engine.store(keys).stored == 10
        found = engine.client.lookup({0: keys})
        extent = found.groups[0].extents[6]
        arena = engine.client.arena
        assert arena is not None
        arena.view(int(extent["segment"]))[int(extent["offset"]) + 77] ^= 1
        del arena
        engine.client.release(found.lease)
        done = engine.load(keys)
        assert (done.hit_blocks, done.usable_blocks) == (10, 6)
        assert (done.reason, done.failures) == ("checksum_mismatch", {"checksum_mismatch": 1})
        assert done.loaded.tolist() == [True] * 6 + [False] + [True] * 3
        until(lambda: engine.load(keys).hit_blocks == 6, "the daemon removes it")


def test_arguments_that_cannot_be_right_raise_and_harm_nothing(daemon: Daemon) -> None:
    with cached_engine(daemon.url()) as engine:
        cache, keys, pages = engine.cache, new_keys(3), computed(new_keys(3))
        pool = kvhearth.PagedKV([pages])
        frozen = pages.copy()
        frozen.flags.writeable = False
        wrong: list[tuple[Any, Any, str]] = [
            (keys, pages[:2], r"shape \(2, 65536\) for 3 keys"),
            (keys, pages[:, :-1], "65535 bytes a block"),
            (keys, list(pages[:2]), "2 pages for 3 keys"),
            (keys, [pages[0], pages[1], pages[2][:9]], "differ in shape"),
            (keys, pages.astype(np.float32), "float32, the contract's blocks are uint8"),
            (keys, kvhearth.Pages(pool, [0, 1, 3]), r"pages 0\.\.2"),
            (keys, kvhearth.Pages(pool, [0, 1, 1]), "appears twice"),
            (keys, kvhearth.Pages(pool, [0.5, 1, 2]), "float64"),
            (keys, kvhearth.Pages(kvhearth.PagedKV([pages[:, :9]]), [0, 1, 2]), "9 bytes"),
        ]
        for names, memory, text in wrong:
            for call in (cache.store, cache.load):
                with pytest.raises(ValueError, match=text):
                    call(names, memory)
        for names, memory in ((b"key", pages), ([1.5, 2, 3], pages), (keys, 7), (keys, "abc")):
            for call in (cache.store, cache.load):
                with pytest.raises(TypeError):
                    call(names, memory)
        with pytest.raises(ValueError, match="read-only"):
            cache.load(keys, frozen)
        with pytest.raises(ValueError, match="twice"):
            cache.store([keys[0], keys[0], keys[1]], pages)
        with pytest.raises(TypeError):
            cache.lookup([None])  # type: ignore[list-item]
        empty = engine.store([])
        assert (empty.stored, empty.failed, empty.reason) == (0, 0, "")
        assert engine.store(keys).stored == 3


def test_what_the_caller_changes_after_the_call_changes_nothing(daemon: Daemon) -> None:
    GateCopier.gate.clear()
    with cached_engine(daemon.url(), copiers=GateCopier) as engine:
        keys = new_keys(4)
        pages, pool = computed(keys), computed(keys)
        names, numbers, blocks = list(keys[:2]), np.array([2, 3]), list(pages[:2])
        stores = [
            engine.cache.store(names, blocks),
            engine.cache.store(keys[2:], kvhearth.Pages(kvhearth.PagedKV([pool]), numbers)),
        ]
        names.clear()
        blocks.clear()
        numbers[:] = 0
        GateCopier.gate.set()
        assert [future.result(HUNG_S).stored for future in stores] == [2, 2]
        assert engine.load(keys).usable_blocks == 4


def test_a_thread_that_fails_goes_on(daemon: Daemon) -> None:
    def explode(number: int) -> None:
        if number == 2:
            raise RuntimeError("scripted")

    GateCopier.on_store = staticmethod(explode)
    with cached_engine(daemon.url(), copiers=GateCopier) as engine:
        done = engine.begin_store(new_keys(48)).result(HUNG_S)  # three batches
        assert (done.stored, done.failed, done.reason) == (16, 32, "internal")
        assert engine.counter("store_crashes") == 1
        assert engine.store(new_keys(20)).stored == 20


# -- weights that change -----------------------------------------------------------------------


def test_blocks_of_old_weights_are_not_kept_under_the_new_epoch(daemon: Daemon) -> None:
    GateCopier.gate.clear()
    with cached_engine(daemon.url(), copiers=GateCopier) as engine:
        keys = new_keys(64)  # the first batch is under way, the last have not begun
        future = engine.begin_store(keys)
        until(lambda: GateCopier.stores, "the first batch begins")
        assert engine.client.bump_epoch() > 0
        GateCopier.gate.set()
        done = future.result(HUNG_S)
        assert (done.stored, done.failed, done.reason) == (0, 64, Reason.STALE_EPOCH)
        assert engine.load(keys).hit_blocks == 0
        assert engine.store(keys).stored == 64
        assert engine.load(keys).usable_blocks == 64


def test_a_load_that_began_with_old_weights_is_a_miss(daemon: Daemon) -> None:
    begun, bumped = threading.Event(), threading.Event()

    class Slow(HostCopier):
        def load_now(self, *arguments: Any) -> Any:
            begun.set()
            assert bumped.wait(HUNG_S)
            return super().load_now(*arguments)

    with cached_engine(daemon.url(), copiers=Slow) as engine:
        keys = new_keys(40)
        assert engine.store(keys).stored == 40
        future = engine.begin_load(keys)
        assert begun.wait(HUNG_S)
        assert engine.client.bump_epoch() > 0
        bumped.set()
        done = future.result(HUNG_S)
        assert (done.reason, done.usable_blocks) == (Reason.STALE_EPOCH, 0)
        assert not done.loaded.any()


# -- the end -----------------------------------------------------------------------------------


def test_close_finishes_what_it_was_given(daemon: Daemon) -> None:
    keys = new_keys(64)
    with kvhearth.open(daemon.url(), CONTRACT, batch_bytes=4 * PAGE_BYTES) as cache:
        future = cache.store(keys, computed(keys))
    assert future.result(0).stored == 64
    assert cache.store(keys, computed(keys)).result(0).reason == Reason.CLOSED
    assert cache.lookup(keys).reason == Reason.CLOSED
    assert cache.close()


def test_close_fails_what_has_not_begun_in_time(daemon: Daemon) -> None:
    GateCopier.gate.clear()
    with cached_engine(daemon.url(), copiers=GateCopier) as engine:
        keys = new_keys(64)
        future = engine.begin_store(keys)
        later = engine.begin_store(new_keys(3))
        until(lambda: GateCopier.stores, "the first batch begins")
        assert not engine.cache.close(0.1)
        assert not future.done()
        GateCopier.gate.set()
        assert engine.cache.close(HUNG_S)
        done = future.result(0)
        assert (done.stored, done.failed, done.reason) == (16, 48, Reason.CLOSED)
        assert later.result(0).reason == Reason.CLOSED


def test_a_store_that_has_not_begun_can_be_cancelled(daemon: Daemon) -> None:
    GateCopier.gate.clear()
    with cached_engine(daemon.url(), copiers=GateCopier) as engine:
        first = engine.begin_store(new_keys(4))
        until(lambda: GateCopier.stores, "the first one begins")
        keys = new_keys(4)
        second = engine.begin_store(keys)
        assert not first.cancel()
        assert second.cancel()
        GateCopier.gate.set()
        assert first.result(HUNG_S).stored == 4
        assert engine.store(new_keys(4)).stored == 4
        assert not engine.cache.lookup(keys).present.any()


def test_a_client_that_closes_first_ends_the_stores(daemon: Daemon) -> None:
    with cached_engine(daemon.url(), store_wait_s=0.3) as engine:
        keys = new_keys(64)
        future = engine.begin_store(keys)
        assert engine.client.close(HUNG_S)
        done = future.result(HUNG_S)
        assert done.stored + done.duplicate + done.failed == 64
        assert engine.load(keys).reason == Reason.CLOSED


FORKS = """
import os, signal, sys
import numpy as np
import kvhearth
from support.cached import CONTRACT, PAGE_BYTES
from kvhearth_lab.harness import HUNG_S

cache = kvhearth.open(sys.argv[1], CONTRACT, wait_s=HUNG_S)
pages = np.zeros((1, PAGE_BYTES), np.uint8)
assert cache.store([b"1" * 32], pages).result(HUNG_S).stored == 1
child = os.fork()
if not child:
    signal.alarm(int(HUNG_S))
    status = 1
    try:
        assert cache.store([b"2" * 32], pages).result(HUNG_S).reason == "closed"
        assert cache.load([b"1" * 32], pages).result(HUNG_S).reason == "closed"
        assert cache.lookup([b"1" * 32]).reason == "closed"
        assert cache.close()
        status = 0
    finally:
        os._exit(status)
assert os.waitpid(child, 0)[1] == 0
assert cache.store([b"3" * 32], pages).result(HUNG_S).stored == 1
print("ends without close")
"""


def test_a_forked_child_is_told_nothing_and_a_process_may_just_end(daemon: Daemon) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS, daemon.url()],
        capture_output=True,
        text=True,
        timeout=HUNG_S,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[1])},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends without close\n", "")

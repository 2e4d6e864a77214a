"""Pipelines and the slot pool with a scripted daemon: lack of room, and sessions that end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.attached import url_of
from support.cuda_fake import FakeDevice
from support.fake_daemon import PAGE_BYTES, SLOTS, FakeDaemon, extents, key, running, until
from support.threads import left_since, own_threads

from kvhearth.client import KVClient, connect
from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.copiers.cuda import CudaCopier
from kvhearth.errors import KVHearthError, Reason
from kvhearth.model import pack_bits
from kvhearth.page_layout import PagedKV
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.proto.v1 import types_pb2
from kvhearth.transfer import CopierPool, LoadPipeline, Stock, StoreDone, StorePipeline
from kvhearth.transfer.admission import Admission
from kvhearth.transfer.hit import usable_tokens
from kvhearth.worker_thread import Worker
from kvhearth_server.core.lookup import hit_boundaries

CONTRACT = Contract(
    "m",
    "r",
    "uint8",
    (
        GroupSpec(GroupKind.FULL, 16, PAGE_BYTES),
        GroupSpec(GroupKind.SLIDING_WINDOW, 16, PAGE_BYTES, window_tokens=32),
    ),
)
DONE_S = 20.0
MADE: list[Any] = []
"""Objects of the running test that must be closed."""


class SessionManager:
    """The scripted daemon's slots: grants free ones, ``room`` of them at most."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self.daemon = daemon
        self.room = SLOTS
        self.short = Reason.NO_SPACE
        self.free = list(range(SLOTS))
        self.commits: list[Any] = []
        daemon.generations[:] = np.ones(SLOTS, np.uint32).tobytes()
        self._always("Reserve", self._reserve)
        self._always("Commit", self._commit)
        self._always("Abort", self._abort)

    def _always(self, rpc: str, function: Any) -> None:
        def answer(request: Any) -> Any:
            self.daemon.answer(rpc, answer)
            return function(request)

        self.daemon.answer(rpc, answer)

    def _reserve(self, request: Any) -> Any:
        reply = pb.ReserveResponse()
        for group in request.groups:
            count = min(group.count, self.room, len(self.free))
            slots, self.free = self.free[:count], self.free[count:]
            self.room -= count
            records = np.concatenate([extents(0), *(extents(1, slot) for slot in slots)])
            reply.groups.append(
                types_pb2.GroupExtents(group=group.group, count=count, extents=records.tobytes())
            )
            if count < group.count:
                reply.short_reason = str(self.short)
        return reply

    def _commit(self, request: Any) -> Any:
        self.commits.append(request)
        reply = pb.CommitResponse()
        for group in request.groups:
            self._take_back(group.slots)
            count = len(group.keys) // 32
            bits = pack_bits(np.ones(count, np.bool_))
            reply.stored.append(types_pb2.GroupBitmap(group=group.group, bits=bits))
        return reply

    def _abort(self, request: Any) -> Any:
        for group in request.groups:
            self._take_back(group.slots)
            self.room += len(group.slots) // 4
        return pb.AbortResponse()

    def _take_back(self, slots: bytes) -> None:
        self.free += np.frombuffer(slots, np.uint32).tolist()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with running(tmp_path, CONTRACT) as daemon:
        yield daemon


@pytest.fixture
def session_manager(daemon: FakeDaemon) -> SessionManager:
    return SessionManager(daemon)


@pytest.fixture
def client(daemon: FakeDaemon, tmp_path: Path) -> Iterator[KVClient]:
    others = own_threads()
    client = connect(url_of(tmp_path), CONTRACT, engine_id="e")
    assert client.wait_ready(DONE_S)
    MADE.clear()
    yield client
    while MADE:
        assert MADE.pop().close(DONE_S)
    assert client.close(DONE_S)
    assert left_since(others) == []


def pages() -> dict[int, PagedKV]:
    """Pages of both groups."""
    rng = np.random.default_rng(5)
    return {group: PagedKV([rng.integers(0, 255, (64, PAGE_BYTES), np.uint8)]) for group in (0, 1)}


def made(each: Any) -> Any:
    """Registers ``each`` to be closed before its client."""
    MADE.append(each)
    return each


def pipeline(client: KVClient, **changes: Any) -> StorePipeline:
    """A small pipeline."""
    options = {"queue_blocks_max": 64, "stock_blocks_max": 2, "batch_blocks": 2, **changes}
    kv = options.pop("kv", None) or pages()
    stores: StorePipeline = made(StorePipeline(client, kv, **options))
    return stores


def store(stores: StorePipeline, first: int, count: int, group: int = 0) -> StoreDone | None:
    """Stores ``count`` blocks from key ``first`` on; None if that does not end at once."""
    ticket = stores.submit(group, [key(first + i) for i in range(count)], range(count))
    assert ticket is not None
    return stores.wait(ticket, DONE_S)


# -- lack of room ------------------------------------------------------------------------------


def test_a_store_waits_for_room_and_is_not_dropped_at_once(
    client: KVClient, session_manager: SessionManager
) -> None:
    session_manager.room = 6
    stores = pipeline(client, reserve_wait_s=15.0)
    ticket = stores.submit(0, [key(i) for i in range(12)], range(12))
    assert ticket is not None
    assert stores.wait(ticket, 0.4) is None
    session_manager.room = 64
    done = stores.wait(ticket, DONE_S)
    assert done is not None
    assert (done.stored, done.reason) == (12, "")
    assert client.counters().get("store_dropped", 0) == 0


def test_a_store_that_gets_no_room_keeps_its_beginning(
    client: KVClient, session_manager: SessionManager
) -> None:
    session_manager.room = 8
    stores = pipeline(client, reserve_wait_s=1.5)
    first = store(stores, 20, 2)  # so the daemon no longer counts as silent
    assert first is not None
    assert first.stored == 2
    started = time.monotonic()
    done = store(stores, 0, 12)
    assert time.monotonic() - started >= 1.5
    assert done is not None
    assert (done.stored, done.failed, done.reason) == (6, 6, Reason.NO_SPACE)
    assert client.counters()["store_dropped"] == 6
    kept = b"".join(
        group.keys for request in session_manager.commits[1:] for group in request.groups
    )
    assert kept == b"".join(key(i) for i in range(6))
    session_manager.room = 64
    again = store(stores, 6, 6)
    assert again is not None
    assert (again.stored, again.reason) == (6, "")
    stores.check_books()


def test_a_refusal_is_a_reason_too(client: KVClient, daemon: FakeDaemon) -> None:
    for _ in range(200):
        daemon.refuse_next("Reserve", Reason.HELD_CAP)
    stores = pipeline(client, reserve_wait_s=1.0)
    done = store(stores, 0, 3)
    assert done is not None
    assert (done.failed, done.reason) == (3, Reason.HELD_CAP)
    assert len(daemon.requests["Reserve"]) < 40, "it backs off"


def test_idle_stock_of_one_group_feeds_another(
    client: KVClient, session_manager: SessionManager
) -> None:
    session_manager.room = 4
    stock = made(Stock(client, {0: 4, 1: 4}))
    until(lambda: stock.held(0) == 4)
    assert stock.held(1) == 0
    taken = stock.take(1, 2, wait_s=DONE_S)
    assert len(taken) == 2
    assert stock.held(0) == 0
    stock.give_back(1, taken)
    assert stock.close(DONE_S)
    until(lambda: len(session_manager.free) == SLOTS)


def test_a_commit_carries_one_chain_of_each_group(
    client: KVClient, session_manager: SessionManager
) -> None:
    stores = pipeline(client)
    tickets = [stores.submit(g, [key(g)], [0], parent=key(9)) for g in (0, 1, 0, 1, 0, 1)]
    assert None not in tickets
    assert stores.drain(DONE_S)
    assert [done.stored for done in stores.poll()] == [1] * 6
    for request in session_manager.commits:
        groups = [group.group for group in request.groups]
        assert len(groups) == len(set(groups))
        assert {group.parent for group in request.groups} == {key(9)}


# -- sessions that end -------------------------------------------------------------------------


def test_a_stock_is_dropped_with_its_session_even_within_a_boot(
    client: KVClient, daemon: FakeDaemon, session_manager: SessionManager
) -> None:
    stock = made(Stock(client, {0: 4}))
    until(lambda: stock.held(0) == 4)
    first = client.session_id
    daemon.drop_lines()
    until(lambda: client.session_id not in ("", first))
    assert client.boot_id == daemon.boot_id
    taken = stock.take(0, 2, wait_s=DONE_S)
    assert taken.session_id == client.session_id
    # The old session's slots are the daemon's business: no client aborts them.
    assert set(taken.extents["slot"].ravel().tolist()) == {4, 5}
    assert not daemon.requests["Abort"]


def test_a_copier_lets_the_old_mapping_go_before_the_client_attaches_anew(
    client: KVClient, daemon: FakeDaemon, session_manager: SessionManager
) -> None:
    stores = pipeline(client)
    assert store(stores, 0, 4)
    first = client.session_id
    daemon.drop_lines()
    until(lambda: client.session_id not in ("", first))
    done = store(stores, 4, 4)
    assert done is not None
    assert (done.stored, done.reason) == (4, "")
    inode = os.fstat(daemon._memory[0]).st_ino  # other tests may have mapped other segments
    maps = Path("/proc/self/maps").read_text().splitlines()
    segments = [line for line in maps if "memfd:segment" in line and str(inode) in line.split()]
    # Only the test's daemon and the client's new session map it.
    assert len(segments) == 2


def test_an_unfinished_copy_holds_up_the_next_session(
    client: KVClient, daemon: FakeDaemon, session_manager: SessionManager
) -> None:
    torch = pytest.importorskip("torch")
    device = FakeDevice()
    kv = {0: PagedKV([torch.zeros((8, PAGE_BYTES), dtype=torch.uint8)])}
    stores = pipeline(
        client,
        kv=kv,
        queue_blocks_max=8,
        stock_blocks_max=4,
        copiers=lambda pages, arena: CudaCopier(pages, arena, device=device),
    )
    device.held = True
    ticket = stores.submit(0, [key(0)], [0])
    assert ticket is not None
    until(lambda: stores._flights)
    attaches = client.counters()["attaches"]
    daemon.drop_lines()
    until(lambda: client.counters().get("drains_unfinished"))
    assert client.counters()["attaches"] == attaches
    assert stores.wait(ticket, 0.05) is None, "its page is still being read"
    assert not stores.close(0.1)
    device.held = False
    done = stores.wait(ticket, DONE_S)
    assert done is not None
    assert (done.failed, done.reason) == (1, Reason.STALE_BOOT)
    until(lambda: client.counters()["attaches"] > attaches)


def test_sums_are_the_daemons_where_the_copier_takes_none(
    client: KVClient, session_manager: SessionManager
) -> None:
    torch = pytest.importorskip("torch")
    kv = {0: PagedKV([torch.ones((8, PAGE_BYTES), dtype=torch.uint8)])}
    stores = pipeline(
        client,
        kv=kv,
        queue_blocks_max=8,
        stock_blocks_max=4,
        copiers=lambda pages, arena: CudaCopier(pages, arena, device=FakeDevice()),
    )
    done = store(stores, 0, 4)
    assert done is not None
    assert done.stored == 4
    assert session_manager.commits[0].groups[0].checksums == b""


# -- loads -------------------------------------------------------------------------------------


def test_a_load_that_cannot_begin_in_time_is_given_up(client: KVClient, daemon: FakeDaemon) -> None:
    loads = made(LoadPipeline(client, pages()))
    daemon.slow_next("Lookup", 0.4)
    done = loads.load_now({0: ([key(0)], [0])}, deadline_s=0.05)
    assert done is not None
    assert done.reason == Reason.DEADLINE
    assert not done.loaded[0].any()
    loads.check_books()


def test_loads_are_bounded(client: KVClient, daemon: FakeDaemon) -> None:
    loads = made(LoadPipeline(client, pages(), queue_blocks_max=4))
    answered = threading.Event()
    daemon.hold_next("Lookup", answered)
    assert loads.submit({0: ([key(0), key(1)], [0, 1]), 1: ([key(0)], [0])}) is not None
    assert loads.submit({0: ([key(0), key(1)], [2, 3])}) is None
    assert loads.submit({0: ([key(0)], [2])}) is not None
    assert client.counters()["load_throttled"] == 2
    answered.set()
    assert loads.drain(DONE_S)
    assert [done.usable_tokens for done in loads.poll()] == [0, 0]


# -- parts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [None, 5, "x", [1], [b"short"]])
def test_arguments_that_cannot_be_right_are_an_outcome(client: KVClient, keys: Any) -> None:
    stores, loads = pipeline(client), made(LoadPipeline(client, pages()))
    for group, parent in ((0, b""), ([], b""), (0, 7)):
        ticket = stores.submit(group, keys, [0], parent)  # type: ignore[arg-type]
        assert ticket is not None
        done = stores.wait(ticket, DONE_S)
        assert done is not None
        assert done.reason
    for groups in (keys, {0: keys}, {0: (keys, [0])}, {"x": (keys, None)}):
        for each in (loads.load_now(groups), loads.load_now(groups)):
            assert each is not None
            assert each.reason
            assert not each.usable_tokens


def test_a_copier_that_cannot_be_made_is_none(
    client: KVClient, caplog: pytest.LogCaptureFixture
) -> None:
    def make(*_: Any) -> Any:
        raise MemoryError("scripted")

    copier_pool = CopierPool(client, pages(), make)
    assert [copier_pool.copier(0, client.boot_id) for _ in range(3)] == [None] * 3
    assert len([each for each in caplog.records if "no copier" in each.getMessage()]) == 1
    assert copier_pool.close(1.0)


def test_what_does_not_fit_the_contract_is_refused(client: KVClient, tmp_path: Path) -> None:
    narrow = PagedKV([np.zeros((4, 64), np.uint8)])
    for kv in ({0: narrow}, {2: pages()[0]}, {}):
        with pytest.raises(KVHearthError, match="bad_contract"):
            CopierPool(client, kv)
    with pytest.raises(KVHearthError, match="bad_contract"):
        Stock(client, {0: 0})
    with pytest.raises(KVHearthError, match="config_invalid"):
        pipeline(client, batch_blocks=0)
    two_ranks = Contract(
        "m", "r", "uint8", (GroupSpec(GroupKind.FULL, 16, PAGE_BYTES, shards=2),), tensor_parallel=2
    )
    other = connect(url_of(tmp_path), two_ranks, engine_id="e2")
    with pytest.raises(KVHearthError, match="2 ranks"):
        LoadPipeline(other, {0: pages()[0]})
    assert other.close()


@pytest.mark.parametrize("seed", range(20))
def test_reach_is_what_the_daemon_would_say_of_the_loaded_blocks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    kinds = [
        GroupSpec(GroupKind.FULL, 16, 4096),
        GroupSpec(GroupKind.SLIDING_WINDOW, 32, 4096, window_tokens=int(rng.integers(2, 200))),
        GroupSpec(GroupKind.MAMBA, 48, 4096),
    ]
    for _ in range(50):
        chosen = [kind for kind in kinds if rng.random() < 0.6] or kinds[:1]
        tokens = int(rng.integers(0, 600))
        groups = [
            (spec, rng.random(tokens // spec.block_tokens) < rng.choice([0.5, 0.95, 1.0]))
            for spec in chosen
        ]
        longest = [int(tokens) for tokens in hit_boundaries(groups)]
        for hit_tokens in [0, *longest[:3]]:
            expected = next((each for each in longest if each <= hit_tokens), 0)
            assert usable_tokens(groups, hit_tokens) == expected


def test_admission_counts_in_and_out() -> None:
    door: Admission[str] = Admission(10, outcomes_max=3)
    first, second = door.enter(6, 0), door.enter(4, 0)
    assert (first, second, door.enter(1, 0.01)) == (1, 2, 0)
    assert door.enter(0, 0) == 3
    assert door.enter(0, 0) == 0, "as many outcomes as it may keep"
    door.leave(second, "b")
    door.leave(3, "c")
    assert door.claim(first, 0.01) is None
    door.leave(first, "a")
    assert door.claim(first, 0) == "a"
    assert door.claim(first, 0) is None
    assert door.claim_all() == ["b", "c"]
    door.check_books()
    door.close()
    assert door.enter(1, DONE_S) == 0
    assert door.wait_empty(0)


def test_a_worker_goes_on_after_a_step_and_a_recovery_that_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[str] = []

    def step() -> None:
        seen.append("step")
        if len(seen) < 4:
            raise RuntimeError("scripted")
        time.sleep(0.001)

    def recover() -> None:
        seen.append("recover")
        raise ValueError("scripted")

    worker = Worker("kvhearth-test", step, recover)
    worker.start()
    until(lambda: len(seen) > 6)
    assert worker.stop(DONE_S)
    assert seen[:6] == ["step", "recover", "step", "recover", "step", "step"]
    assert "going on" in caplog.text

"""The simple API and its parts with a scripted daemon: lack of room, and sessions that end."""

from __future__ import annotations

import os
import pydoc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.attached import connected
from support.cuda_fake import FakeDevice
from support.fake_daemon import PAGE_BYTES, SLOTS, FakeDaemon, extents, key, running
from support.scripted_clock import HeldCall, ScriptedClock
from support.tower import Tower, ended

import kvhearth
from kvhearth.cache import Cache, LoadResult, StoreResult
from kvhearth.client import KVClient
from kvhearth.contract import Contract, GroupKind, GroupSpec
from kvhearth.copiers.cuda import CudaCopier
from kvhearth.errors import ClientReason, KVHearthError, Reason
from kvhearth.model import pack_bits
from kvhearth.page_layout import PagedKV
from kvhearth.proto.v1 import cache_pb2 as pb
from kvhearth.proto.v1 import types_pb2
from kvhearth.results import usable_tokens
from kvhearth.transfer import CopierPool, ReservationPool
from kvhearth.transfer.lanes import Transfer
from kvhearth.transfer.memory import Pages
from kvhearth_lab.harness import HUNG_S
from kvhearth_server.core.lookup import hit_boundaries

FULL = GroupSpec(GroupKind.FULL, 16, PAGE_BYTES)
WINDOW = GroupSpec(GroupKind.SLIDING_WINDOW, 16, PAGE_BYTES, window_tokens=32)
CONTRACT = Contract("m", "r", "uint8", (FULL,))
TWO_GROUPS = Contract("m", "r", "uint8", (FULL, WINDOW))


class Rig:
    """A client of a scripted daemon that grants free slots, ``room`` of them at most."""

    def __init__(self, daemon: FakeDaemon, client: KVClient, clock: ScriptedClock) -> None:
        self.daemon = daemon
        self.client = client
        self.clock = clock
        self.room = SLOTS
        self.short = Reason.NO_SPACE
        self.free = list(range(SLOTS))
        self.commits: list[Any] = []
        self._made: list[Any] = []
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

    def wait_free(self) -> None:
        """Wait until every slot has come back."""
        self.clock.until(lambda: len(self.free) == SLOTS)

    def lose_session(self) -> None:
        """End the session, and wait for the next one."""
        first = self.client.session_id
        self.daemon.drop_lines()
        self.clock.until(lambda: self.client.session_id not in ("", first))

    def made(self, each: Any) -> Any:
        """Close ``each`` before the client."""
        self._made.append(each)
        return each

    def cache(self, **options: Any) -> Cache:
        """Make a cache that copies two blocks at once."""
        cache: Cache = self.made(Cache(self.client, **{"batch_bytes": 2 * PAGE_BYTES, **options}))
        return cache

    def stored(self, cache: Cache, first: int, count: int, pages: Any = None) -> StoreResult:
        """Store ``count`` blocks from key ``first`` on."""
        return self.clock.result(begin_store(cache, first, count, pages))

    def close(self) -> None:
        """Close everything but the client."""
        while self._made:
            assert self._made.pop().close(HUNG_S)


@pytest.fixture
def rig(clock: ScriptedClock, tmp_path: Path) -> Iterator[Rig]:
    with (
        running(tmp_path, CONTRACT) as daemon,
        connected(tmp_path, contract=CONTRACT, clock=clock) as client,
    ):
        assert client.wait_ready(HUNG_S)
        rig = Rig(daemon, client, clock)
        yield rig
        rig.close()


def pages() -> PagedKV:
    """Some pages."""
    return PagedKV([np.zeros((64, PAGE_BYTES), np.uint8)])


def begin_store(cache: Cache, first: int, count: int, pages: Any = None) -> Transfer[StoreResult]:
    """Begin to store ``count`` blocks from key ``first`` on."""
    keys = [key(first + index) for index in range(count)]
    return cache.store(keys, np.zeros((count, PAGE_BYTES), np.uint8) if pages is None else pages)


def begin_load(cache: Cache, first: int, count: int) -> Transfer[LoadResult]:
    """Begin to load ``count`` blocks from key ``first`` on."""
    keys = [key(first + index) for index in range(count)]
    return cache.load(keys, np.zeros((count, PAGE_BYTES), np.uint8))


# -- lack of room ------------------------------------------------------------------------------


def test_a_store_waits_for_room_and_is_not_dropped_at_once(rig: Rig) -> None:
    rig.room = 6
    future = begin_store(rig.cache(store_wait_s=15.0), 0, 12)
    rig.clock.until(lambda: future.blocks_done == 6)
    rig.clock.pass_time(14.0)
    assert (future.done(), future.blocks_done, future.blocks_total) == (False, 6, 12)
    rig.room = 64
    done = rig.clock.result(future)
    assert (done.stored, done.reason) == (12, "")
    assert rig.client.counters().get("store_dropped", 0) == 0


def test_a_store_that_gets_no_room_keeps_its_beginning(rig: Rig) -> None:
    rig.room = 8
    cache = rig.cache(store_wait_s=1.5)
    assert rig.stored(cache, 20, 2).stored == 2
    started = rig.clock.now()
    done = rig.stored(cache, 0, 12)
    assert 1.5 <= rig.clock.now() - started < 2.0
    assert (done.stored, done.failed, done.reason) == (6, 6, Reason.NO_SPACE)
    assert rig.client.counters()["store_dropped"] == 6
    commits = [group for request in rig.commits[1:] for group in request.groups]
    assert [group.keys for group in commits] == [key(i) + key(i + 1) for i in (0, 2, 4)]
    assert [group.parent for group in commits] == [b"", key(1), key(3)], "one chain"
    rig.room = 64
    again = rig.stored(cache, 6, 6)
    assert (again.stored, again.reason) == (6, "")


def test_pages_are_let_go_after_their_transfer(rig: Rig) -> None:
    cache, pages = rig.cache(), np.zeros((4, PAGE_BYTES), np.uint8)
    gone = weakref.ref(pages)
    assert rig.stored(cache, 0, 4, pages).stored == 4
    del pages
    rig.clock.until(lambda: gone() is None)


def test_a_refusal_is_a_reason_too(rig: Rig) -> None:
    rig.daemon.answers["Reserve"].clear()
    for _ in range(200):
        rig.daemon.refuse_next("Reserve", Reason.HELD_CAP)
    done = rig.stored(rig.cache(store_wait_s=1.0), 0, 3)
    assert (done.failed, done.reason) == (3, Reason.HELD_CAP)
    assert len(rig.daemon.requests["Reserve"]) < 40, "it backs off"


def test_a_store_that_waits_for_room_keeps_its_place_and_can_be_cancelled(rig: Rig) -> None:
    rig.room = 0
    cache = rig.cache(store_wait_s=60.0)
    first, second = begin_store(cache, 0, 4), begin_store(cache, 4, 1)
    rig.clock.until(lambda: len(rig.daemon.requests["Reserve"]) > 3)
    assert {request.groups[0].count for request in rig.daemon.requests["Reserve"]} == {2}
    assert first.cancel()
    rig.room = 4
    assert rig.clock.result(second).stored == 1
    assert len(rig.free) == SLOTS


def test_a_store_that_is_cancelled_while_it_gets_slots_gives_them_back(rig: Rig) -> None:
    cache, call = rig.cache(), HeldCall(rig.clock)
    answer = rig.daemon.answers["Reserve"].popleft()
    rig.daemon.answer("Reserve", lambda request: call(request) or answer(request))
    future = begin_store(cache, 0, 2)
    rig.clock.until(lambda: call.reached)
    assert future.cancel()
    call.release()
    assert rig.stored(cache, 2, 2).stored == 2
    [commit] = rig.commits
    assert [group.keys[:32] for group in commit.groups] == [key(2)]
    rig.wait_free()


def test_a_store_whose_copier_cannot_be_made_is_given_up(rig: Rig) -> None:
    def make(*_: Any) -> Any:
        raise MemoryError("scripted")

    done = rig.stored(rig.cache(copiers=make, store_wait_s=0.3), 0, 4)
    assert (done.failed, done.reason) == (4, "copy_failed")
    rig.wait_free()


def test_idle_stock_of_one_group_feeds_another(rig: Rig, tmp_path: Path) -> None:
    with connected(tmp_path, contract=TWO_GROUPS, clock=rig.clock) as client:
        assert client.wait_ready(HUNG_S)
        rig.room = 4
        slot_pool = ReservationPool(client, {0: 4, 1: 4})
        rig.clock.until(lambda: slot_pool.held(0) == 4)
        assert slot_pool.held(1) == 0
        taken = slot_pool.take(1, 2, wait_s=HUNG_S)
        assert len(taken) == 2
        assert slot_pool.held(0) == 0
        slot_pool.give_back(1, taken)
        assert slot_pool.close(HUNG_S)
        rig.wait_free()


# -- sessions that end -------------------------------------------------------------------------


def test_a_stock_is_dropped_with_its_session_even_within_a_boot(rig: Rig) -> None:
    slot_pool = rig.made(ReservationPool(rig.client, {0: 4}))
    rig.clock.until(lambda: slot_pool.held(0) == 4)
    rig.lose_session()
    assert rig.client.boot_id == rig.daemon.boot_id
    taken = slot_pool.take(0, 2, wait_s=HUNG_S)
    assert taken.session_id == rig.client.session_id
    # The old session's slots are the daemon's business: no client aborts them.
    assert set(taken.extents["slot"].ravel().tolist()) == {4, 5}
    assert not rig.daemon.requests["Abort"]


def test_a_copier_lets_the_old_mapping_go_before_the_client_attaches_anew(rig: Rig) -> None:
    cache, pages = rig.cache(), np.zeros((8, PAGE_BYTES), np.uint8)
    pool = Pages(PagedKV([pages]), range(4))  # its copier is kept from store to store
    assert rig.stored(cache, 0, 4, pool).stored == 4
    rig.lose_session()
    done = rig.stored(cache, 4, 4, pool)
    assert (done.stored, done.reason) == (4, "")
    inode = os.fstat(rig.daemon._memory[0]).st_ino  # other tests may have mapped other segments
    maps = Path("/proc/self/maps").read_text().splitlines()
    segments = [line for line in maps if "memfd:segment" in line and str(inode) in line.split()]
    # Only the test's daemon and the client's new session map it.
    assert len(segments) == 2


class ImpatientCopier(CudaCopier):
    """Waits for no copy when it is closed, since that takes real time."""

    def close(self, deadline_s: float = 30.0) -> bool:
        return super().close(0.0)


def test_an_unfinished_copy_holds_up_the_next_session(rig: Rig) -> None:
    torch = pytest.importorskip("torch")
    device = FakeDevice()
    copiers: list[CudaCopier] = []

    def make(kv: PagedKV, arena: Any) -> CudaCopier:
        copiers.append(ImpatientCopier(kv, arena, device=device))
        return copiers[-1]

    cache = rig.cache(copiers=make)
    device.held = True
    future = begin_store(cache, 0, 1, torch.zeros((1, PAGE_BYTES), dtype=torch.uint8))
    rig.clock.until(lambda: copiers and copiers[0]._flights)
    attaches = rig.client.counters()["attaches"]
    rig.daemon.drop_lines()
    rig.clock.hold()
    rig.clock.until(lambda: rig.client.counters().get("drains_unfinished"))
    assert rig.client.counters()["attaches"] == attaches
    assert not future.done(), "its page is still being read"
    assert not cache.close(0.1)
    rig.clock.unhold()
    device.held = False
    done = rig.clock.result(future)
    assert (done.failed, done.reason) == (1, Reason.STALE_BOOT)
    rig.clock.until(lambda: rig.client.counters()["attaches"] > attaches)


# -- loads -------------------------------------------------------------------------------------


def test_loads_are_bounded(rig: Rig) -> None:
    cache, call = rig.cache(queue_blocks_max=4), HeldCall(rig.clock)
    rig.daemon.answer("Lookup", call)
    first = begin_load(cache, 0, 3)
    assert begin_load(cache, 0, 2).result(0).reason is ClientReason.QUEUE_FULL
    second = begin_load(cache, 0, 1)
    assert rig.client.counters()["load_throttled"] == 2
    call.release()
    assert [rig.clock.result(future).usable_blocks for future in (first, second)] == [0, 0]


# -- parts -------------------------------------------------------------------------------------


def test_a_part_is_copied_while_the_rest_is_promoted(rig: Rig) -> None:
    """Each part once, under the lease of the lookup that found it."""
    begun, copied = list[Transfer[LoadResult]](), list[int]()

    class Watched(Tower):
        def _answer(self, request: Any) -> Any:
            copied.append(sum(each.blocks_done for each in begun))
            return super()._answer(request)

    tower = Watched(rig.daemon, dram=2, step=2)
    begun.append(begin_load(rig.cache(), 0, 6))
    done = rig.clock.result(begun[0])
    assert (done.loaded.tolist(), done.usable_blocks, done.reason) == ([True] * 6, 6, "")
    assert (copied, done.bytes) == ([0, 2, 4], 6 * PAGE_BYTES)
    leases = [request.lease_id for request in tower.asked]
    rig.clock.until(lambda: ended(rig.daemon)[0] == sorted(leases))


def test_help_leads_with_the_api_which_is_typed() -> None:
    text = pydoc.render_doc(kvhearth, renderer=pydoc.plaintext)
    places = [text.index(name) for name in ("kvhearth.open(", ".store(", ".load(", "PACKAGE CON")]
    assert places == sorted(places)
    assert places[-1] < 2500
    assert [name for name in kvhearth.__all__ if not hasattr(kvhearth, name)] == []
    assert (Path(kvhearth.__file__).parent / "py.typed").exists()
    with pytest.raises(AttributeError):
        kvhearth.no_such_name  # noqa: B018


def test_a_copier_that_cannot_be_made_is_none(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def make(*_: Any) -> Any:
        raise MemoryError("scripted")

    copier_pool = CopierPool(rig.client, {0: pages()}, make)
    assert [copier_pool.copier(0, rig.client.boot_id) for _ in range(3)] == [None] * 3
    assert len([each for each in caplog.records if "no copier" in each.getMessage()]) == 1
    assert copier_pool.close(1.0)


def test_what_does_not_fit_the_contract_is_refused(rig: Rig, tmp_path: Path) -> None:
    narrow = PagedKV([np.zeros((4, 64), np.uint8)])
    for kv in ({0: narrow}, {1: pages()}, {}):
        with pytest.raises(KVHearthError, match="bad_contract"):
            CopierPool(rig.client, kv)
    with pytest.raises(KVHearthError, match="bad_contract"):
        ReservationPool(rig.client, {0: 0})
    with pytest.raises(KVHearthError, match="config_invalid"):
        Cache(rig.client, batch_bytes=0)
    wide = GroupSpec(GroupKind.FULL, 16, PAGE_BYTES, shards=2)
    for contract, text in (
        (Contract("m", "r", "uint8", (wide,), tensor_parallel=2), "2 ranks"),
        (TWO_GROUPS, "one KV group"),
    ):
        with (
            connected(tmp_path, contract=contract, clock=rig.clock) as other,
            pytest.raises(KVHearthError, match=text),
        ):
            Cache(other)


def test_reach_is_what_the_daemon_would_say_of_the_loaded_blocks() -> None:
    rng, wrong = np.random.default_rng(1), []
    for _ in range(1000):
        kinds = [
            GroupSpec(GroupKind.FULL, 16, 4096),
            GroupSpec(GroupKind.SLIDING_WINDOW, 32, 4096, window_tokens=int(rng.integers(2, 200))),
            GroupSpec(GroupKind.MAMBA, 48, 4096),
        ]
        chosen = [kind for kind in kinds if rng.random() < 0.6] or kinds[:1]
        tokens = int(rng.integers(0, 600))
        groups = [
            (spec, rng.random(tokens // spec.block_tokens) < rng.choice([0.5, 0.95, 1.0]))
            for spec in chosen
        ]
        longest = [int(tokens) for tokens in hit_boundaries(groups)]
        for hit_tokens in [0, *longest[:3]]:
            expected = next((each for each in longest if each <= hit_tokens), 0)
            if (found := usable_tokens(groups, hit_tokens)) != expected:
                wrong.append((groups, hit_tokens, found, expected))
    assert wrong == []

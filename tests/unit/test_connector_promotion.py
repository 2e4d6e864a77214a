"""Blocks on SSD, against a scripted daemon: waits of the simple API's loads and of requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.attached import url_of
from support.daemon import until
from support.fake_daemon import PAGE_BYTES, FakeDaemon, key, running
from support.scripted_engine import (
    BLOCK_TOKENS,
    ScriptedPool,
    ScriptedRequest,
    facts_of,
    hashes_of,
)
from support.threads import left_since, own_threads
from support.tower import CONTRACT, Tower, ended

from kvhearth.cache import Cache, LoadResult
from kvhearth.client import KVClient, connect
from kvhearth.connectors.core import requests as asking
from kvhearth.connectors.core.engine import CostLine
from kvhearth.connectors.core.scheduler import SchedulerConnector
from kvhearth.connectors.core.settings import Settings
from kvhearth.connectors.core.step_metadata import Handshake
from kvhearth.errors import Reason
from kvhearth.results import PAUSE_MAX_S, PAUSE_MIN_S, PromotionWait
from kvhearth.transfer.lanes import Transfer

KEYS = [key(number) for number in range(4)]
DONE_S = 20.0


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with running(tmp_path, CONTRACT) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: FakeDaemon, tmp_path: Path) -> Iterator[KVClient]:
    others = own_threads()
    client = connect(url_of(tmp_path), CONTRACT, engine_id="e")
    assert client.wait_ready(DONE_S)
    yield client
    assert client.close(DONE_S)
    assert left_since(others) == []


@pytest.fixture
def cache(client: KVClient) -> Iterator[Cache]:
    cache = Cache(client)
    yield cache
    assert cache.close(DONE_S)


def lookups(daemon: FakeDaemon) -> list[Any]:
    """Lookup requests that the daemon received."""
    return daemon.requests["Lookup"]


# -- the client --------------------------------------------------------------------------------


def test_a_cancelled_lookup_names_its_id_granted_or_not(
    client: KVClient, daemon: FakeDaemon
) -> None:
    Tower(daemon, dram=0, step=2)
    nothing = client.lookup({0: KEYS}, prefetch=True)
    some = client.lookup({0: KEYS}, prefetch=True)
    ids = [request.lease_id for request in lookups(daemon)]
    assert (nothing.lease, nothing.id, nothing.eta_us) == (None, ids[0], 2000)
    assert some.lease is not None
    assert (some.id, some.lease.id) == (ids[1], ids[1])
    client.cancel(nothing)
    client.cancel(some)
    until(lambda: ended(daemon) == ([ids[1]], sorted(ids)))


def test_a_lookup_of_another_boot_is_not_cancelled(
    client: KVClient, daemon: FakeDaemon, tmp_path: Path
) -> None:
    Tower(daemon, dram=1, step=0)
    found = client.lookup({0: KEYS}, prefetch=True)
    daemon.stop()
    with running(tmp_path, CONTRACT) as successor:
        until(lambda: client.boot_id == successor.boot_id)
        client.cancel(found)
        Tower(successor, dram=1)
        mine = client.lookup({0: KEYS}, prefetch=True)
        client.cancel(mine)
        until(lambda: ended(successor) == ([mine.id], [mine.id]))


def test_a_lookup_whose_answer_is_lost_is_cancelled(client: KVClient, daemon: FakeDaemon) -> None:
    daemon.refuse_next("Lookup", Reason.DEADLINE)
    assert client.lookup({0: KEYS}, prefetch=True).reason == Reason.DEADLINE
    ids = [lookups(daemon)[0].lease_id]
    until(lambda: ended(daemon) == (ids, ids))


# -- loads -------------------------------------------------------------------------------------


def begin(cache: Cache, wait_s: float, count: int = 4) -> Transfer[LoadResult]:
    """Begin to load the first ``count`` of ``KEYS``."""
    return cache.load(KEYS[:count], np.zeros((count, PAGE_BYTES), np.uint8), wait_s=wait_s)


@pytest.mark.parametrize("eta_us", [2000, 0], ids=["from SSD", "until it is checked"])
def test_a_load_waits_for_promotion(cache: Cache, daemon: FakeDaemon, eta_us: int) -> None:
    Tower(daemon, dram=1, eta_us=eta_us)
    done = begin(cache, 10.0).result(DONE_S)
    assert (done.hit_blocks, done.usable_blocks, done.reason) == (4, 4, "")
    ids = [request.lease_id for request in lookups(daemon)]
    assert len(ids) == 4
    # Each answer's promotion was taken over by the next lookup before it was cancelled.
    until(lambda: ended(daemon) == (sorted(ids), sorted(ids[:3]) if eta_us else []))


def test_a_load_that_is_given_up_cancels_its_promotion(cache: Cache, daemon: FakeDaemon) -> None:
    Tower(daemon, dram=2, step=0, eta_us=60_000_000)
    future = begin(cache, 30.0)
    until(lambda: lookups(daemon))
    assert future.cancel()
    ids = sorted(request.lease_id for request in lookups(daemon))
    until(lambda: ended(daemon) == (ids, ids))


def test_a_load_that_waits_holds_no_other_load_up(cache: Cache, daemon: FakeDaemon) -> None:
    tower = Tower(daemon, dram=1, step=0, eta_us=16_000_000)
    slow = begin(cache, 30.0)
    until(lambda: lookups(daemon))
    assert begin(cache, 30.0, count=1).result(DONE_S).usable_blocks == 1
    tower.dram = 4
    assert slow.result(DONE_S).usable_blocks == 4


def test_a_closed_cache_waits_for_no_promotion(client: KVClient, daemon: FakeDaemon) -> None:
    Tower(daemon, dram=1, step=0, eta_us=60_000_000)
    cache = Cache(client)
    future = begin(cache, 30.0)
    until(lambda: lookups(daemon))
    until(lambda: client.counters().get("lookup_hit_tokens"), "the answer")
    assert cache.close(5.0)
    assert future.result(0).usable_blocks == 1
    assert ended(daemon)[0] == sorted(request.lease_id for request in lookups(daemon))


def test_a_daemon_that_goes_during_promotion_is_no_long_wait(
    cache: Cache, daemon: FakeDaemon
) -> None:
    Tower(daemon, dram=1, step=0, eta_us=20_000)
    future = begin(cache, 30.0)
    until(lambda: lookups(daemon))
    daemon.stop()
    future.result(DONE_S)


# -- repeated lookups --------------------------------------------------------------------------


def test_an_estimate_says_when_to_ask_again() -> None:
    wait = PromotionWait(until=110.0)
    assert wait.answered(50_000, 100.0)
    assert wait.due_at == pytest.approx(100.05)
    assert wait.answered(900_000, 100.05)
    assert wait.due_at == pytest.approx(100.05 + PAUSE_MAX_S)
    assert wait.answered(8_000_000, 100.3)
    assert wait.due_at == pytest.approx(102.3)
    assert not wait.answered(0, 100.3)


def test_estimates_that_are_too_short_are_believed_less_and_less() -> None:
    wait, now, pauses = PromotionWait(until=1e9), 0.0, []
    for _ in range(12):
        assert wait.answered(1, now)
        pauses.append(wait.due_at - now)
        now = wait.due_at
    assert pauses[0] == pytest.approx(PAUSE_MIN_S)
    assert pauses == sorted(pauses)
    assert 0.05 < pauses[-1] <= PAUSE_MAX_S


def test_a_wait_ends_in_time() -> None:
    wait = PromotionWait(until=100.01)
    assert wait.answered(50_000, 100.0)
    assert wait.due_at == 100.01
    assert not wait.answered(50_000, 100.01)


TOKENS = 64
FAST, SLOW = 1e-7, 1.0
"""Seconds per token."""

MakeHalf = Callable[..., SchedulerConnector]


@pytest.fixture
def make_half(daemon: FakeDaemon, tmp_path: Path) -> Iterator[MakeHalf]:
    """Makes an engine's scheduler half; with seconds per token, one that knows its rates."""
    made: list[SchedulerConnector] = []

    def make(
        *,
        loads: bool = True,
        load: float = 0,
        promotion: float = 0,
        prefill: float = 0,
        **given: Any,
    ) -> SchedulerConnector:
        settings = Settings(url=url_of(tmp_path), lookup_wait_ms=8000, **given)
        offer = Handshake(CONTRACT.to_json(), 1, (0,))
        half = SchedulerConnector(settings, facts_of("e", loads=loads), offer, ScriptedPool(64))
        made.append(half)
        _teach(half._policy.load, load)
        _teach(half._policy.promotion, promotion)
        _teach(half._policy.prefill, prefill)
        assert half._client.wait_ready(20)
        return half

    yield make
    for half in made:
        half.shutdown()


def _teach(line: CostLine, rate: float, fixed_s: float = 0.0) -> None:
    for tokens in (100, 1000, 4000) * 2 if rate else ():
        line.observe(tokens, fixed_s + rate * tokens)


def new(half: SchedulerConnector, name: str = "a") -> ScriptedRequest:
    """A request that has arrived."""
    request = ScriptedRequest(name, TOKENS, hashes_of(name, TOKENS))
    half.new_request(request)
    return request


def answer(half: SchedulerConnector, request: ScriptedRequest, computed: int = 0) -> int:
    """Returns the number of offered tokens once the lookup has been answered."""
    end = time.monotonic() + 20
    while True:
        tokens = half.matched(request, computed)
        if tokens is not None:
            return tokens
        assert time.monotonic() < end, "no answer"
        time.sleep(0.001)


def admit(half: SchedulerConnector, request: ScriptedRequest, tokens: int) -> dict[str, float]:
    """Admits a request; returns the counts until then."""
    table = ([*range(1, 1 + TOKENS // BLOCK_TOKENS)],)
    half.allocated(request, table, tokens)
    return half.take_counts()


def test_promotion_is_waited_for_and_counted_by_its_source(
    daemon: FakeDaemon, make_half: MakeHalf
) -> None:
    tower = Tower(daemon, dram=1)
    half = make_half()
    request = new(half)
    assert answer(half, request) == TOKENS
    assert all(asked.prefetch for asked in tower.asked)
    counts = admit(half, request, TOKENS)
    assert (counts["hit_dram_tokens"], counts["hit_ssd_tokens"]) == (16, 48)
    assert counts["climb_waits"] == 1
    assert 0 < counts["climb_seconds"] < 20
    assert "climb_late" not in counts
    assert half.sources("a", 60) == (12, 48)
    assert half._policy.promotion.count == 1
    ids = [asked.lease_id for asked in tower.asked]
    # The load uses the last lookup's lease.
    until(lambda: ended(daemon) == (sorted(ids[:-1]), sorted(ids[:-1])))
    half._loads.finish("a", failed=False)
    until(lambda: ended(daemon) == (sorted(ids), sorted(ids[:-1])))
    half.finished(request, ([],))


def test_a_request_waits_while_a_remote_is_asked(daemon: FakeDaemon, make_half: MakeHalf) -> None:
    tower = Tower(daemon, dram=1, asking=3)
    half = make_half()
    request = new(half)
    assert answer(half, request) == TOKENS
    assert len(tower.asked) > 3
    assert all(asked.wait_us > 0 for asked in tower.asked)
    state = half._requests.find("a")
    assert state is not None
    counts = admit(half, request, TOKENS)
    assert counts["climb_waits"] == 1


def test_what_a_remote_is_asked_about_is_stored_if_it_is_computed(
    daemon: FakeDaemon, make_half: MakeHalf
) -> None:
    Tower(daemon, dram=1, asking=1 << 30)
    half = make_half(promotion_wait_ms=50)
    request = new(half)
    assert answer(half, request) == 16
    state = half._requests.find("a")
    assert state is not None
    assert state.progress.present[0].tolist() == [True, False, False, False]


def test_the_engine_counts_what_it_has_itself(daemon: FakeDaemon, make_half: MakeHalf) -> None:
    Tower(daemon, dram=4)
    half = make_half()
    request = new(half)
    assert answer(half, request, 16) == 48
    counts = admit(half, request, 48)
    assert (counts["hit_engine_tokens"], counts["hit_dram_tokens"]) == (16, 48)
    assert not {"hit_ssd_tokens", "climb_waits"} & counts.keys()
    assert half._policy.promotion.count == 0


def test_where_computing_is_faster_nobody_waits(daemon: FakeDaemon, make_half: MakeHalf) -> None:
    tower = Tower(daemon, dram=1, eta_us=2_000_000)
    half = make_half(load=FAST, promotion=FAST, prefill=1e-3)
    request = new(half)
    assert answer(half, request) == 16
    counts = admit(half, request, 16)
    assert "climb_waits" not in counts
    # Promotions may continue: the next request with this prompt benefits from them.
    half._loads.finish("a", failed=False)
    until(lambda: ended(daemon) == ([asked.lease_id for asked in tower.asked], []))
    half.finished(request, ([],))


def test_a_slow_tier_is_not_asked_to_bring_anything_up(
    daemon: FakeDaemon, make_half: MakeHalf
) -> None:
    tower = Tower(daemon, dram=1, eta_us=2_000_000)
    half = make_half(load=FAST, promotion=SLOW, prefill=1e-3)
    request = new(half)
    assert answer(half, request) == 16
    assert [asked.prefetch for asked in tower.asked] == [False]
    state = half._requests.find("a")
    assert state is not None
    # The block is computed and stored again: in memory it serves the next request.
    assert state.progress.present[0].tolist() == [True, False, False, False]


def test_a_few_blocks_on_ssd_are_worth_it_where_all_would_not_be(
    daemon: FakeDaemon, make_half: MakeHalf
) -> None:
    """Computing has a fixed price, however few tokens are computed."""
    tower = Tower(daemon, dram=3, eta_us=1000)
    half = make_half(load=FAST, promotion=2e-3)
    _teach(half._policy.prefill, 1e-4, fixed_s=0.1)
    request = new(half)
    assert answer(half, request) == TOKENS
    assert [asked.prefetch for asked in tower.asked] == [False, True, True]


def test_the_wait_is_bounded(daemon: FakeDaemon, make_half: MakeHalf) -> None:
    tower = Tower(daemon, dram=1, step=0)
    half = make_half(promotion_wait_ms=100)
    request = new(half)
    began = time.monotonic()
    assert answer(half, request) == 16
    assert 0.1 <= time.monotonic() - began < 10
    counts = admit(half, request, 16)
    assert counts["climb_late"] == 1
    assert counts["climb_seconds"] >= 0.1
    assert len(tower.asked) < 20
    assert half._policy.promotion.count == 1


def test_without_patience_what_is_there_is_taken(daemon: FakeDaemon, make_half: MakeHalf) -> None:
    Tower(daemon, dram=2)
    half = make_half(promotion_wait_ms=0)
    request = new(half)
    assert answer(half, request) == 32


def test_requests_that_go_away_cancel_their_promotions(
    daemon: FakeDaemon, make_half: MakeHalf
) -> None:
    tower = Tower(daemon, dram=1, step=0, eta_us=60_000_000)
    half = make_half()
    requests = [new(half, str(number)) for number in range(8)]
    until(lambda: len(tower.asked) == 8)
    for request in requests[:4]:
        until(lambda request=request: half._requests.find(request.request_id).lookup.result)
        assert half.matched(request, 0) is None
    for request in requests:
        half.finished(request, ([],))
    ids = sorted(asked.lease_id for asked in tower.asked)
    until(lambda: ended(daemon) == (ids, ids))


def test_a_request_that_waits_in_the_queue_is_asked_for_again(
    daemon: FakeDaemon, make_half: MakeHalf
) -> None:
    """Its blocks have been promoted when its turn comes."""
    tower = Tower(daemon, dram=0)
    half = make_half()
    request = new(half)
    until(lambda: len(tower.asked) == 5)
    state = half._requests.find("a")
    assert state is not None
    assert state.lookup is not None
    until(lambda: not state.lookup.promotions)  # type: ignore[union-attr]
    assert half.matched(request, 0) == TOKENS
    assert "climb_waits" not in admit(half, request, TOKENS)
    assert half._policy.promotion.count == 1


def test_an_offer_stays_what_it_was(daemon: FakeDaemon, make_half: MakeHalf) -> None:
    """A later answer must not replace the lease behind the offer."""
    tower = Tower(daemon, dram=2, step=2, eta_us=50_000)
    half = make_half(load=FAST, promotion=FAST, prefill=1e-4)
    request = new(half)
    until(lambda: len(tower.asked) == 1)
    assert answer(half, request) == 32
    time.sleep(0.2)
    assert half.matched(request, 0) == 32
    state = half._requests.find("a")
    assert state is not None
    assert state.lookup is not None
    assert state.lookup.result is not None
    assert state.lookup.result.id == tower.asked[0].lease_id
    assert ended(daemon) == ([], [])


def test_a_bound_on_loads_that_is_met_already_waits_for_nothing(
    daemon: FakeDaemon, make_half: MakeHalf
) -> None:
    Tower(daemon, dram=2, step=0, eta_us=60_000_000)
    half = make_half(max_load_tokens=32)
    assert answer(half, new(half)) == 32


def test_a_long_promotion_does_not_make_its_question_old(
    daemon: FakeDaemon, make_half: MakeHalf
) -> None:
    """Otherwise the lookup would be repeated, and the bound on the wait would restart."""
    tower = Tower(daemon, dram=1, step=0, eta_us=60_000_000)
    half = make_half(lease_s=1)
    request = new(half)
    until(lambda: len(tower.asked) == 1)
    state = half._requests.find("a")
    assert state is not None
    lookup = state.lookup
    assert lookup is not None
    until(lambda: lookup.promotions)
    lookup.answered_at -= 5
    half._requests._aged_at = 0.0
    half._requests.begin_step()
    assert half.matched(request, 0) is None
    assert state.lookup is lookup
    assert len(tower.asked) == 1


def test_who_only_stores_promotes_nothing(daemon: FakeDaemon, make_half: MakeHalf) -> None:
    tower = Tower(daemon, dram=1)
    half = make_half(loads=False)
    request = new(half)
    until(lambda: tower.asked)
    assert half.matched(request, 0) == 0
    assert [asked.prefetch for asked in tower.asked] == [False]


def test_a_daemon_that_goes_while_a_request_waits(daemon: FakeDaemon, make_half: MakeHalf) -> None:
    Tower(daemon, dram=1, step=0, eta_us=20_000)
    half = make_half(promotion_wait_ms=20_000)
    request = new(half)
    until(lambda: half._requests.find("a").lookup.result)  # type: ignore[union-attr]
    assert half.matched(request, 0) is None
    daemon.stop()
    assert answer(half, request) == 0


def test_a_step_waits_for_an_answer_only_while_nothing_runs(
    daemon: FakeDaemon, make_half: MakeHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asking, "IDLE_SPIN_S", 10.0)
    Tower(daemon, dram=4)
    half = make_half()
    first = new(half)
    assert half.matched(first, 0) == TOKENS, "it was waited for"
    admit(half, first, TOKENS)
    daemon.answers["Lookup"].clear()
    answered = threading.Event()
    daemon.hold_next("Lookup", answered)
    second = new(half, "b")
    began = time.monotonic()
    assert half.matched(second, 0) is None
    assert time.monotonic() - began < 5
    answered.set()
    half._loads.finish("a", failed=False)
    for request in (first, second):
        half.finished(request, ([],))
    assert half._requests._admitted_count == 0

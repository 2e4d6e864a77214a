"""Blocks on SSD, against a scripted daemon: waits of the simple API's loads and of requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.attached import connected, url_of
from support.fake_daemon import PAGE_BYTES, FakeDaemon, key, running
from support.scripted_clock import HeldCall, ScriptedClock
from support.scripted_engine import (
    BLOCK_TOKENS,
    ScriptedPool,
    ScriptedRequest,
    facts_of,
    hashes_of,
)
from support.tower import CONTRACT, Tower, ended

from kvhearth.cache import Cache, LoadResult
from kvhearth.client import KVClient
from kvhearth.connectors.core.engine import CostLine, RequestOptions
from kvhearth.connectors.core.lookup_queue import Lookup
from kvhearth.connectors.core.requests import IDLE_SPIN_S, RequestState
from kvhearth.connectors.core.scheduler import SchedulerConnector
from kvhearth.connectors.core.settings import Settings
from kvhearth.connectors.core.step_metadata import Handshake
from kvhearth.errors import Reason
from kvhearth.results import PAUSE_MAX_S, PAUSE_MIN_S, PromotionWait
from kvhearth.transfer.lanes import Transfer
from kvhearth_lab.harness import HUNG_S

KEYS = [key(number) for number in range(4)]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[FakeDaemon]:
    with running(tmp_path, CONTRACT) as daemon:
        yield daemon


@pytest.fixture
def client(daemon: FakeDaemon, clock: ScriptedClock, tmp_path: Path) -> Iterator[KVClient]:
    with connected(tmp_path, contract=CONTRACT, clock=clock) as client:
        assert client.wait_ready(HUNG_S)
        yield client


@pytest.fixture
def cache(client: KVClient) -> Iterator[Cache]:
    cache = Cache(client)
    yield cache
    assert cache.close(HUNG_S)


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
    client.clock.until(lambda: ended(daemon) == ([ids[1]], sorted(ids)))


def test_a_lookup_of_another_boot_is_not_cancelled(
    client: KVClient, daemon: FakeDaemon, tmp_path: Path
) -> None:
    Tower(daemon, dram=1, step=0)
    found = client.lookup({0: KEYS}, prefetch=True)
    daemon.stop()
    with running(tmp_path, CONTRACT) as successor:
        client.clock.until(lambda: client.boot_id == successor.boot_id)
        client.cancel(found)
        Tower(successor, dram=1)
        mine = client.lookup({0: KEYS}, prefetch=True)
        client.cancel(mine)
        client.clock.until(lambda: ended(successor) == ([mine.id], [mine.id]))


def test_a_lookup_whose_answer_is_lost_is_cancelled(client: KVClient, daemon: FakeDaemon) -> None:
    daemon.refuse_next("Lookup", Reason.DEADLINE)
    assert client.lookup({0: KEYS}, prefetch=True).reason == Reason.DEADLINE
    ids = [lookups(daemon)[0].lease_id]
    client.clock.until(lambda: ended(daemon) == (ids, ids))


# -- loads -------------------------------------------------------------------------------------


def begin(cache: Cache, wait_s: float, count: int = 4) -> Transfer[LoadResult]:
    """Begin to load the first ``count`` of ``KEYS``."""
    return cache.load(KEYS[:count], np.zeros((count, PAGE_BYTES), np.uint8), wait_s=wait_s)


@pytest.mark.parametrize("eta_us", [2000, 0], ids=["from SSD", "until it is checked"])
def test_a_load_waits_for_promotion(
    cache: Cache, daemon: FakeDaemon, clock: ScriptedClock, eta_us: int
) -> None:
    Tower(daemon, dram=1, eta_us=eta_us)
    done = clock.result(begin(cache, 10.0))
    assert (done.hit_blocks, done.usable_blocks, done.reason) == (4, 4, "")
    ids = [request.lease_id for request in lookups(daemon)]
    assert len(ids) == 4
    # Each answer's promotion was taken over by the next lookup before it was cancelled.
    clock.until(lambda: ended(daemon) == (sorted(ids), sorted(ids[:3]) if eta_us else []))


def test_a_load_that_is_given_up_cancels_its_promotion(
    cache: Cache, daemon: FakeDaemon, clock: ScriptedClock
) -> None:
    Tower(daemon, dram=2, step=0, eta_us=60_000_000)
    future = begin(cache, 30.0)
    clock.until(lambda: lookups(daemon))
    assert future.cancel()
    cancelled_at, ids = clock.now(), sorted(request.lease_id for request in lookups(daemon))
    clock.until(lambda: ended(daemon) == (ids, ids))
    assert clock.now() - cancelled_at < 1.0, "not only when its answer is due"


def test_a_load_that_waits_holds_no_other_load_up(
    cache: Cache, daemon: FakeDaemon, clock: ScriptedClock
) -> None:
    tower = Tower(daemon, dram=1, step=0, eta_us=16_000_000)
    slow = begin(cache, 30.0)
    clock.until(lambda: lookups(daemon))
    assert clock.result(begin(cache, 30.0, count=1)).usable_blocks == 1
    assert not slow.done()
    tower.dram = 4
    assert clock.result(slow).usable_blocks == 4


def test_a_closed_cache_waits_for_no_promotion(
    client: KVClient, daemon: FakeDaemon, clock: ScriptedClock
) -> None:
    Tower(daemon, dram=1, step=0, eta_us=60_000_000)
    cache = Cache(client)
    future = begin(cache, 30.0)
    clock.until(lambda: client.counters().get("lookup_hit_tokens"), "the answer")
    assert cache.close(5.0)
    assert future.result(0).usable_blocks == 1
    assert ended(daemon)[0] == sorted(request.lease_id for request in lookups(daemon))


def test_a_daemon_that_goes_during_promotion_is_no_long_wait(
    cache: Cache, daemon: FakeDaemon, clock: ScriptedClock
) -> None:
    Tower(daemon, dram=1, step=0, eta_us=20_000)
    future, began = begin(cache, 30.0), clock.now()
    clock.until(lambda: lookups(daemon))
    daemon.stop()
    clock.result(future)
    assert clock.now() - began < PAUSE_MAX_S


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


class Rig:
    """A scripted daemon of two tiers, and the scheduler's halves of engines beside it."""

    def __init__(self, daemon: FakeDaemon, clock: ScriptedClock, url: str) -> None:
        self.daemon = daemon
        self.clock = clock
        self._url = url
        self.halves: list[SchedulerConnector] = []

    def half(
        self,
        *,
        loads: bool = True,
        load: float = 0,
        promotion: float = 0,
        prefill: float = 0,
        prefill_fixed_s: float = 0,
        **given: Any,
    ) -> SchedulerConnector:
        """Make a half; with seconds per token, one that knows its rates."""
        settings = Settings(url=self._url, lookup_wait_ms=8000, **given)
        offer, facts = Handshake(CONTRACT.to_json(), 1, (0,)), facts_of("e", loads=loads)
        half = SchedulerConnector(settings, facts, offer, ScriptedPool(64), clock=self.clock)
        self.halves.append(half)
        _teach(half._policy.load, load)
        _teach(half._policy.promotion, promotion)
        _teach(half._policy.prefill, prefill, prefill_fixed_s)
        assert half._client.wait_ready(HUNG_S)
        return half

    def answer(self, half: SchedulerConnector, request: ScriptedRequest, computed: int = 0) -> int:
        """Return the number of offered tokens once the lookup has been answered."""
        return self.clock.poll(lambda: half.matched(request, computed))

    def wait_ended(self, leases: list[int], cancelled: list[int]) -> None:
        """Wait for the ends of these leases and these cancellations, and no others."""
        wanted = sorted(leases), sorted(cancelled)
        self.clock.until(lambda: ended(self.daemon) == wanted)


@pytest.fixture
def rig(daemon: FakeDaemon, clock: ScriptedClock, tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(daemon, clock, url_of(tmp_path))
    yield rig
    for half in rig.halves:
        half.shutdown()


def _teach(line: CostLine, rate: float, fixed_s: float = 0.0) -> None:
    for tokens in (100, 1000, 4000) * 2 if rate else ():
        line.observe(tokens, fixed_s + rate * tokens)


def new(half: SchedulerConnector, name: str = "a") -> ScriptedRequest:
    """A request that has arrived."""
    request = ScriptedRequest(name, TOKENS, hashes_of(name, TOKENS))
    half.new_request(request)
    return request


def state_of(half: SchedulerConnector, name: str = "a") -> RequestState:
    """The state of a request."""
    state = half._requests.find(name)
    assert state is not None
    return state


def lookup_of(half: SchedulerConnector, name: str = "a") -> Lookup:
    """The lookup of a request."""
    lookup = state_of(half, name).lookup
    assert lookup is not None
    return lookup


def admit(half: SchedulerConnector, request: ScriptedRequest, tokens: int) -> dict[str, float]:
    """Admits a request; returns the counts until then."""
    table = ([*range(1, 1 + TOKENS // BLOCK_TOKENS)],)
    half.allocated(request, table, tokens)
    return half.take_counts()


FIRST = [True, False, False, False]
"""Blocks that need not be stored: a block that is computed again serves the next one in memory."""


@pytest.mark.parametrize(
    ("tower", "half", "offered", "prefetches", "present"),
    [
        pytest.param(
            {"dram": 1, "asking": 1 << 30}, {"promotion_wait_ms": 50}, 16, None, FIRST,
            id="a remote that does not answer",
        ),
        pytest.param(
            {"dram": 1, "eta_us": 2_000_000}, {"load": FAST, "promotion": SLOW, "prefill": 1e-3},
            16, [False], FIRST, id="a tier that is slower than computing",
        ),
        pytest.param(
            {"dram": 3, "eta_us": 1000},
            {"load": FAST, "promotion": 2e-3, "prefill": 1e-4, "prefill_fixed_s": 0.1},
            TOKENS, [False, True, True], None, id="a few blocks, since computing has a fixed price",
        ),
        pytest.param({"dram": 2}, {"promotion_wait_ms": 0}, 32, None, None, id="no patience"),
        pytest.param(
            {"dram": 2, "step": 0, "eta_us": 60_000_000}, {"max_load_tokens": 32},
            32, None, None, id="a bound that is met already",
        ),
    ],
)  # fmt: skip
def test_what_a_request_is_offered(
    rig: Rig,
    tower: dict[str, int],
    half: dict[str, Any],
    offered: int,
    prefetches: list[bool] | None,
    present: list[bool] | None,
) -> None:
    blocks, made = Tower(rig.daemon, **tower), rig.half(**half)
    assert rig.answer(made, new(made)) == offered
    if prefetches is not None:
        assert [asked.prefetch for asked in blocks.asked] == prefetches
    if present is not None:
        assert state_of(made).progress.present[0].tolist() == present


def test_a_prefetch_is_wanted_whatever_it_costs(rig: Rig) -> None:
    tower = Tower(rig.daemon, dram=1, eta_us=2_000_000)
    half = rig.half(load=FAST, promotion=SLOW, prefill=1e-3)
    options = RequestOptions(prefetch=True)
    request = ScriptedRequest("a", TOKENS, hashes_of("a", TOKENS), options=options)
    half.new_request(request)
    assert rig.answer(half, request) == TOKENS
    assert all(asked.prefetch for asked in tower.asked)


def test_promotion_is_waited_for_and_counted_by_its_source(rig: Rig) -> None:
    tower, half = Tower(rig.daemon, dram=1), rig.half()
    request = new(half)
    assert rig.answer(half, request) == TOKENS
    assert all(asked.prefetch for asked in tower.asked)
    counts = admit(half, request, TOKENS)
    assert (counts["hit_dram_tokens"], counts["hit_ssd_tokens"]) == (16, 48)
    assert counts["climb_waits"] == 1
    assert 3 * PAUSE_MIN_S <= counts["climb_seconds"] < 3 * PAUSE_MAX_S
    assert "climb_late" not in counts
    assert half.sources("a", 60) == (12, 48)
    assert half._policy.promotion.count == 1
    ids = [asked.lease_id for asked in tower.asked]
    # The load uses the last lookup's lease.
    rig.wait_ended(ids[:-1], ids[:-1])
    half._loads.finish("a", failed=False)
    rig.wait_ended(ids, ids[:-1])
    half.finished(request, ([],))


def test_a_request_waits_while_a_remote_is_asked(rig: Rig) -> None:
    tower, half = Tower(rig.daemon, dram=1, asking=3), rig.half()
    request = new(half)
    assert rig.answer(half, request) == TOKENS
    assert len(tower.asked) > 3
    assert all(asked.wait_us > 0 for asked in tower.asked)
    assert admit(half, request, TOKENS)["climb_waits"] == 1


def test_the_engine_counts_what_it_has_itself(rig: Rig) -> None:
    Tower(rig.daemon, dram=4)
    half = rig.half()
    request = new(half)
    assert rig.answer(half, request, 16) == 48
    counts = admit(half, request, 48)
    assert (counts["hit_engine_tokens"], counts["hit_dram_tokens"]) == (16, 48)
    assert not {"hit_ssd_tokens", "climb_waits"} & counts.keys()
    assert half._policy.promotion.count == 0


def test_where_computing_is_faster_nobody_waits(rig: Rig) -> None:
    tower = Tower(rig.daemon, dram=1, eta_us=2_000_000)
    half = rig.half(load=FAST, promotion=FAST, prefill=1e-3)
    request = new(half)
    assert rig.answer(half, request) == 16
    assert "climb_waits" not in admit(half, request, 16)
    # Promotions may continue: the next request with this prompt benefits from them.
    half._loads.finish("a", failed=False)
    rig.wait_ended([asked.lease_id for asked in tower.asked], [])
    half.finished(request, ([],))


def test_the_wait_is_bounded(rig: Rig) -> None:
    tower, half = Tower(rig.daemon, dram=1, step=0), rig.half(promotion_wait_ms=100)
    request, began = new(half), rig.clock.now()
    assert rig.answer(half, request) == 16
    assert rig.clock.now() - began == pytest.approx(0.1, abs=0.003)
    counts = admit(half, request, 16)
    assert counts["climb_late"] == 1
    assert counts["climb_seconds"] == pytest.approx(0.1, abs=0.003)
    assert len(tower.asked) < 20
    assert half._policy.promotion.count == 1


def test_requests_that_go_away_cancel_their_promotions(rig: Rig) -> None:
    tower, half = Tower(rig.daemon, dram=1, step=0, eta_us=60_000_000), rig.half()
    requests = [new(half, str(number)) for number in range(8)]
    rig.clock.until(lambda: len(tower.asked) == 8)
    for request in requests[:4]:
        rig.clock.until(lambda name=request.request_id: lookup_of(half, name).result)
        assert half.matched(request, 0) is None
    for request in requests:
        half.finished(request, ([],))
    ids = [asked.lease_id for asked in tower.asked]
    rig.wait_ended(ids, ids)


def test_a_request_that_waits_in_the_queue_is_asked_for_again(rig: Rig) -> None:
    """Its blocks have been promoted when its turn comes."""
    tower, half = Tower(rig.daemon, dram=0), rig.half()
    request = new(half)
    rig.clock.until(lambda: len(tower.asked) == 5)
    rig.clock.until(lambda: not lookup_of(half).promotions)
    assert half.matched(request, 0) == TOKENS
    assert "climb_waits" not in admit(half, request, TOKENS)
    assert half._policy.promotion.count == 1


def test_an_offer_stays_what_it_was(rig: Rig) -> None:
    """A later answer must not replace the lease behind the offer."""
    tower = Tower(rig.daemon, dram=2, step=2, eta_us=50_000)
    half = rig.half(load=FAST, promotion=FAST, prefill=1e-4)
    request = new(half)
    assert rig.answer(half, request) == 32
    rig.clock.pass_time(0.2)
    assert half.matched(request, 0) == 32
    result = lookup_of(half).result
    assert result is not None
    assert result.id == tower.asked[0].lease_id
    assert ended(rig.daemon) == ([], [])


def test_a_long_promotion_does_not_make_its_question_old(rig: Rig) -> None:
    """Otherwise the lookup would be repeated, and the bound on the wait would restart."""
    tower, half = Tower(rig.daemon, dram=1, step=0, eta_us=60_000_000), rig.half(lease_s=1)
    request = new(half)
    rig.clock.until(lambda: lookup_of(half).promotions)
    lookup = lookup_of(half)
    rig.clock.pass_time(1.5)
    half._requests.begin_step()
    assert half.matched(request, 0) is None
    assert lookup_of(half) is lookup
    assert len(tower.asked) == 1


def test_who_only_stores_promotes_nothing(rig: Rig) -> None:
    tower, half = Tower(rig.daemon, dram=1), rig.half(loads=False)
    request = new(half)
    rig.clock.until(lambda: tower.asked)
    assert half.matched(request, 0) == 0
    assert [asked.prefetch for asked in tower.asked] == [False]


def test_a_daemon_that_goes_while_a_request_waits(rig: Rig) -> None:
    Tower(rig.daemon, dram=1, step=0, eta_us=20_000)
    half = rig.half(promotion_wait_ms=20_000)
    request = new(half)
    rig.clock.until(lambda: lookup_of(half).result)
    assert half.matched(request, 0) is None
    rig.daemon.stop()
    assert rig.answer(half, request) == 0


def test_a_step_waits_for_an_answer_only_while_nothing_runs(rig: Rig) -> None:
    Tower(rig.daemon, dram=4)
    half, call = rig.half(), HeldCall(rig.clock)
    first = new(half)
    assert half.matched(first, 0) == TOKENS, "it was waited for"
    admit(half, first, TOKENS)
    rig.daemon.answers["Lookup"].clear()
    rig.daemon.answer("Lookup", call)
    second, began = new(half, "b"), rig.clock.now()
    assert half.matched(second, 0) is None
    assert rig.clock.now() - began < IDLE_SPIN_S
    call.release()
    half._loads.finish("a", failed=False)
    for request in (first, second):
        half.finished(request, ([],))
    assert half._requests._admitted_count == 0

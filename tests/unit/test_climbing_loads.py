"""Lookups with promotions, against a scripted daemon: cancellations, and how long a load waits."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.attached import url_of
from support.fake_daemon import PAGE_BYTES, FakeDaemon, key, running, until
from support.threads import left_since, own_threads
from support.tower import CONTRACT, Tower, ended

from kvhearth.cache import Cache, LoadResult
from kvhearth.client import KVClient, connect
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


def test_where_nothing_climbs_a_cancel_is_a_release(client: KVClient, daemon: FakeDaemon) -> None:
    Tower(daemon, dram=4)
    found = client.lookup({0: KEYS}, prefetch=True)
    client.cancel(found)
    until(lambda: ended(daemon) == ([found.id], []))
    daemon.answers["Lookup"].clear()
    client.cancel(client.lookup({0: KEYS}, prefetch=True))
    client.cancel(client.lookup({0: KEYS}, prefetch=True, lease=False))
    sent = client.lookup({0: KEYS})
    client.release(sent.lease)
    assert ended(daemon) == ([found.id], [])


def test_cancels_travel_together_and_with_releases(client: KVClient, daemon: FakeDaemon) -> None:
    Tower(daemon, dram=1, step=0)
    found = [client.lookup({0: KEYS}, prefetch=True) for _ in range(12)]
    for each in found[:6]:
        client.cancel(each)
    for each in found[6:]:
        client.release(each.lease)
    ids = [each.id for each in found]
    until(lambda: ended(daemon) == (sorted(ids), sorted(ids[:6])))
    assert len(daemon.requests["Release"]) <= 3


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


def test_a_lookup_whose_answer_is_lost_is_cancelled(daemon: FakeDaemon, tmp_path: Path) -> None:
    client = connect(url_of(tmp_path, "lookup_ms=200"), CONTRACT, engine_id="e")
    assert client.wait_ready(DONE_S)
    daemon.slow_next("Lookup", 0.7)
    assert client.lookup({0: KEYS}, prefetch=True).reason == Reason.DEADLINE
    ids = [lookups(daemon)[0].lease_id]
    until(lambda: ended(daemon) == (ids, ids))
    assert client.close(DONE_S)


# -- loads -------------------------------------------------------------------------------------


def begin(cache: Cache, wait_s: float, count: int = 4) -> Transfer[LoadResult]:
    """Begin to load the first ``count`` of ``KEYS``."""
    return cache.load(KEYS[:count], np.zeros((count, PAGE_BYTES), np.uint8), wait_s=wait_s)


def test_a_load_takes_what_is_there_unless_it_may_wait(cache: Cache, daemon: FakeDaemon) -> None:
    Tower(daemon, dram=1)
    assert begin(cache, 0.0).result(DONE_S).usable_blocks == 1
    asked = lookups(daemon)
    assert len(asked) == 1
    assert asked[0].prefetch
    until(lambda: ended(daemon) == ([asked[0].lease_id], []))


@pytest.mark.parametrize("eta_us", [2000, 0], ids=["from SSD", "until it is checked"])
def test_a_load_waits_for_what_climbs(cache: Cache, daemon: FakeDaemon, eta_us: int) -> None:
    Tower(daemon, dram=1, eta_us=eta_us)
    done = begin(cache, 10.0).result(DONE_S)
    assert (done.hit_blocks, done.usable_blocks, done.reason) == (4, 4, "")
    ids = [request.lease_id for request in lookups(daemon)]
    assert len(ids) == 4
    # Each answer's promotion was taken over by the next lookup before it was cancelled.
    until(lambda: ended(daemon) == (sorted(ids), sorted(ids[:3]) if eta_us else []))


def test_what_does_not_climb_in_time_is_not_waited_for(cache: Cache, daemon: FakeDaemon) -> None:
    Tower(daemon, dram=2, step=0)
    started = time.monotonic()
    done = begin(cache, 0.1).result(DONE_S)
    assert 0.1 <= time.monotonic() - started < 10
    assert (done.usable_blocks, done.reason) == (2, "")
    ids = [request.lease_id for request in lookups(daemon)]
    # The last answer's promotion continues, for a later caller.
    until(lambda: ended(daemon) == (sorted(ids), sorted(ids[:-1])))


def test_a_load_that_is_given_up_calls_its_climb_off(cache: Cache, daemon: FakeDaemon) -> None:
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


def test_a_closed_cache_waits_for_no_climb(client: KVClient, daemon: FakeDaemon) -> None:
    Tower(daemon, dram=1, step=0, eta_us=60_000_000)
    cache = Cache(client)
    future = begin(cache, 30.0)
    until(lambda: lookups(daemon))
    time.sleep(0.05)  # the answer arrives
    assert cache.close(5.0)
    assert future.result(0).usable_blocks == 1
    assert ended(daemon)[0] == sorted(request.lease_id for request in lookups(daemon))


def test_a_load_whose_next_question_fails_goes_on_with_what_it_has(
    cache: Cache, daemon: FakeDaemon
) -> None:
    Tower(daemon, dram=2, step=0)
    future = begin(cache, 30.0)
    until(lambda: len(lookups(daemon)) > 1)
    daemon.answers["Lookup"].clear()
    daemon.refuse_next("Lookup", Reason.DRAINING)
    assert future.result(DONE_S).usable_blocks == 2


def test_a_daemon_that_goes_while_blocks_climb_is_no_long_wait(
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

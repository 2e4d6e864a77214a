"""A remote's breaker, existence cache and bounds, at given times."""

from __future__ import annotations

import itertools
import os

import numpy as np
import pytest

from kvhearth_server.tiers.base import Bucket, Refusal, Throttled
from kvhearth_server.tiers.remote.existence import NO, UNKNOWN, YES, ExistenceCache
from kvhearth_server.tiers.remote.limits import (
    PAUSE_MAX_S,
    PAUSE_MIN_S,
    WINDOW,
    Bounds,
    Breaker,
    Limits,
)
from kvhearth_server.tiers.remote.names import space_name


@pytest.mark.parametrize("before", [0, 1, 30])
def test_five_failures_in_a_row_open_the_breaker(before: int) -> None:
    breaker = Breaker()
    for number in range(before):
        breaker.succeeded(number)
    for number in range(4):
        breaker.failed(before + number)
    assert not breaker.is_open
    breaker.failed(before + 4)
    breaker.failed(before + 5)
    assert (breaker.is_open, breaker.openings) == (True, 1)


def test_half_of_twenty_failures_open_the_breaker() -> None:
    breaker = Breaker()
    for number in range(WINDOW - 2):
        breaker.succeeded(number) if number % 2 else breaker.failed(number)
    assert not breaker.is_open, "as many count only once there are twenty"
    breaker.succeeded(18)
    breaker.failed(19)
    assert breaker.is_open


def test_fewer_failures_and_old_ones_leave_it_closed() -> None:
    breaker = Breaker()
    for number in range(200):
        breaker.succeeded(number) if number % 5 else breaker.failed(number)
    assert not breaker.is_open
    for day in range(1, 9):
        breaker.failed(day * 86400.0)
    assert not breaker.is_open


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_an_open_breaker_probes_and_always_closes(chance: float) -> None:
    breaker, now = Breaker(lambda: chance), 100.0
    for _ in range(5):
        breaker.failed(now)
    pauses = []
    for _ in range(12):
        began = now
        while not breaker.probe_due(now):
            now += 0.05
            assert now < began + PAUSE_MAX_S + 0.1
        pauses.append(now - began)
        breaker.probe_began()
        assert not breaker.probe_due(now + 1000), "one at a time"
        breaker.succeeded(now)  # a late answer to an old request
        breaker.probed(good=False, now=now)
        assert breaker.is_open
    assert 0.8 * PAUSE_MIN_S <= pauses[0] <= PAUSE_MIN_S + 0.06
    assert all(after >= before - 0.06 for before, after in itertools.pairwise(pauses))
    assert 0.8 * PAUSE_MAX_S <= pauses[-1] <= PAUSE_MAX_S + 0.06
    breaker.probed(good=True, now=now)
    assert not breaker.is_open
    breaker.failed(now)
    assert not breaker.is_open, "what was before is forgotten"


def names_of(count: int) -> list[bytes]:
    return [os.urandom(40) for _ in range(count)]


def test_the_cache_knows_what_was_noted_until_it_ends() -> None:
    cache, names = ExistenceCache(1 << 20), names_of(199)
    assert (cache.look(names, 0.0) == UNKNOWN).all()
    cache.note(names[:100], True, 0.0)
    cache.note(names[100:150], False, 0.0)
    for now in (0.0, 3.9):
        wanted = [YES] * 100 + [NO] * 50 + [UNKNOWN] * 49
        assert cache.look(names, now).tolist() == wanted
        assert [cache.state(each, now) for each in names] == wanted
    assert cache.look(names, 5.1).tolist() == [YES] * 100 + [UNKNOWN] * 99
    assert (cache.look(names, 60.1) == UNKNOWN).all()


def test_the_last_word_about_a_block_holds() -> None:
    cache, names = ExistenceCache(), names_of(512)
    cache.note(names, True, 1.0)
    cache.note(names, np.arange(512) % 2 == 0, 2.0)
    assert (cache.look(names, 3.0) == np.where(np.arange(512) % 2 == 0, YES, NO)).all()
    cache.note(names[:1], True, 3.0, for_s=1.0)
    assert cache.look(names[:1], 3.5) == YES
    assert cache.look(names[:1], 4.5) == UNKNOWN


def test_the_cache_is_bounded_and_knows_the_latest() -> None:
    cache, names = ExistenceCache(1024), names_of(20 * 512)
    for start in range(0, len(names), 256):
        cache.note(names[start : start + 256], True, 0.0)
        assert cache.entries <= 1024 + 256
    assert (cache.look(names[-512:], 0.0) == YES).all()
    cache.note(names[-1:], False, 1.0)
    assert cache.state(names[-1], 1.0) == NO, "the newer half goes first"


def test_a_bucket_allows_its_rate_and_a_large_request_leaves_a_debt() -> None:
    bucket, now, taken = Bucket(100.0, 100.0, 0.0), 0.0, 0
    while now < 10.0:
        if bucket.wait_s(now):
            now += 0.01
        else:
            bucket.spend(30, now)
            taken += 30
    assert 1000 <= taken <= 1160
    bucket.spend(500, now)
    assert 4.0 < bucket.wait_s(now) < 7.0
    assert Bucket(0.0, 0.0, 0.0).wait_s(0.0) == 0.0


def test_each_bound_holds_a_store_back() -> None:
    bounds = Bounds(Limits(bytes_per_day=86400, requests_per_s=100), 0.0)
    assert bounds.held_back(0.0) is None
    bounds.take(3600, 50, 0.0)
    assert bounds.held_back(0.0) == Throttled(Refusal.QUOTA, 0.001)
    assert bounds.held_back(10.0) is None
    bounds.take(1, 300, 10.0)
    assert bounds.held_back(10.0) == Throttled(Refusal.RATE, 2.001)


def test_each_part_of_a_space_is_in_its_name() -> None:
    parts = (b"k" * 32, "tenant", "{}", "label", 0)
    others = (b"l" * 32, "other", "[]", "other", 1)
    changed = [(*parts[:at], other, *parts[at + 1 :]) for at, other in enumerate(others)]
    names = [space_name(*each) for each in (parts, *changed)]
    assert len(set(names)) == len(names)

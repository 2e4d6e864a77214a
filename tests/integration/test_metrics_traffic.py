"""``/metrics`` while real engines store, load, miss, evict, restart and leave."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from support.cached import BLOCK_TOKENS, CONTRACT, PAGE_BYTES, CachedEngine, cached_engine
from support.daemon import Daemon, running_daemon, until
from support.http_door import Scrape, ask
from support.raw_door import new_keys

from kvhearth_lab.harness.engine import contract_of, engine_of

CAPACITY_BLOCKS = (16 << 20) // PAGE_BYTES


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    with running_daemon(http="127.0.0.1:0") as daemon:
        yield daemon


@pytest.fixture
def cached(daemon: Daemon) -> Iterator[CachedEngine]:
    with cached_engine(daemon.url()) as cached:
        yield cached


def test_lookups_by_tier_and_reason_sum_to_the_keys(daemon: Daemon, cached: CachedEngine) -> None:
    keys = new_keys(8)
    assert cached.store(keys).stored == 8
    for asked in (keys, [*keys[:4], *new_keys(3)], new_keys(5), keys[:1]):
        cached.client.release(cached.client.lookup({0: asked}).lease)
    until(lambda: Scrape(daemon).of("lookups_total") == 4, "lookups are posted")
    found = Scrape(daemon)
    assert found.of("lookup_blocks_total") == 8 + 7 + 5 + 1 == daemon.counters()["lookup_keys"]
    assert found.of("lookup_blocks_total", result="dram") == 8 + 4 + 1
    assert found.of("lookup_blocks_total", result="miss", reason="absent") == 3 + 5
    epoch = cached.client.epoch
    cached.client.bump_epoch()
    assert cached.client.epoch > epoch
    cached.client.lookup({0: keys})
    until(lambda: Scrape(daemon).of("lookups_total") == 5, "it is posted")
    later = Scrape(daemon)
    assert later.of("lookup_blocks_total", result="miss", reason="epoch") == 8
    assert later.of("lookup_blocks_total") == 29 == daemon.counters()["lookup_keys"]


def test_bytes_and_seconds_of_copies(daemon: Daemon, cached: CachedEngine) -> None:
    began = time.monotonic()
    keys = new_keys(32)
    assert cached.store(keys).stored == 32
    assert cached.load(keys).usable_blocks
    assert cached.load([*keys[:2], *new_keys(2)]).loaded.sum() == 2
    wanted = {"store": 32 * PAGE_BYTES, "load": 34 * PAGE_BYTES}
    until(
        lambda: Scrape(daemon).of("client_copy_bytes_total", direction="load") == wanted["load"],
        "a heartbeat brings the client's counters",
    )
    found = Scrape(daemon)
    for direction, copied in wanted.items():
        assert found.of("client_copy_bytes_total", direction=direction) == copied
        seconds = found.of("client_copy_seconds_total", direction=direction)
        assert 0 < seconds < time.monotonic() - began
    assert found.of("client_store_blocks_total", outcome="stored") == 32
    assert found.of("client_load_blocks_total", outcome="loaded") == 34
    assert found.of("store_blocks_total", outcome="stored") == 32
    assert found.of("store_bytes_total") == found.of("used_bytes") == 32 * PAGE_BYTES
    assert found.of("leased_bytes_total") == 34 * PAGE_BYTES


def test_traffic_by_namespace_and_holders_by_engine(daemon: Daemon, cached: CachedEngine) -> None:
    began, keys = time.monotonic(), new_keys(8)
    assert cached.store(keys).stored == 8
    for asked in (keys, [*keys[:4], *new_keys(3)]):
        found = cached.client.lookup({0: asked})
    assert found.lease is not None
    until(lambda: Scrape(daemon).of("lookups_total") == 2, "lookups are posted")
    scrape = Scrape(daemon)
    assert scrape.of("namespace_info", tenant="default", model=CONTRACT.model) == 1
    assert scrape.of("namespace_lookup_blocks_total", result="dram") == 8 + 4
    assert scrape.of("namespace_lookup_blocks_total", result="miss") == 3
    assert scrape.of("namespace_store_blocks_total") == 8
    assert scrape.of("namespace_asked_tokens_total") == 15 * BLOCK_TOKENS
    assert scrape.of("namespace_hit_tokens_total") == 12 * BLOCK_TOKENS
    assert scrape.of("lookup_asked_tokens_total") == 15 * BLOCK_TOKENS
    assert scrape.of("lookup_hit_tokens_total") == 12 * BLOCK_TOKENS
    assert scrape.of("engine_leases", tenant="default", engine="e") == 2
    lived = time.monotonic() - began
    assert 0 < scrape.of("engine_oldest_lease_seconds", engine="e") < lived
    assert scrape.of("engine_heartbeat_age_seconds", engine="e") >= 0
    for _ in range(2 * CAPACITY_BLOCKS // 64):
        assert cached.store(new_keys(64)).stored == 64
    scrape = Scrape(daemon)
    assert scrape.of("namespace_evictions_total") == scrape.of("evictions_total") > 0


def test_evictions_have_a_reason_and_an_age(daemon: Daemon, cached: CachedEngine) -> None:
    for _ in range(2 * CAPACITY_BLOCKS // 64):
        assert cached.store(new_keys(64)).stored == 64
    found = Scrape(daemon)
    evicted = found.of("evictions_total", reason="space")
    assert evicted >= CAPACITY_BLOCKS
    assert found.of("evictions_total") == found.of("eviction_age_seconds_count") == evicted
    assert found.of("eviction_age_seconds_bucket", le="+Inf") == evicted
    assert found.of("blocks") == 2 * CAPACITY_BLOCKS - evicted
    parts = [found.of(f"{part}_bytes") for part in ("used", "reserved", "quarantined", "free")]
    assert sum(parts) == found.of("capacity_bytes") == 16 << 20
    assert found.of("evictable_bytes") == found.of("used_bytes")


def test_calls_by_method_and_code(daemon: Daemon, cached: CachedEngine) -> None:
    before, began = Scrape(daemon), time.monotonic()
    cached.store(new_keys(4))
    for _ in range(5):
        cached.client.lookup({0: new_keys(2)})
    until(lambda: Scrape(daemon).of("lookups_total") == 5, "lookups are posted")
    found = Scrape(daemon)
    assert found.of("rpc_requests_total", method="Lookup", code="OK") == 5
    assert found.of("rpc_seconds_count", method="Lookup") == 5
    assert 0 < found.of("rpc_seconds_sum", method="Lookup") < time.monotonic() - began
    assert found.of("rpc_requests_total", method="Commit", code="OK") == 1
    refused = before.of("refusals_total")
    assert ask(daemon, "/livez", "PUT").status == 405
    assert Scrape(daemon).of("refusals_total") == refused + 1


def test_leases_sessions_and_what_a_restart_took_over(daemon: Daemon) -> None:
    with engine_of(daemon.url(), contract_of(PAGE_BYTES), "e") as engine:
        engine.wait_ready()
        keys = new_keys(6)
        assert engine.store(keys).bound == keys
        held = engine.client.lookup({0: keys})
        until(lambda: Scrape(daemon).of("oldest_lease_seconds") > 0.2, "a lease grows old")
        found = Scrape(daemon)
        assert (found.of("leases"), found.of("sessions"), found.of("groups")) == (1, 1, 1)
        assert found.of("evictable_bytes") == 0
        engine.client.release(held.lease)
        until(lambda: Scrape(daemon).of("leases") == 0, "the release arrives")
        assert Scrape(daemon).of("oldest_lease_seconds") == 0
        daemon.restart()
        until(lambda: engine.client.lookup({0: keys}).hit_tokens, "it attaches again")
        found = Scrape(daemon)
        assert (found.of("adopted_blocks_total"), found.of("blocks")) == (6, 6)
        assert found.of("adoption_dropped_total") == 0
        assert found.of("page_bytes") >= 4096
        until(
            lambda: Scrape(daemon).of("client_fallbacks_total", reason="daemon_away"),
            "the client tells of the lookups that went without the cache",
        )
    until(lambda: Scrape(daemon).of("sessions") == 0, "the session ends")
    assert Scrape(daemon).of("sessions_closed_total") == 1

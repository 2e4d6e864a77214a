"""Engines that follow the daemon's blocks know what is there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.cached import CachedEngine, cached_engine
from support.daemon import Daemon, running_daemon, until
from support.http_door import Scrape
from support.raw_door import new_keys
from support.remote_raw import gateway

import kvhearth
from kvhearth.client import KVClient
from kvhearth.connectors.core.block_feed import BlockFeed
from kvhearth.contract import namespace_digest
from kvhearth.errors import Reason
from kvhearth.model import Tier
from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.engine import contract_of

DAEMON: dict[str, object] = {}


class Subscriber:
    """Replays what a feed tells."""

    def __init__(self, client: KVClient) -> None:
        self.feed = BlockFeed(client)
        self._tiers: dict[bytes, Tier] = {}

    def hears(self, keys: Sequence[bytes], tier: Tier) -> None:
        """Wait until it knows of just these blocks, all on one tier."""
        wanted = dict.fromkeys(keys, tier)
        until(lambda: self._there() == wanted, f"it knows of {len(keys)} blocks: {tier.name}")

    def _there(self) -> dict[bytes, Tier]:
        for change in self.feed.take():
            assert self._tiers.get(change.key, Tier.NOWHERE) == change.before
            self._tiers[change.key] = change.now
        return {key: tier for key, tier in self._tiers.items() if tier}


@contextlib.contextmanager
def subscriber(engine: CachedEngine) -> Iterator[Subscriber]:
    """Yield somebody who follows an engine's blocks."""
    found = Subscriber(engine.client)
    try:
        yield found
    finally:
        assert found.feed.close(HUNG_S)


def evict(daemon: Daemon, client: KVClient, tier: str) -> None:
    """Evict all of an engine's blocks from a tier."""
    space = namespace_digest("default", client.contract).hex()
    daemon.operator().evict(space, 0, tier)


@pytest.mark.parametrize("remote", [False, True])
def test_a_subscriber_knows_what_is_there(tmp_path: Path, *, remote: bool) -> None:
    keys = new_keys(60)
    with contextlib.ExitStack() as stack:
        ssd_dirs = [f"{tmp_path}/ssd=256MiB"]
        daemon = stack.enter_context(running_daemon(ssd_dirs=ssd_dirs, ssd_segment_bytes="2MiB"))
        url = daemon.url()
        if remote:
            url = f"kvhearth://127.0.0.1:{stack.enter_context(gateway(daemon.socket_dir)).port}"
        engine = stack.enter_context(cached_engine(url))
        heard = stack.enter_context(subscriber(engine))
        assert engine.store(keys[:40]).stored == 40
        heard.hears(keys[:40], Tier.DRAM)
        until(lambda: daemon.counters()["demoted_blocks"] == 40, "they are saved")
        evict(daemon, engine.client, "memory")
        heard.hears(keys[:40], Tier.SSD)
        assert engine.load(keys[:40], wait_s=HUNG_S).usable_blocks == 40
        heard.hears(keys[:40], Tier.DRAM)
        daemon.kill()
        daemon.start()
        heard.hears(keys[:40], Tier.DRAM)
        assert engine.store(keys[40:]).stored == 20
        heard.hears(keys, Tier.DRAM)
        evict(daemon, engine.client, "all")
        heard.hears([], Tier.NOWHERE)


def test_blocks_of_old_weights_are_gone(daemon: Daemon) -> None:
    keys = new_keys(4)
    with (
        cached_engine(daemon.url()) as engine,
        cached_engine(daemon.url(), engine_id="f") as other,
        subscriber(engine) as heard,
        subscriber(other) as stale,
    ):
        assert engine.store(keys).stored == 4
        heard.hears(keys, Tier.DRAM)
        stale.hears(keys, Tier.DRAM)
        assert engine.client.bump_epoch() > 0
        heard.hears([], Tier.NOWHERE)
        assert engine.store(keys[:2]).stored == 2
        heard.hears(keys[:2], Tier.DRAM)
        stale.hears([], Tier.NOWHERE)


def test_bad_cursors_have_reasons_and_lost_events_are_told() -> None:
    with running_daemon(http="127.0.0.1:0") as daemon, cached_engine(daemon.url()) as engine:
        client = engine.client
        begun = client.events()
        assert (begun.events, begun.lost, begun.listing, begun.reason) == ([], 0, True, "")
        for cursor, reason in {
            "nonsense": Reason.STALE_BOOT,
            f"{client.boot_id}": Reason.BAD_MESSAGE,
            f"{client.boot_id}/2/1/-1": Reason.BAD_MESSAGE,
            f"{client.boot_id}/1/9999/-1": Reason.BAD_MESSAGE,
            f"{client.boot_id}/1/1/-2": Reason.BAD_MESSAGE,
            begun.cursor.replace(client.boot_id, "0" * 32): Reason.STALE_BOOT,
        }.items():
            found = client.events(cursor)
            assert (found.reason, found.events, found.cursor) == (reason, [], cursor)
        scrape = Scrape(daemon)
        assert scrape.of("refusals_total", reason="stale_boot") == 2
        assert scrape.of("refusals_total", reason="bad_message") == 4
        while begun.listing:
            begun = client.events(begun.cursor)
        assert client.bump_epoch() > 0
        found = client.events(begun.cursor)
        assert (found.events, found.lost, found.reason) == ([], 1, "")
        assert Scrape(daemon).of("events_lost_total") == 1


def test_the_smallest_messages_are_enough(tmp_path: Path) -> None:
    """For what memory and the SSD have, and for events about one block each."""
    options = {"memory": "64MiB", "message_bytes_max": "64KiB", "slot_bytes_min": 4096}
    ssd = {"ssd_dirs": [f"{tmp_path}/ssd=256MiB"], "ssd_segment_bytes": "2MiB"}
    contract, pages = contract_of(4096), np.zeros((1500, 4096), np.uint8)
    with (
        running_daemon(**options, **ssd) as daemon,
        kvhearth.open(daemon.url(), contract, wait_s=HUNG_S) as cache,
    ):
        heard = Subscriber(cache.client)
        keys = new_keys(2200)
        assert cache.store(keys[:1500], pages).result(HUNG_S).stored == 1500
        heard.hears(keys[:1500], Tier.DRAM)
        for each in keys[1500:]:
            assert cache.store([each], pages[:1]).result(HUNG_S).stored == 1
        heard.hears(keys, Tier.DRAM)
        until(lambda: daemon.counters()["demoted_blocks"] == 2200, "they are saved")
        evict(daemon, cache.client, "memory")
        assert heard.feed.close(HUNG_S)
        late = Subscriber(cache.client)
        late.hears(keys, Tier.SSD)
        assert late.feed.close(HUNG_S)

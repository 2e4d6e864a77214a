"""Engines that follow the daemon's blocks know what is there."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
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
from kvhearth.connectors.core.block_feed import BlockChange, BlockFeed
from kvhearth.contract import namespace_digest
from kvhearth.errors import Reason
from kvhearth.model import TOKENS_UNKNOWN, TOKENS_UNPUBLISHED, U32, Tier
from kvhearth.results import BlockTokens, CommitGroup
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


def store_told(client: KVClient, keys: Sequence[bytes], tokens: U32) -> None:
    """Store blocks of two chains, and tell what they hold."""
    got = client.reserve({0: len(keys)})
    chains = [(0, b""), (7, keys[3])]
    told = CommitGroup(keys, got.groups[0], chains=chains, tokens=tokens)
    assert client.commit({0: told}, boot_id=got.boot_id).stored[0].all()


def kept_tokens(folder: Path) -> int:
    """Return of how many blocks a daemon's file has the tokens."""
    with tempfile.TemporaryDirectory() as copy:
        for each in folder.glob("tokens*"):
            shutil.copy(each, copy)
        with contextlib.closing(sqlite3.connect(f"{copy}/tokens")) as base:
            return int(base.execute("SELECT count(*) FROM blocks").fetchone()[0])


@pytest.mark.parametrize("remote", [False, True])
def test_what_blocks_hold_is_told_to_others(tmp_path: Path, *, remote: bool) -> None:
    """To another engine, after a restart of the daemon, and where a block moves."""
    contract, keys = contract_of(4096), new_keys(1000)
    tokens = np.arange(16 * len(keys), dtype=np.uint32).reshape(-1, 16)
    tokens[9], tokens[11] = TOKENS_UNKNOWN, TOKENS_UNPUBLISHED
    rows = [tuple(row) for row in tokens.tolist()]
    wanted = {key: BlockTokens(keys[at - 1], rows[at]) for at, key in enumerate(keys)}
    wanted[keys[0]], wanted[keys[7]] = BlockTokens(b"", rows[0]), BlockTokens(keys[3], rows[7])
    wanted[keys[9]] = BlockTokens(keys[8], ())
    del wanted[keys[11]]
    options = {"memory": "64MiB", "message_bytes_max": "64KiB", "slot_bytes_min": 4096}
    ssd = {"ssd_dirs": [f"{tmp_path}/ssd=256MiB"], "ssd_segment_bytes": "2MiB"}
    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(running_daemon(**options, **ssd))
        url = daemon.url()
        if remote:
            url = f"kvhearth://127.0.0.1:{stack.enter_context(gateway(daemon.socket_dir)).port}"
        with kvhearth.open(url, contract, wait_s=HUNG_S) as cache:
            store_told(cache.client, keys, tokens)
        until(lambda: daemon.counters()["demoted_blocks"] == len(keys), "they are saved")
        daemon.kill()
        daemon.start()
        other = stack.enter_context(kvhearth.open(url, contract, wait_s=HUNG_S)).client
        feed = BlockFeed(other, tokens=True)
        stack.callback(feed.close, HUNG_S)

        def hears(tier: Tier) -> None:
            told: dict[bytes, BlockTokens | None] = {}

            def all_told() -> bool:
                told.update((each.key, each.holds) for each in feed.take() if each.now == tier)
                return len(told) == len(wanted)

            until(all_told, f"it knows of all blocks: {tier.name}")
            assert told == wanted

        hears(Tier.DRAM)
        evict(daemon, other, "memory")
        hears(Tier.SSD)
        assert kept_tokens(tmp_path / "ssd") == len(keys)
        evict(daemon, other, "all")
        until(lambda: kept_tokens(tmp_path / "ssd") == 0, "they are forgotten")


def test_tokens_are_neither_kept_where_that_is_off_nor_taken_if_they_are_wrong() -> None:
    keys, tokens = new_keys(10), np.ones((10, 16), np.uint32)
    with running_daemon(event_tokens=0) as daemon, cached_engine(daemon.url()) as engine:
        store_told(engine.client, keys, tokens)
        feed, told = BlockFeed(engine.client, tokens=True), list[BlockChange]()

        def all_told() -> bool:
            told.extend(feed.take())
            return len(told) == len(keys)

        until(all_told, "it knows of all")
        assert feed.close(HUNG_S)
        assert [(each.key, each.holds) for each in told] == [(key, None) for key in keys]
        got = engine.client.reserve({0: 10})
        told = CommitGroup(new_keys(10), got.groups[0], tokens=tokens[:, :15])
        assert engine.client.commit({0: told}, boot_id=got.boot_id).reason == Reason.BAD_KEYS


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

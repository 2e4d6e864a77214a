"""Scores of prompts over HTTP: what each tier could restore."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.cached import BLOCK_TOKENS, CachedEngine, cached_engine
from support.daemon import Daemon, running_daemon, until
from support.http_door import Answer, Scrape, ask
from support.raw_door import new_keys

from kvhearth.contract import namespace_digest


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    ssd_dirs = [f"{tmp_path_factory.mktemp('ssd')}/ssd=256MiB"]
    with running_daemon(http="127.0.0.1:0", ssd_dirs=ssd_dirs, ssd_segment_bytes="2MiB") as found:
        yield found


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[CachedEngine]:
    with cached_engine(daemon.url()) as found:
        yield found


def space(engine: CachedEngine) -> str:
    """Return the digest of the engine's namespace."""
    return namespace_digest("default", engine.client.contract).hex()


def post(daemon: Daemon, body: dict[str, Any]) -> Answer:
    """Ask for scores."""
    return ask(daemon, "/v1/prefixes:score", "POST", json.dumps(body).encode(), admin=True)


def blocks(daemon: Daemon, engine: CachedEngine, keys: list[bytes]) -> list[int]:
    """Return the blocks that memory, SSD and remotes could restore."""
    whole = {"namespace": space(engine), "keys": [key.hex() for key in keys]}
    short = {"namespace": space(engine)[:12], "keys": [int.from_bytes(key[-8:]) for key in keys]}
    found, again = post(daemon, whole).json, post(daemon, short).json
    tiers = [found[tier] for tier in ("dram", "ssd", "remote")]
    assert tiers == [again[tier] for tier in ("dram", "ssd", "remote")]
    assert all(tier["tokens"] == tier["blocks"] * BLOCK_TOKENS for tier in tiers)
    assert [bool(tier["ms"]) for tier in tiers] == [
        tier["blocks"] > tiers[0]["blocks"] for tier in tiers
    ]
    return [tier["blocks"] for tier in tiers]


def test_scores_by_tier(daemon: Daemon, engine: CachedEngine) -> None:
    keys = new_keys(12)
    assert engine.store(keys[:8]).stored == 8
    until(lambda: daemon.counters()["demoted_blocks"] == 8, "they are saved")
    assert blocks(daemon, engine, keys) == [8, 8, 8]
    daemon.operator().evict(space(engine), 0, "memory")
    assert engine.store(keys[:2]).stored == 2
    before = Scrape(daemon)
    assert blocks(daemon, engine, keys) == [2, 8, 8]
    assert blocks(daemon, engine, keys[4:]) == [0, 4, 4]
    assert blocks(daemon, engine, keys[8:]) == [0, 0, 0]
    after = Scrape(daemon)
    for name in ("lookups_total", "lookup_blocks_total", "leased_bytes_total"):
        assert after.of(name) == before.of(name)


@pytest.mark.parametrize(
    ("change", "status", "reason"),
    [
        ({"namespace": "0" * 64}, 404, "unknown_namespace"),
        ({"namespace": "0"}, 400, "bad_message"),
        ({"namespace": "0000"}, 404, "unknown_namespace"),
        ({"keys": [1 << 64]}, 400, "bad_message"),
        ({"keys": [-1]}, 400, "bad_message"),
        ({"keys": [1, "0" * 64]}, 400, "bad_message"),
        ({"keys": {"0": [True]}}, 400, "bad_message"),
        ({"keys": ["0" * 62]}, 400, "bad_keys"),
        ({"keys": ["x" * 64]}, 400, "bad_keys"),
        ({"keys": []}, 400, "bad_keys"),
        ({"keys": {"1": ["0" * 64]}}, 400, "bad_group"),
        ({"keys": ["0" * 64] * 8193}, 400, "too_many_keys"),
    ],
)
def test_what_is_not_a_prompt_is_refused(
    daemon: Daemon, engine: CachedEngine, change: dict[str, Any], status: int, reason: str
) -> None:
    before = Scrape(daemon).of("refusals_total", reason=reason)
    found = post(daemon, {"namespace": space(engine), "keys": ["0" * 64], **change})
    assert (found.status, found.json["reason"]) == (status, reason)
    assert Scrape(daemon).of("refusals_total", reason=reason) == before + 1


def test_a_reader_is_asked_for_a_token(daemon: Daemon) -> None:
    assert ask(daemon, "/v1/prefixes:score", "POST", b"{}").status == 403

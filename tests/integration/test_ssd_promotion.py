"""Loads of blocks on SSD only, by the simple API and by the connectors' core."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cached import CachedEngine, cached_engine
from support.daemon import Daemon, running_daemon, until
from support.raw_door import new_keys
from support.scripted_engine import BLOCK_TOKENS, FULL, PAGE_BYTES, ScriptedEngine, scripted_engine

from kvhearth.contract import GroupKind, GroupSpec, namespace_digest
from kvhearth_lab.harness import HUNG_S
from kvhearth_server.transport.dispatch import PREFETCHED_PER_TURN_MAX

SSD = {"ssd_segment_bytes": "2MiB"}
BLOCKS = 600
"""More blocks than the 16 MiB of memory hold (256)."""
PORTION = 32


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("ssd")
    with running_daemon(arena=False, ssd_dirs=[f"{folder}/ssd=512MiB"], **SSD) as found:
        yield found


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[CachedEngine]:
    with cached_engine(daemon.url()) as found:
        yield found
    daemon.wait_quiet()


def store_saved(engine: CachedEngine, daemon: Daemon, keys: list[bytes]) -> None:
    """Stores no faster than the tier writes: otherwise blocks would be evicted without a copy."""
    before = daemon.counters()["demoted_blocks"]
    for start in range(0, len(keys), 128):
        left = keys[start : start + 128]
        done = engine.store(left)
        assert done.stored == len(left), done
        before += len(left)
        until(lambda: daemon.counters()["demoted_blocks"] >= before, "it is saved")  # noqa: B023


def copy_state(engine: CachedEngine, daemon: Daemon) -> list[bytes]:
    """Returns keys whose blocks are on SSD and no longer in memory."""
    keys = new_keys(BLOCKS)
    store_saved(engine, daemon, keys)
    space = namespace_digest("default", engine.client.contract).hex()
    daemon.operator().evict(space, 0, "memory")
    found = engine.client.lookup({0: keys[:PORTION]}, lease=False)
    assert found.groups[0].present.all()
    assert not found.groups[0].ready.any()
    assert found.eta_us > 0
    return keys


def test_a_load_waits_until_its_blocks_are_promoted(daemon: Daemon, engine: CachedEngine) -> None:
    keys = copy_state(engine, daemon)
    for start in range(0, 4 * PORTION, PORTION):
        done = engine.load(keys[start : start + PORTION], wait_s=10.0)
        assert (done.usable_blocks, done.reason) == (PORTION, "")


def test_a_prefetch_of_several_portions_brings_all(daemon: Daemon, engine: CachedEngine) -> None:
    keys = copy_state(engine, daemon)[: PREFETCHED_PER_TURN_MAX + 40]
    before = daemon.counters()["promoted_blocks"]
    found = engine.client.prefetch({0: keys})
    assert found.groups[0].present.all()
    assert not found.groups[0].ready.any()
    assert found.eta_us > 0
    until(lambda: daemon.counters()["promoted_blocks"] == before + len(keys), "all are promoted")


def test_requests_that_go_away_leave_nothing(daemon: Daemon, engine: CachedEngine) -> None:
    keys = copy_state(engine, daemon)
    for start in range(0, BLOCKS, PORTION):
        found = engine.client.lookup({0: keys[start : start + PORTION]}, prefetch=True)
        engine.client.cancel(found)
    quiet(daemon)
    assert engine.load(keys[:PORTION], wait_s=10.0).usable_blocks == PORTION


def test_a_daemon_that_is_killed_during_promotion(tmp_path: Path) -> None:
    with (
        running_daemon(arena=False, ssd_dirs=[f"{tmp_path}/ssd=512MiB"], **SSD) as own,
        cached_engine(own.url()) as engine,
    ):
        keys = copy_state(engine, own)
        future = engine.begin_load(keys[:200], wait_s=10.0)
        boot_id = engine.client.boot_id
        own.kill()
        future.result(HUNG_S)
        own.start()
        until(lambda: engine.client.boot_id not in ("", boot_id), "it attaches again")
        until(lambda: own.read_back, "it is read back")
        assert engine.load(keys[:PORTION], wait_s=10.0).usable_blocks == PORTION


def quiet(daemon: Daemon) -> None:
    """Waits until nothing is leased and nothing moves between the tiers; checks the books."""
    moved = ("promoted_blocks", "demoted_blocks", "prefetch_cancelled", "promotion_failed")
    seen: list[list[int]] = []

    def still() -> bool:
        seen.append([daemon.counters().get(name, 0) for name in moved])
        return seen[-10:] == 10 * seen[-1:] and not daemon.stats().leases

    until(still, "nothing is leased, nothing is promoted")


TOKENS = 320
PROMPTS = 80
"""Prompts of 20 blocks each: more than 16 MiB of memory hold (51)."""


def fill(engine: ScriptedEngine, daemon: Daemon, name: str) -> None:
    """Runs prompts ``name 0`` and so on; afterwards the first of them are only on SSD.

    Stores no faster than the tier writes: otherwise blocks would be evicted without a copy.
    """
    demoted = daemon.counters()["demoted_blocks"] - engine.counts.get("store_blocks", 0)
    for number in range(PROMPTS):
        assert engine.run(f"{name}{number}", f"{name} {number}", TOKENS) == 0
        if number % 8 == 7:
            saved = demoted + engine.counts["store_blocks"]
            until(lambda saved=saved: daemon.counters()["demoted_blocks"] >= saved, "it is saved")


def test_a_prompt_on_ssd_is_loaded(daemon: Daemon) -> None:
    with scripted_engine(daemon.url(), engine_id="lower") as engine:
        fill(engine, daemon, "lower")
        for number in range(20):
            assert engine.run(f"again{number}", f"lower {number}", TOKENS) == TOKENS, engine.counts
        counts = engine.counts
        assert counts["hit_ssd_tokens"] > 10 * TOKENS
        assert counts["hit_ssd_tokens"] + counts.get("hit_dram_tokens", 0) == 20 * TOKENS
        assert counts["climb_waits"] >= 10
        assert counts["load_bytes"] == 20 * TOKENS // BLOCK_TOKENS * PAGE_BYTES
        # The blocks are in memory now.
        assert engine.run("third", "lower 19", TOKENS) == TOKENS
        assert engine.counts["climb_waits"] == counts["climb_waits"]
    daemon.wait_quiet()


def test_a_prompt_on_ssd_of_more_blocks_than_one_call_takes(tmp_path: Path) -> None:
    """One that goes away cancels the promotions of all of its portions."""
    drive = [f"{tmp_path}/ssd=512MiB"]
    with running_daemon(arena=False, ssd_dirs=drive, keys_max=7, **SSD) as own:
        load_windows(own)
        with cached_engine(own.url()) as engine:
            keys = copy_state(engine, own)
            engine.client.cancel(engine.client.lookup({0: keys[:PORTION]}, prefetch=True))
            quiet(own)
            assert engine.load(keys[:PORTION], wait_s=10.0).usable_blocks == PORTION
        own.wait_quiet()


def load_windows(daemon: Daemon) -> None:
    """Load prompts of a model with a sliding window of which all blocks are on SSD."""
    window = GroupSpec(GroupKind.SLIDING_WINDOW, BLOCK_TOKENS, PAGE_BYTES, window_tokens=40)
    with scripted_engine(daemon.url(), groups=(FULL, window), engine_id="window") as engine:
        fill(engine, daemon, "window")
        for number in range(4):
            request = engine.add(f"b{number}", f"window {number}", TOKENS)
            assert engine.admit(request) == TOKENS - BLOCK_TOKENS
            assert engine.wait_loaded(request)
            last = TOKENS // BLOCK_TOKENS - 1
            assert all(engine.holds(request, 0, at) for at in range(last))
            assert all(engine.holds(request, 1, at) for at in range(last - 3, last))
            engine.finish(request)
    daemon.wait_quiet()

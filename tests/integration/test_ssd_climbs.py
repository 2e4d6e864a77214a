"""Loads of blocks on SSD only: the caller bounds the wait, and promotions end with the load."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cached import DONE_S, CachedEngine, cached_engine, new_keys
from support.daemon import Daemon, running_daemon, until

SSD = {"ssd_segment_bytes": "2MiB", "scrub_rate": "0"}
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


def copy_state(engine: CachedEngine, daemon: Daemon) -> list[bytes]:
    """Returns keys whose blocks are on SSD; the first are no longer in memory."""
    before = daemon.counters()["demoted_blocks"]
    keys = new_keys(BLOCKS)
    for start in range(0, BLOCKS, 128):
        left = keys[start : start + 128]
        done = engine.store(left)
        assert done.stored == len(left), done
        # Store no faster than the tier writes: otherwise blocks would be evicted without a copy.
        before += len(left)
        until(lambda: daemon.counters()["demoted_blocks"] >= before, "it is saved")  # noqa: B023
    found = engine.client.lookup({0: keys[:PORTION]}, lease=False)
    assert found.groups[0].present.all()
    assert not found.groups[0].ready.any()
    assert found.eta_us > 0
    return keys


def test_a_load_waits_until_its_blocks_have_climbed(daemon: Daemon, engine: CachedEngine) -> None:
    keys = copy_state(engine, daemon)
    for start in range(0, 4 * PORTION, PORTION):
        done = engine.load(keys[start : start + PORTION], wait_s=10.0)
        assert (done.usable_blocks, done.reason) == (PORTION, "")


def test_a_load_that_does_not_wait_lets_them_climb(daemon: Daemon, engine: CachedEngine) -> None:
    keys = copy_state(engine, daemon)[:PORTION]
    assert engine.load(keys).usable_blocks == 0
    until(lambda: engine.load(keys).usable_blocks == PORTION, "they climb")
    assert engine.counter("cancel") == 0


def test_requests_that_go_away_leave_nothing(daemon: Daemon, engine: CachedEngine) -> None:
    keys = copy_state(engine, daemon)
    for start in range(0, BLOCKS, PORTION):
        found = engine.client.lookup({0: keys[start : start + PORTION]}, prefetch=True)
        engine.client.cancel(found)
    quiet(daemon)
    assert engine.load(keys[:PORTION], wait_s=10.0).usable_blocks == PORTION


def test_loads_that_are_given_up_leave_nothing(daemon: Daemon, engine: CachedEngine) -> None:
    keys = copy_state(engine, daemon)
    for start in range(0, 8 * PORTION, PORTION):
        future = engine.begin_load(keys[start : start + PORTION], wait_s=10.0)
        time.sleep(start / PORTION / 1000)
        assert future.cancel() or future.result(DONE_S).usable_blocks
    quiet(daemon)
    assert engine.load(keys[:PORTION], wait_s=10.0).usable_blocks == PORTION


def test_many_loads_wait_at_once(daemon: Daemon, engine: CachedEngine) -> None:
    """All of them want some common blocks, and each some of its own."""
    keys = copy_state(engine, daemon)
    owns = [keys[8 + 8 * number : 16 + 8 * number] for number in range(16)]
    futures = [engine.begin_load(keys[:8] + own, wait_s=10.0) for own in owns]
    assert [future.result(DONE_S).usable_blocks for future in futures] == [16] * 16


def test_a_daemon_that_is_killed_while_blocks_climb(tmp_path: Path) -> None:
    with (
        running_daemon(arena=False, ssd_dirs=[f"{tmp_path}/ssd=512MiB"], **SSD) as own,
        cached_engine(own.url()) as engine,
    ):
        keys = copy_state(engine, own)
        future = engine.begin_load(keys[:200], wait_s=10.0)
        boot_id = engine.client.boot_id
        own.kill()
        future.result(DONE_S)
        own.start()
        until(lambda: engine.client.boot_id not in ("", boot_id), "it attaches again")
        until(lambda: own.read_back, "it is read back")
        assert engine.load(keys[:PORTION], wait_s=10.0).usable_blocks == PORTION


def quiet(daemon: Daemon) -> None:
    """Waits until nothing is leased and nothing moves between the tiers; checks the books."""
    moved = ("promoted_blocks", "demoted_blocks", "prefetch_cancelled", "promotion_failed")

    def still() -> bool:
        before = [daemon.counters().get(name, 0) for name in moved]
        time.sleep(0.1)
        after = [daemon.counters().get(name, 0) for name in moved]
        return before == after and not daemon.stats().leases

    until(still, "nothing is leased, nothing climbs")

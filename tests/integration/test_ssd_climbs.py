"""Loads of blocks on SSD only: the caller bounds the wait, and promotions end with the load."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon, running_daemon, until
from support.engine import content
from support.pipelines import DONE_S, PAGE_BYTES, PAGES, PipedEngine, piped_engine

from kvhearth.transfer import LoadDone

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
def engine(daemon: Daemon) -> Iterator[PipedEngine]:
    with piped_engine(daemon.url()) as found:
        yield found
    daemon.wait_quiet()


def copy_state(engine: PipedEngine, daemon: Daemon) -> list[bytes]:
    """Returns keys whose blocks are on SSD; the first are no longer in memory."""
    before = daemon.counters()["demoted_blocks"]
    keys = [secrets.token_bytes(32) for _ in range(BLOCKS)]
    for start in range(0, BLOCKS, PAGES // 4):
        left = keys[start : start + PAGES // 4]
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


def load(engine: PipedEngine, keys: list[bytes], promotion_s: float) -> LoadDone:
    """Loads blocks and compares every byte that arrived."""
    pages = range(PAGES, PAGES + len(keys))
    engine.pages[PAGES:] = 0
    done = engine.loads.load_now(
        {0: (keys, pages)}, prefetch=True, promotion_s=promotion_s, deadline_s=DONE_S
    )
    assert done is not None
    for page, key, loaded in zip(pages, keys, done.loaded[0], strict=True):
        wanted = content(key, 0, 0, PAGE_BYTES)
        assert not loaded or (engine.pages[page] == wanted).all(), f"page {page}"
    return done


def test_a_load_waits_until_its_blocks_have_climbed(daemon: Daemon, engine: PipedEngine) -> None:
    keys = copy_state(engine, daemon)
    for start in range(0, 4 * PORTION, PORTION):
        done = load(engine, keys[start : start + PORTION], 10.0)
        assert (done.usable_tokens, done.reason) == (16 * PORTION, "")


def test_a_load_that_does_not_wait_lets_them_climb(daemon: Daemon, engine: PipedEngine) -> None:
    keys = copy_state(engine, daemon)[:PORTION]
    assert load(engine, keys, 0.0).usable_tokens == 0
    until(lambda: load(engine, keys, 0.0).usable_tokens == 16 * PORTION, "they climb")
    assert engine.counter("cancel") == 0


def test_requests_that_go_away_leave_nothing(daemon: Daemon, engine: PipedEngine) -> None:
    keys = copy_state(engine, daemon)
    for start in range(0, BLOCKS, PORTION):
        found = engine.client.lookup({0: keys[start : start + PORTION]}, prefetch=True)
        engine.client.cancel(found)
    quiet(daemon)
    again = load(engine, keys[:PORTION], 10.0)
    assert again.usable_tokens == 16 * PORTION


def test_loads_that_are_given_up_leave_nothing(daemon: Daemon, engine: PipedEngine) -> None:
    keys = copy_state(engine, daemon)
    for start in range(0, 8 * PORTION, PORTION):
        wanted = {0: (keys[start : start + PORTION], range(PAGES, PAGES + PORTION))}
        done = engine.loads.load_now(wanted, prefetch=True, promotion_s=10.0, deadline_s=0.0005)
        assert done is not None
    quiet(daemon)
    assert load(engine, keys[:PORTION], 10.0).usable_tokens == 16 * PORTION


def test_many_loads_wait_at_once(daemon: Daemon, engine: PipedEngine) -> None:
    """All of them want some common blocks, and each some of its own."""
    keys = copy_state(engine, daemon)
    shared, done = keys[:8], []

    def one(number: int) -> None:
        own = keys[8 + 8 * number : 16 + 8 * number]
        first = PAGES + 16 * number
        wanted = {0: (shared + own, range(first, first + 16))}
        done.append(
            engine.loads.load_now(wanted, prefetch=True, promotion_s=10.0, deadline_s=DONE_S)
        )

    threads = [threading.Thread(target=one, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DONE_S)
    assert [each.usable_tokens for each in done if each is not None] == [256] * 16


def test_a_daemon_that_is_killed_while_blocks_climb(tmp_path: Path) -> None:
    with (
        running_daemon(arena=False, ssd_dirs=[f"{tmp_path}/ssd=512MiB"], **SSD) as own,
        piped_engine(own.url()) as engine,
    ):
        keys = copy_state(engine, own)
        wanted = {0: (keys[:PAGES], range(PAGES, PAGES + len(keys[:PAGES])))}
        ticket = engine.loads.submit(wanted, prefetch=True, promotion_s=10.0)
        assert ticket is not None
        boot_id = engine.client.boot_id
        own.kill()
        assert engine.loads.wait(ticket, DONE_S) is not None, "the load hangs"
        own.start()
        until(lambda: engine.client.boot_id not in ("", boot_id), "it attaches again")
        until(lambda: own.read_back, "it is read back")
        assert load(engine, keys[:PORTION], 10.0).usable_tokens == 16 * PORTION


def quiet(daemon: Daemon) -> None:
    """Waits until nothing is leased and nothing moves between the tiers; checks the books."""
    moved = ("promoted_blocks", "demoted_blocks", "prefetch_cancelled", "promotion_failed")

    def still() -> bool:
        before = [daemon.counters().get(name, 0) for name in moved]
        time.sleep(0.1)
        after = [daemon.counters().get(name, 0) for name in moved]
        return before == after and not daemon.stats().leases

    until(still, "nothing is leased, nothing climbs")

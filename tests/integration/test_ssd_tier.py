"""The SSD tier under a real daemon: blocks sink before they are evicted, and come back right."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.daemon import Daemon, running_daemon, stopped_daemon, until
from support.engine import PAGES, Engine, contract_of, engine_of

PAGE = 64 << 10
CONTRACT = contract_of(PAGE)
SSD = {"ssd_segment_bytes": "2MiB", "scrub_rate": "0"}
BLOCKS = 600
"""More than the 16 MiB of memory hold (256)."""


def new_keys(count: int) -> list[bytes]:
    """Keys that nobody knows."""
    return [secrets.token_bytes(32) for _ in range(count)]


@pytest.fixture
def ssd(tmp_path: Path) -> Iterator[dict[str, object]]:
    """Settings of a tier of its own."""
    yield {**SSD, "ssd_dirs": [f"{tmp_path}/ssd=256MiB"]}


def store_all(engine: Engine, keys: list[bytes]) -> None:
    """Store all keys, waiting for room where there is none yet."""
    left = list(keys)

    def portion() -> bool:
        done = engine.store(left[:PAGES])
        del left[: len(done.bound)]
        return not left

    until(portion, "everything is stored", 30)


def saved(daemon: Daemon, count: int) -> None:
    """Wait until so many blocks are on the SSD."""
    until(lambda: daemon.counters()["demoted_blocks"] >= count, f"{count} blocks are saved")


def fetch_all(engine: Engine, keys: list[bytes]) -> list[bytes]:
    """Load all keys, letting them climb; those that came, every byte of them right."""
    right = []
    for start in range(0, len(keys), PAGES):
        portion = keys[start : start + PAGES]
        end = time.monotonic() + 10
        while True:
            found = engine.client.lookup({0: portion}, lease=False, prefetch=True)
            if found.groups[0].ready.all() or not found.groups[0].present.all():
                break
            assert time.monotonic() < end, f"they do not climb: {found}"
            assert found.eta_us > 0
            time.sleep(0.005)
        seen = engine.check(portion)
        assert seen.bad == []
        right += seen.right
    return right


@pytest.mark.parametrize("arena", [True, False], ids=["arena directory", "anonymous"])
def test_what_does_not_fit_into_memory_sinks_and_comes_back(
    ssd: dict[str, object], arena: bool
) -> None:
    with running_daemon(arena=arena, **ssd) as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        keys = new_keys(BLOCKS)
        store_all(engine, keys)
        saved(daemon, BLOCKS)
        found = engine.client.lookup({0: keys[:PAGES]}, lease=False)
        assert found.groups[0].present.all()
        assert sorted(fetch_all(engine, keys)) == sorted(keys)
        counts = daemon.counters()
        assert counts["promoted_blocks"] >= BLOCKS // 2
        daemon.stats()


@pytest.mark.parametrize("end", ["kill -9", "SIGTERM"])
@pytest.mark.parametrize("arena", [True, False], ids=["arena directory", "anonymous"])
def test_what_is_saved_survives_the_daemon(
    ssd: dict[str, object], arena: bool, end: str
) -> None:
    with running_daemon(arena=arena, **ssd) as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        keys = new_keys(BLOCKS)
        store_all(engine, keys)
        if end == "kill -9":
            saved(daemon, BLOCKS)
            daemon.kill()
        else:
            assert daemon.terminate() == 0
        boot_id = engine.client.boot_id
        daemon.start()
        until(lambda: engine.ready and engine.client.boot_id != boot_id, "the engine is back")
        until(lambda: "the SSD log is read back" in daemon.log_text(), "the log is read back")
        assert sorted(fetch_all(engine, keys)) == sorted(keys)


def test_old_weights_stay_out_after_a_cold_start(ssd: dict[str, object]) -> None:
    with stopped_daemon(arena=False, **ssd) as daemon:
        daemon.start()
        keys = new_keys(20)
        with engine_of(daemon.url(), CONTRACT) as engine:
            store_all(engine, keys)
            saved(daemon, len(keys))
            assert engine.client.bump_epoch()
        daemon.kill()
        daemon.start()
        with engine_of(daemon.url(), CONTRACT) as engine:
            found = engine.client.lookup({0: keys}, lease=False, prefetch=True)
            assert not found.groups[0].present.any()

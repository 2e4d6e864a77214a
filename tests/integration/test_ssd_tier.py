"""The SSD tier under a real daemon: blocks are written back before eviction, promoted intact."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.daemon import running_daemon, stopped_daemon, until
from support.raw_door import new_keys
from support.ssd_kit import CONTRACT, SSD, fetch_all, saved, store_all, store_paced

from kvhearth_lab.harness.engine import PAGES, engine_of

BLOCKS = 600
"""More blocks than the 16 MiB of memory hold (256)."""


@pytest.fixture
def ssd(tmp_path: Path) -> dict[str, object]:
    """Settings of a tier in a temporary directory."""
    return {**SSD, "ssd_dirs": [f"{tmp_path}/ssd=256MiB"]}


@pytest.mark.parametrize("arena", [True, False], ids=["arena directory", "anonymous"])
def test_what_does_not_fit_into_memory_goes_to_ssd_and_comes_back(
    ssd: dict[str, object], arena: bool
) -> None:
    with running_daemon(arena=arena, **ssd) as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        keys = new_keys(BLOCKS)
        store_paced(engine, daemon, keys)
        saved(daemon, BLOCKS)
        found = engine.client.lookup({0: keys[:PAGES]}, lease=False)
        assert found.groups[0].present.all()
        assert sorted(fetch_all(engine, keys)) == sorted(keys)
        counts = daemon.counters()
        assert counts["promoted_blocks"] >= BLOCKS // 2
        daemon.stats()


@pytest.mark.parametrize("end", ["kill -9", "SIGTERM"])
@pytest.mark.parametrize("arena", [True, False], ids=["arena directory", "anonymous"])
def test_what_is_saved_survives_the_daemon(ssd: dict[str, object], arena: bool, end: str) -> None:
    with running_daemon(arena=arena, **ssd) as daemon, engine_of(daemon.url(), CONTRACT) as engine:
        keys = new_keys(BLOCKS)
        store_paced(engine, daemon, keys)
        if end == "kill -9":
            saved(daemon, BLOCKS)
            daemon.kill()
        else:
            assert daemon.terminate() == 0
        boot_id = engine.client.boot_id
        daemon.start()
        until(lambda: engine.ready and engine.client.boot_id != boot_id, "the engine is back")
        until(lambda: daemon.read_back, "it is read back")
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
            until(lambda: daemon.read_back, "it is read back")
            found = engine.client.lookup({0: keys}, lease=False, prefetch=True)
            assert not found.groups[0].present.any()

"""A daemon whose SSD drops hot blocks that were never published."""

from __future__ import annotations

from pathlib import Path

from support.cached import cached_engine
from support.daemon import stopped_daemon
from support.raw_door import new_keys
from support.ssd_kit import SSD

from kvhearth_server.tiers.remote.names import LAYOUT


def test_hot_blocks_that_a_small_ssd_drops_reach_the_remote(tmp_path: Path) -> None:
    (remote := tmp_path / "remote").mkdir()
    settings = {
        **SSD,
        "ssd_dirs": [f"{tmp_path}/ssd=32MiB"],
        "remote": f"file://{remote}",
        "remote_staging": "8MiB",
    }
    with stopped_daemon(arena=False, **settings) as daemon:
        daemon.start()
        with cached_engine(daemon.url()) as engine:
            for number in range(60):
                keys = new_keys(40)
                engine.store(keys)
                engine.load(keys, wait_s=2.0)
                published = daemon.counters()["published_blocks"]
                assert number > 5 or not published, "a single use publishes nothing"
                if published >= 8:
                    break
        assert published >= 8, "memory and SSD are full by now"
        assert len(list((remote / LAYOUT).rglob("*"))) > 8

"""Several runs of a daemon over one arena and one tier: blocks in transit when it died."""

from __future__ import annotations

import contextlib
from pathlib import Path

import grpc
import pytest
from support.daemon import Daemon, stopped_daemon, until
from support.raw_door import new_keys
from support.ssd_kit import CONTRACT, SSD, fetch_all, saved, store_paced

from kvhearth_lab.harness.engine import PAGES, Engine, engine_of

BLOCKS = 400


def ask_until_dead(daemon: Daemon, engine: Engine, keys: list[bytes]) -> None:
    """Looks up and stores until the daemon has died at its fault point."""

    def dead() -> bool:
        with contextlib.suppress(grpc.RpcError):
            for start in range(0, len(keys), PAGES):
                engine.client.lookup({0: keys[start : start + PAGES]}, lease=False, prefetch=True)
            engine.store(new_keys(4))
        return daemon.dead

    until(dead, "it comes to its fault point")


@pytest.mark.parametrize(
    "fault", ["promote.loading", "promote.loaded", "demote.submitted", "demote.done"]
)
def test_two_deaths_on_the_way(tmp_path: Path, fault: str) -> None:
    dirs = [f"{tmp_path}/ssd=256MiB"]
    with stopped_daemon(**SSD, ssd_dirs=dirs) as daemon:
        daemon.start()
        keys = new_keys(BLOCKS)
        with engine_of(daemon.url(), CONTRACT) as engine:
            store_paced(engine, daemon, keys)
            saved(daemon, BLOCKS)
            daemon.kill()
            for count in (1, 2):
                boot_id = engine.client.boot_id
                if daemon.start(f"{fault}:{count}"):
                    until(
                        lambda old=boot_id: daemon.dead or engine.client.boot_id not in ("", old),
                        "the engine is back",
                    )
                    ask_until_dead(daemon, engine, keys)
            boot_id = engine.client.boot_id
            daemon.start()
            until(lambda: engine.ready and engine.client.boot_id != boot_id, "it is back")
            until(lambda: daemon.read_back, "it is read back")
            until(lambda: not daemon.quarantined_bytes(), "what was loading is free again")
            assert sorted(fetch_all(engine, keys)) == sorted(keys)
        daemon.wait_quiet()

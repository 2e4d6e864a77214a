"""The SSD tier with a bad drive or bad settings: stores continue, reads are right, and counters say
why.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from support.daemon import Daemon, stopped_daemon, until
from support.raw_door import new_keys
from support.ssd_kit import CONTRACT, MEMORY_BLOCKS, SSD, fetch_all, saved, store_all, store_paced

from kvhearth.contract import namespace_digest
from kvhearth.failpoints import DISK_ENVIRONMENT_NAME
from kvhearth_lab.harness.engine import PAGES, Engine, engine_of
from kvhearth_lab.torture import damage
from kvhearth_server.engine.tiering.writeback import PATIENCE_S
from kvhearth_server.memory.durable_file import HEADER_BYTES
from kvhearth_server.tiers.ssd.format import PAGE_BYTES

EIO = 5


class Drive:
    """Commands for the daemon's drive, in a file that the daemon polls."""

    def __init__(self, path: Path, **orders: object) -> None:
        self._path = path
        self.order(**orders)

    def order(self, **orders: object) -> None:
        """Gives orders that apply from now on."""
        fresh = self._path.with_suffix(".new")
        fresh.write_text(json.dumps(orders))
        os.replace(fresh, self._path)
        time.sleep(0.05)


@contextmanager
def faulty_drive(
    folder: Path, *, size: str = "64MiB", **first: object
) -> Iterator[tuple[Daemon, Drive]]:
    """A daemon whose drive can be told to misbehave, from the start or later."""
    orders = folder / "orders.json"
    drive = Drive(orders, **first)
    with stopped_daemon(command=True, **SSD, ssd_dirs=[f"{folder}/ssd={size}"]) as daemon:
        daemon.environment[DISK_ENVIRONMENT_NAME] = str(orders)
        daemon.start()
        yield daemon, drive


def promoted(engine: Engine, keys: list[bytes]) -> bool:
    """Whether all blocks up to the first missing one are in memory. Later ones are useless to an
    engine and not promoted. Requests promotion of blocks that are not in memory.
    """
    found = engine.client.lookup({0: keys}, lease=False, prefetch=True)
    if found.reason:
        return False
    first = int(np.flatnonzero(~np.append(found.groups[0].present, False))[0])
    return bool(found.groups[0].ready[:first].all())


def right_ones(engine: Engine, keys: list[bytes]) -> int:
    """Returns how many of the keys can be loaded, after promotion; none with a wrong byte."""
    got = 0
    for start in range(0, len(keys), PAGES):
        portion = keys[start : start + PAGES]
        until(lambda keys=portion: promoted(engine, keys), "blocks on SSD are promoted")
        seen = engine.check(portion)
        assert seen.bad == []
        got += len(seen.right)
    return got


def count(daemon: Daemon, name: str) -> int:
    """Returns a counter's sum over all its labels."""
    found = daemon.counters()
    return sum(value for key, value in found.items() if key.split("{")[0].split("/")[0] == name)


@pytest.mark.parametrize(
    "orders", [{"errors": {"write": EIO}}, {"held": ["write"]}], ids=["EIO", "hangs"]
)
def test_stores_go_on_while_the_drive_takes_nothing(
    tmp_path: Path, orders: dict[str, object]
) -> None:
    with (
        faulty_drive(tmp_path) as (daemon, drive),
        engine_of(daemon.url(), CONTRACT) as engine,
    ):
        first = new_keys(64)
        store_all(engine, first)
        saved(daemon, 64)
        drive.order(**orders)
        more = new_keys(2 * MEMORY_BLOCKS)
        store_all(engine, more)
        assert right_ones(engine, more[-MEMORY_BLOCKS // 4 :]) == MEMORY_BLOCKS // 4
        until(lambda: count(daemon, "demotion_failed") + count(daemon, "demotion_refused"), "told")
        drive.order()
        assert right_ones(engine, first) == 64
        daemon.stats()


def test_what_is_being_written_is_evicted_too(tmp_path: Path) -> None:
    namespace = namespace_digest("default", CONTRACT).hex()
    with (
        faulty_drive(tmp_path) as (daemon, drive),
        engine_of(daemon.url(), CONTRACT) as engine,
    ):
        store_all(engine, new_keys(4))
        saved(daemon, 4)
        drive.order(delay_s=0.5)
        keys = new_keys(40)
        store_all(engine, keys)
        reply = daemon.operator().evict(namespace, 0, None)
        assert reply.evicted_blocks == 44
        found = engine.client.lookup({0: keys}, lease=False).groups[0]
        assert not found.present.any()


def degradations(daemon: Daemon, kind: str) -> list[str]:
    """Returns the log's ``begins`` and ``over`` of one kind, each with its directory's name."""
    events = {
        "ssd.degraded": "begins",
        "ssd.degradation_over": "over",
    }
    lines = [json.loads(line) for line in daemon.own_lines() if line.startswith("{")]
    found = [line for line in lines if line.get("kind") == kind and line["event"] in events]
    for line in found:
        assert line["level"] == ("warning" if events[line["event"]] == "begins" else "info")
        assert line["reason"].startswith(line["directory"])
    return [f"{events[line['event']]} {Path(line['directory']).name}" for line in found]


@pytest.mark.parametrize(
    ("orders", "kind"),
    [
        pytest.param({"errors": {"write": EIO}}, "io", id="EIO"),
        pytest.param({"held": ["write"]}, "stuck", id="hangs", marks=pytest.mark.slow),
    ],
)
def test_the_log_tells_when_the_tier_is_degraded_and_when_no_longer(
    tmp_path: Path, orders: dict[str, object], kind: str
) -> None:
    with (
        faulty_drive(tmp_path) as (daemon, drive),
        engine_of(daemon.url(), CONTRACT) as engine,
    ):
        store_all(engine, new_keys(8))
        saved(daemon, 8)
        assert degradations(daemon, kind) == []
        drive.order(**orders)
        store_all(engine, new_keys(8))
        until(lambda: degradations(daemon, kind) == ["begins ssd"], "it is told when it begins")
        drive.order()

        def over() -> bool:
            store_all(engine, new_keys(1))  # a successful write ends it
            return degradations(daemon, kind) == ["begins ssd", "over ssd"]

        until(over, "it is told when it is over")
        daemon.stats()


def test_reads_that_fail_are_misses(tmp_path: Path) -> None:
    with (
        faulty_drive(tmp_path) as (daemon, drive),
        engine_of(daemon.url(), CONTRACT) as engine,
    ):
        keys = new_keys(2 * MEMORY_BLOCKS)
        store_paced(engine, daemon, keys)
        saved(daemon, len(keys))
        drive.order(errors={"read": EIO})
        assert right_ones(engine, keys) < len(keys)
        until(lambda: count(daemon, "promotion_failed"), "failed loads are counted")
        drive.order()
        assert right_ones(engine, keys) > 0
        daemon.stats()


def test_a_daemon_without_its_tier_and_again_with_it(tmp_path: Path) -> None:
    with stopped_daemon(**SSD, ssd_dirs=[f"{tmp_path}/ssd=128MiB"]) as daemon:
        daemon.start()
        keys = new_keys(2 * MEMORY_BLOCKS)
        with engine_of(daemon.url(), CONTRACT) as engine:
            store_paced(engine, daemon, keys)
            saved(daemon, len(keys))
        dirs = daemon.settings.pop("ssd_dirs")
        daemon.restart()
        with engine_of(daemon.url(), CONTRACT) as engine:
            here = right_ones(engine, keys)
            assert 0 < here <= MEMORY_BLOCKS
            store_all(engine, new_keys(MEMORY_BLOCKS))
        daemon.settings["ssd_dirs"] = dirs
        daemon.restart()
        until(lambda: daemon.read_back, "it is read back")
        with engine_of(daemon.url(), CONTRACT) as engine:
            assert sorted(fetch_all(engine, keys)) == sorted(keys)
            daemon.stats()


def test_damaged_namespaces_beside_the_tier_are_believed_in_nothing(tmp_path: Path) -> None:
    path = tmp_path / "ssd" / "namespaces"
    with stopped_daemon(arena=False, **SSD, ssd_dirs=[f"{tmp_path}/ssd=64MiB"]) as daemon:
        daemon.start()
        keys = new_keys(20)
        with engine_of(daemon.url(), CONTRACT) as engine:
            store_all(engine, keys)
            saved(daemon, len(keys))
            assert engine.client.bump_epoch()
        daemon.kill()
        data = path.read_bytes()
        content = json.loads(data[HEADER_BYTES:])
        content["namespaces"][0]["epoch"] -= 1
        path.write_bytes(data[:HEADER_BYTES] + json.dumps(content).encode())
        daemon.start()
        with engine_of(daemon.url(), CONTRACT) as engine:
            assert not engine.client.lookup({0: keys}, lease=False).groups[0].present.any()
            store_all(engine, keys)
            assert engine.check(keys).right == keys


@pytest.mark.slow
def test_nothing_is_lost_while_the_log_is_read_back(tmp_path: Path) -> None:
    with (
        faulty_drive(tmp_path, size="256MiB") as (daemon, drive),
        engine_of(daemon.url(), CONTRACT) as engine,
    ):
        keys = new_keys(200)
        store_paced(engine, daemon, keys)
        drive.order(held=["write"])
        unwritten = new_keys(30)
        store_all(engine, unwritten)
        keys += unwritten
        boot_id = engine.client.boot_id
        daemon.kill()
        for path in damage.footers(tmp_path / "ssd"):
            damage.zero(path, path.stat().st_size - PAGE_BYTES, PAGE_BYTES)
        reads = 3 * len(damage.segment_files(tmp_path / "ssd"))
        drive.order(read_back_s=2 * PATIENCE_S / reads)
        daemon.start()
        until(lambda: engine.ready and engine.client.boot_id != boot_id, "the engine is back")
        refused = 0
        while not daemon.read_back:
            if len(keys) > 1000:  # the drive has room for all of them
                time.sleep(0.01)
                continue
            stored = engine.store(new_keys(8))
            keys += stored.bound
            refused += not stored.bound
        until(lambda: not daemon.stats().ssd.demoting_blocks, "everything is written")
        assert refused, "engines wanted more room than there was"
        assert count(daemon, "demotion_refused") == 0
        assert sorted(fetch_all(engine, keys)) == sorted(keys)

"""A daemon with a tier behind its SSD: blocks go down to it and come back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.daemon import Daemon, stopped_daemon, until
from support.raw_door import new_keys
from support.ssd_kit import CONTRACT, SSD, fetch_all, store_paced

from kvhearth_lab.harness.engine import PAGES, Engine, engine_of

BLOCKS = 900
"""Blocks of 64 KiB: 56 MiB, of which memory holds 16 MiB and the SSD less than 22 MiB."""
DRAM_BYTES = 128 << 20


@contextmanager
def world(folder: Path, dram_bytes: int) -> Iterator[tuple[Daemon, Engine, list[bytes]]]:
    """A daemon whose memory ends with it, an engine, and keys of which the first left the SSD."""
    with stopped_daemon(arena=False, **SSD, ssd_dirs=[f"{folder}/ssd=32MiB"]) as daemon:
        daemon.dram_bytes = dram_bytes
        daemon.start()
        with engine_of(daemon.url(), CONTRACT) as engine:
            keys = new_keys(BLOCKS)
            store_paced(engine, daemon, keys)
            until(lambda: daemon.counters()["demoted_blocks"] >= BLOCKS, "all are written", 60)
            yield daemon, engine, keys
        daemon.wait_quiet()


def present(engine: Engine, keys: list[bytes]) -> list[bytes]:
    """Return the keys that some tier has."""
    found = []
    for start in range(0, len(keys), PAGES):
        portion = keys[start : start + PAGES]
        there = engine.client.lookup({0: portion}, lease=False).groups[0].present
        found += [key for key, flag in zip(portion, there, strict=True) if flag]
    return found


def counter(daemon: Daemon, name: str) -> int:
    """Return a counter of the SSD tier."""
    return int(daemon.stats().ssd.counters.get(name, 0))


def test_blocks_that_the_ssd_drops_come_back_from_the_tier_behind_it(tmp_path: Path) -> None:
    with world(tmp_path, DRAM_BYTES) as (daemon, engine, keys):
        on_ssd = daemon.stats().ssd.blocks
        assert on_ssd < BLOCKS // 2
        assert counter(daemon, "demoted_blocks") >= BLOCKS - on_ssd
        assert sorted(fetch_all(engine, keys)) == sorted(keys)
        assert counter(daemon, "demotions_refused") == 0


def test_a_third_tier_that_is_full_drops_its_oldest_blocks(tmp_path: Path) -> None:
    with world(tmp_path, 4 << 20) as (daemon, engine, keys):
        there = present(engine, keys)
        assert daemon.stats().ssd.blocks < len(there) < BLOCKS

        def all_come() -> bool:
            # The SSD still makes room ahead of need: a block may be dropped after it was seen.
            there = present(engine, keys)
            return sorted(fetch_all(engine, there)) == sorted(there)

        until(all_come, "all blocks that are left come back")


def test_an_epochs_end_voids_the_blocks_of_all_tiers(tmp_path: Path) -> None:
    with world(tmp_path, DRAM_BYTES) as (daemon, engine, keys):
        assert engine.client.bump_epoch() > 0
        assert present(engine, keys) == []
        fresh = new_keys(PAGES)
        store_paced(engine, daemon, fresh)
        assert sorted(fetch_all(engine, fresh)) == sorted(fresh)
        assert present(engine, keys) == []


@pytest.mark.parametrize("when", ["at rest", "while blocks go down"])
def test_a_killed_daemon_loses_no_block_that_the_ssd_has(tmp_path: Path, when: str) -> None:
    with world(tmp_path, DRAM_BYTES) as (daemon, engine, keys):
        on_ssd = daemon.stats().ssd.blocks if when == "at rest" else 0
        if when != "at rest":
            before = counter(daemon, "demoted_blocks")

            def goes_down() -> bool:
                keys.extend(engine.store(new_keys(PAGES)).bound)
                return counter(daemon, "demoted_blocks") > before

            until(goes_down, "blocks are demoted")
        boot_id = engine.client.boot_id
        daemon.restart()
        until(lambda: engine.ready and engine.client.boot_id != boot_id, "it is back")
        until(lambda: daemon.read_back, "it is read back")
        there = present(engine, keys)
        ssd = daemon.stats().ssd
        # Memory and the third tier were empty, but blocks may go down again meanwhile.
        assert len(there) == ssd.blocks + ssd.counters.get("evicted_blocks", 0)
        assert len(there) >= on_ssd
        assert sorted(fetch_all(engine, there)) == sorted(there)

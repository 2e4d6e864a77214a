"""Engines and daemons with an SSD tier: store and load more than memory holds."""

from __future__ import annotations

import time

from kvhearth_lab.harness import HUNG_S
from kvhearth_lab.harness.engine import PAGES, Engine, contract_of
from support.daemon import Daemon, until

PAGE = 64 << 10
CONTRACT = contract_of(PAGE)
SSD = {"ssd_segment_bytes": "2MiB"}
MEMORY_BLOCKS = 256
"""Number of blocks that the 16 MiB of a small daemon hold."""


def store_all(engine: Engine, keys: list[bytes]) -> None:
    """Store all keys, waiting for room where there is none yet."""
    left = list(keys)

    def portion() -> bool:
        done = engine.store(left[:PAGES])
        del left[: len(done.bound)]
        return not left

    until(portion, "everything is stored")


def store_paced(engine: Engine, daemon: Daemon, keys: list[bytes]) -> None:
    """Store all keys, no faster than they are written back: if the drive makes no progress for two
    seconds while room is needed, pending writes are abandoned, and their blocks are lost.
    """
    before = daemon.counters()["demoted_blocks"]
    for start in range(0, len(keys), PAGES):
        store_all(engine, keys[start : start + PAGES])
        saved(daemon, before + start + PAGES - MEMORY_BLOCKS // 2)


def saved(daemon: Daemon, count: int) -> None:
    """Wait until ``count`` blocks were written back to the SSD."""
    until(lambda: daemon.counters()["demoted_blocks"] >= count, f"{count} blocks are saved")


def fetch_all(engine: Engine, keys: list[bytes]) -> list[bytes]:
    """Load all keys, promoting them as needed. Return those that came, with every byte right.

    A block may be evicted between its promotion and its load: while it is present, it is tried
    again.
    """
    right: list[bytes] = []
    for start in range(0, len(keys), PAGES):
        left, end = keys[start : start + PAGES], time.monotonic() + HUNG_S
        while left:
            found = engine.client.lookup({0: left}, lease=False, prefetch=True)
            group = found.groups[0]
            assert found.eta_us > 0 or group.ready.all() or not group.present.all()
            seen = engine.check(left)
            assert seen.bad == []
            right += seen.right
            ended = {*seen.right, *seen.absent}
            left = [key for key in left if key not in ended]
            assert not left or time.monotonic() < end, f"they are not promoted: {found}"
            time.sleep(0.005 if left else 0)
    return right

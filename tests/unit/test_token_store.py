"""What blocks hold is kept in a file that outlives the daemon, and is bounded."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvhearth_lab.harness import HUNG_S
from kvhearth_server.daemon import COUNTERS
from kvhearth_server.engine.token_store import (
    EXAMINED_MAX,
    WAITING_MAX,
    Block,
    Place,
    TokenStore,
)
from kvhearth_server.observability.counters import Counters
from kvhearth_server.tiers.base import TOKENS_NAME

HERE, THERE = Place(b"n" * 32, 0), Place(b"n" * 32, 1)
MIB = 1 << 20


def blocks(numbers: Sequence[int], tokens: bytes = b"t" * 64) -> list[Block]:
    """Blocks of a chain."""
    keys = [number.to_bytes(32, "big") for number in numbers]
    return [(key, key[::-1], tokens) for key in keys]


def keys_of(some: Sequence[Block]) -> list[bytes]:
    """Their keys."""
    return [key for key, _, _ in some]


class Rig:
    """A store whose file is in a directory."""

    def __init__(self, folder: Path, bytes_max: int = MIB) -> None:
        self.counters = Counters(COUNTERS)
        self.store = TokenStore(folder, bytes_max, self.counters)

    def find(self, place: Place, some: Sequence[Block]) -> list[Block]:
        """What is known of blocks."""
        return asyncio.run(self.store.find(place, keys_of(some)))

    def wait(self) -> None:
        """Wait until the thread has done all that it had to do."""
        self.store._ask(lambda: None).result(HUNG_S)

    @property
    def lost(self) -> int:
        """Number of blocks whose tokens were lost."""
        return self.counters.get("block_tokens_lost")


def test_what_blocks_hold_outlives_the_daemon(tmp_path: Path) -> None:
    some = blocks(range(100))
    rig = Rig(tmp_path)
    rig.store.keep(HERE, some)
    assert rig.find(HERE, some) == some
    assert rig.find(THERE, some) == rig.find(Place(b"m" * 32, 0), some) == []
    rig.store.keep(HERE, newer := blocks(range(2), b"u" * 64))
    rig.store.close()
    assert (tmp_path / TOKENS_NAME).stat().st_mode & 0o777 == 0o600
    again = Rig(tmp_path)
    assert again.find(HERE, some[::-1]) == (newer + some[2:])[::-1]
    again.store.close()
    assert rig.lost == again.lost == 0


def test_nothing_is_kept_without_room(tmp_path: Path) -> None:
    rig = Rig(tmp_path, bytes_max=0)
    rig.store.keep(HERE, blocks(range(5)))
    assert rig.find(HERE, blocks(range(5))) == []
    rig.store.close()
    assert list(tmp_path.iterdir()) == []
    assert rig.lost == 0


def test_the_file_has_a_bound(tmp_path: Path) -> None:
    rig, most = Rig(tmp_path, bytes_max=MIB), 0
    for start in range(0, 10_000, 1000):
        rig.store.keep(HERE, blocks(range(start, start + 1000)))
        rig.wait()
        most = max(most, sum(each.stat().st_size for each in tmp_path.iterdir()))
    kept = rig.find(HERE, blocks(range(10_000)))
    rig.store.close()
    assert MIB // 2 < most <= MIB
    assert 0 < len(kept) < 10_000
    assert rig.lost >= 10_000 - len(kept)


@pytest.mark.parametrize("how", ["noise", "format", "folder", "link", "no_folder"])
def test_a_file_that_cannot_be_used_costs_only_what_was_in_it(tmp_path: Path, how: str) -> None:
    folder, some = tmp_path / "first", blocks(range(10))
    path, target = folder / TOKENS_NAME, tmp_path / "target"
    if how != "no_folder":
        folder.mkdir()
    if how == "noise":
        path.write_bytes(b"noise" * 4096)
    elif how == "format":
        with sqlite3.connect(path) as base:
            base.execute("PRAGMA user_version = 99")
    elif how == "folder":
        path.mkdir()
    elif how == "link":
        path.symlink_to(target)
    rig = Rig(folder)
    rig.store.keep(HERE, some)
    assert rig.find(HERE, some) == some
    rig.store.close()
    assert not target.exists()
    again = Rig(folder)
    assert again.find(HERE, some) == (some if how in ("noise", "format") else [])
    again.store.close()


def test_a_file_that_is_damaged_later_is_made_anew(tmp_path: Path) -> None:
    rig, some = Rig(tmp_path), blocks(range(2000))
    rig.store.keep(HERE, some)
    rig.store.close()
    path = tmp_path / TOKENS_NAME
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"x" * (len(whole) - 4096))
    rig = Rig(tmp_path)
    assert rig.find(HERE, some) == []
    assert rig.lost == len(some)
    rig.store.keep(HERE, some[:10])
    assert rig.find(HERE, some) == some[:10]
    rig.store.close()


def test_blocks_that_are_nowhere_are_forgotten(tmp_path: Path) -> None:
    """As others are kept, or all of them when that is asked for."""

    async def work(rig: Rig) -> None:
        gone = set(keys_of(blocks(range(0, 2000, 2))))
        task = asyncio.create_task(
            rig.store.run(lambda place, keys: [key for key in keys if key in gone])
        )
        for start in range(0, 2000, 100):
            rig.store.keep(HERE, blocks(range(start, start + 100)))
        odd = [key for key in keys_of(blocks(range(2000))) if key not in gone]
        every = keys_of(blocks(range(2000)))

        async def known(wanted: list[bytes]) -> None:
            while keys_of(await rig.store.find(HERE, every)) != wanted:
                pass

        async with asyncio.timeout(HUNG_S):
            await known(odd)
            gone.update(odd[:10])
            rig.store.sweep()
            await known(odd[10:])
        task.cancel()

    assert 4 * EXAMINED_MAX < 2 * 2000
    rig = Rig(tmp_path)
    asyncio.run(work(rig))
    rig.store.close()


def test_a_drive_that_hangs_keeps_nobody_waiting(tmp_path: Path) -> None:
    """What comes while the thread has too much to do is lost, and counted."""
    rig = Rig(tmp_path, bytes_max=16 * MIB)
    some = blocks(range(WAITING_MAX // 4))
    with rig.store._worker.changed:  # the thread gets nothing to do
        for _ in range(6):
            rig.store.keep(HERE, some)
        assert rig.lost == 2 * len(some)
    rig.wait()
    assert rig.find(HERE, some[:3]) == some[:3]
    rig.store.close()

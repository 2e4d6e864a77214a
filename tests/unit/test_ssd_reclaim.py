"""What leaves a drive to make room, and who is told of it."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from support.tiers import DEADLINE_S, Arena, Desk, family, key_of, keys_of, segment_files, settings

from kvhearth_server.tiers.base import Completion, Done
from kvhearth_server.tiers.ssd import reclaim
from kvhearth_server.tiers.ssd.format import PAGE_BYTES, RECORD_BYTES, RECORD_DTYPE
from kvhearth_server.tiers.ssd.tier import SsdTier

FEW = 3


def spoil(folder: Path, number: int) -> int:
    """Flip a bit of a block's bytes in its record, wherever that is; how many records it has."""
    found = 0
    at, size = RECORD_DTYPE.fields["key"][1], len(key_of(number))  # type: ignore[index]
    for path in segment_files(folder):
        data = bytearray(path.read_bytes())
        for page in range(PAGE_BYTES, len(data) - PAGE_BYTES, PAGE_BYTES):
            header = data[page : page + RECORD_BYTES]
            if header[at : at + size] == key_of(number):
                data[page + PAGE_BYTES] ^= 1
                with path.open("r+b") as file:
                    file.seek(page + PAGE_BYTES)
                    file.write(data[page + PAGE_BYTES : page + PAGE_BYTES + 1])
                found += 1
    return found


def evicted(tier: SsdTier) -> list[bytes]:
    """Keys that it says to have no longer."""
    return [key for each in tier.take_evicted() for key in each.keys]


def test_a_hot_block_that_rotted_is_told_when_it_cannot_be_carried(tmp_path: Path) -> None:
    arena = Arena()
    folder = tmp_path / "one"
    tier = SsdTier(settings(folder, segments=6), [arena.bytes])
    desk = Desk(tier, arena)
    desk.settle()
    desk.store_all(range(12))
    assert len(desk.load([3, 4]).rows(Done)) == 2
    assert spoil(folder, 3) == 1
    told: list[bytes] = []
    number, end = 100, time.monotonic() + DEADLINE_S
    while tier.look_up(family(), [key_of(3)]).present[0]:
        assert time.monotonic() < end, "its segment is never reclaimed"
        desk.store_all(range(number, number + 12))
        number += 12
        told += evicted(tier)
    told += evicted(tier)
    assert tier.counts["corrupt_blocks"] == 1
    assert told.count(key_of(3)) == 1, "whoever has it in memory believes in this copy"
    assert tier.drain(DEADLINE_S)
    tier.check()
    tier.close()


def test_a_segment_is_forgotten_in_portions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaim, "_FORGET_BLOCKS", FEW)
    arena = Arena()
    tier = SsdTier(settings(tmp_path / "one", segments=6), [arena.bytes])
    desk = Desk(tier, arena)
    desk.settle()
    stored, told = 0, list[bytes]()
    poll = tier.poll

    def noting() -> list[Completion]:
        done, gone = poll(), evicted(tier)
        assert len(gone) <= FEW, "a turn evicts a few"
        assert not tier.look_up(family(), gone).present.any()
        told.extend(gone)
        return done

    monkeypatch.setattr(tier, "poll", noting)
    while len(told) < 20:
        assert stored < 2000, "nothing is evicted"
        desk.store_all(range(stored, stored + 12))
        stored += 12
    assert tier.drain(DEADLINE_S)
    there = tier.look_up(family(), keys_of(range(stored))).present
    assert len(told) == len(set(told)) == stored - int(there.sum())
    tier.check()
    tier.close()

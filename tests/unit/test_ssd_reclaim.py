"""Eviction from a drive to make room, and its reports."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest
from support.tiers import (
    DEADLINE_S,
    LENGTH,
    Arena,
    Desk,
    family,
    key_of,
    keys_of,
    settings,
    spoil,
)

from kvhearth_lab.harness.faults import Faults, FaultyQueue
from kvhearth_server.tiers.base import Completion, Done
from kvhearth_server.tiers.ssd import reclaimer as reclaim
from kvhearth_server.tiers.ssd.disk.probe import choose, open_queue
from kvhearth_server.tiers.ssd.disk.queues import Op
from kvhearth_server.tiers.ssd.tier import Environment, SsdTier

FEW = 3


def evicted(tier: SsdTier) -> list[bytes]:
    """Returns the keys that the tier reports as evicted."""
    return [key for each in tier.take_evicted() for key in each.keys]


@pytest.mark.parametrize("cause", ["checksum", "io", "short"])
def test_a_hot_block_that_cannot_be_carried_is_told_with_its_cause(
    tmp_path: Path, cause: str
) -> None:
    arena = Arena()
    folder = tmp_path / "one"
    faults = Faults()
    queue = FaultyQueue(open_queue(choose()[0], 16), faults)
    tier = SsdTier(
        settings(folder, segments=6), [arena.bytes], environment=Environment(queue=queue)
    )
    desk = Desk(tier, arena)
    desk.settle()
    desk.store_all(range(12))
    assert len(desk.load([3, 4]).rows(Done)) == 2
    if cause == "checksum":
        assert spoil(folder, key_of(3)) == 1
    elif cause == "io":
        faults.errors = {Op.READ: errno.EIO}
    else:
        faults.short = frozenset({Op.READ})
    reported: list[tuple[bytes, str]] = []

    def note() -> None:
        reported.extend((key, each.cause) for each in tier.take_evicted() for key in each.keys)

    number, end = 100, time.monotonic() + DEADLINE_S
    while tier.look_up(family(), [key_of(3)]).present[0]:
        assert time.monotonic() < end, "its segment is never reclaimed"
        desk.store_all(range(number, number + 12))
        number += 12
        note()
    note()
    what = "corrupt_blocks" if cause == "checksum" else "read_errors"
    assert tier.counts[what] == (1 if cause == "checksum" else 2)
    of_it = [why for key, why in reported if key == key_of(3)]
    assert of_it == [cause], "whoever has it in memory believes in this copy"
    assert {why for key, why in reported if key not in (key_of(3), key_of(4))} <= {"space"}
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
    stored, reported = 0, list[bytes]()
    poll = tier.poll

    def noting() -> list[Completion]:
        done, gone = poll(), evicted(tier)
        assert len(gone) <= FEW, "a turn evicts a few"
        assert not tier.look_up(family(), gone).present.any()
        reported.extend(gone)
        return done

    monkeypatch.setattr(tier, "poll", noting)
    while len(reported) < 20:
        assert stored < 2000, "nothing is evicted"
        desk.store_all(range(stored, stored + 12))
        stored += 12
    assert tier.drain(DEADLINE_S)
    there = tier.look_up(family(), keys_of(range(stored))).present
    assert len(reported) == len(set(reported)) == stored - int(there.sum())
    tier.check()
    tier.close()


def test_used_blocks_are_offered_before_they_are_evicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena()
    tier = SsdTier(settings(tmp_path / "one", segments=6), [arena.bytes], offers=True)
    desk = Desk(tier, arena)
    desk.settle()
    offered: set[bytes] = set()
    poll = tier.poll

    def noting() -> list[Completion]:
        done, gone = poll(), evicted(tier)
        assert offered.issuperset(gone), "evicted before anyone could copy it"
        for offer in tier.take_offers():
            assert len(offer.keys) * LENGTH <= reclaim.REINSERT_BYTES
            assert tier.look_up(offer.family, offer.keys).present.all()
            offered.update(offer.keys)
        return done

    monkeypatch.setattr(tier, "poll", noting)
    number = 0
    while not tier.counts["evicted_blocks"]:
        assert number < 2000, "nothing is evicted"
        desk.store_all(range(number, number + 12))
        desk.load(range(number, number + 12))
        number += 12
    assert offered
    assert tier.drain(DEADLINE_S)
    tier.check()
    tier.close()


def test_a_tier_that_drains_evicts_nothing(tmp_path: Path) -> None:
    arena = Arena()
    tier = SsdTier(settings(tmp_path / "one", segments=6), [arena.bytes], offers=True)
    desk = Desk(tier, arena)
    desk.settle()
    number = 0
    while not tier.counts["evicted_blocks"]:
        desk.store([number])
        desk.load([number])
        number += 1
    there = tier.blocks
    assert tier.drain(DEADLINE_S)
    tier.poll()
    assert tier.blocks >= there, "the next run finds them"
    tier.close()


def test_blocks_that_nobody_used_are_not_offered_to_shared_tiers(tmp_path: Path) -> None:
    arena = Arena()
    tier = SsdTier(settings(tmp_path / "one", segments=6), [arena.bytes], offers=True)
    desk = Desk(tier, arena)
    desk.settle()
    number = 0
    while not tier.counts["evicted_blocks"]:
        assert number < 2000, "nothing is evicted"
        desk.store_all(range(number, number + 12))
        number += 12
        assert tier.take_offers() == []
    assert tier.drain(DEADLINE_S)
    tier.check()
    tier.close()


def test_blocks_too_large_for_one_directory_do_not_use_its_segments_up(tmp_path: Path) -> None:
    arena = Arena()
    small, large = tmp_path / "small", tmp_path / "large"
    SsdTier(settings(small), [arena.bytes]).close()  # its directory keeps segments of 256 KiB
    tier = SsdTier(settings(small, large, segment_bytes=4 << 20), [arena.bytes])
    desk = Desk(tier, arena)
    desk.settle()
    broad = family(group=1, shards=30)  # 480 KiB with its headers
    for number in range(24):
        desk.store_all([number])
        desk.store_all([100 + number])  # the next directory's turn
        desk.store_all([number], broad)
    desk.rest()
    (of_small,) = [d for d in tier.figures().directories if d.path == str(small)]
    assert of_small.segments["sealed"] <= 1
    assert tier.look_up(family(), [key_of(number) for number in range(24)]).present.all()
    tier.close()

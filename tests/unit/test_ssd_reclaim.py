"""Eviction from a drive to make room, and its reports."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.drive import size_of
from support.tiers import LENGTH, NAMESPACE, Opened, family, key_of, keys_of, spoil

from kvhearth_server.tiers.base import Completion
from kvhearth_server.tiers.ssd import reclaimer as reclaim
from kvhearth_server.tiers.ssd.disk.queues import Op, Request

FEW = 3


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Opened]:
    with Opened(tmp_path / "one", segments=6, offers=True) as desk:
        yield desk


def store_until(
    desk: Opened, true: Callable[[], object], *, use: bool = False, first: int = 0
) -> int:
    """Store new blocks, and load them if asked, until ``true()``. Return the next one's number."""
    number = first
    while not true():
        assert number < 2000, "nothing is evicted"
        desk.store_all(range(number, number + 12))
        if use:
            desk.load(range(number, number + 12))
        number += 12
    return number


@pytest.mark.parametrize("cause", ["checksum", "io", "short"])
def test_a_hot_block_that_cannot_be_carried_is_told_with_its_cause(
    tmp_path: Path, cause: str
) -> None:
    with Opened(tmp_path / "one", segments=6) as desk:
        desk.store_all(range(100, 112))
        assert desk.loaded([103, 104]) == [103, 104]
        if cause == "checksum":
            assert spoil(tmp_path / "one", key_of(103)) == 1
        elif cause == "io":
            desk.drive.queue.fail(Op.READ, errno.EIO)
        else:
            desk.drive.queue.fate = lambda each: 4096 if each.op is Op.READ else size_of(each)
        reported: list[tuple[bytes, str]] = []

        def is_gone() -> bool:
            gone = desk.tier.take_evicted()
            reported.extend((key, each.cause) for each in gone for key in each.keys)
            return not desk.present([103])

        store_until(desk, is_gone)
        what = "corrupt_blocks" if cause == "checksum" else "read_errors"
        assert desk.counts[what] == (1 if cause == "checksum" else 2)
        hot = keys_of([103, 104])
        assert [why for key, why in reported if key == hot[0]] == [cause], (
            "whoever has it in memory believes in this copy"
        )
        assert {why for key, why in reported if key not in hot} <= {"space"}


def watch(
    desk: Opened, monkeypatch: pytest.MonkeyPatch, see: Callable[[list[bytes]], None]
) -> None:
    """Have ``see`` look at the evicted keys of each turn."""
    tier, poll = desk.tier, desk.tier.poll

    def noting() -> list[Completion]:
        done = poll()
        see([key for each in tier.take_evicted() for key in each.keys])
        return done

    monkeypatch.setattr(tier, "poll", noting)


def test_a_segment_is_forgotten_in_portions(desk: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reclaim, "_FORGET_BLOCKS", FEW)
    reported = list[bytes]()

    def see(gone: list[bytes]) -> None:
        assert len(gone) <= FEW, "a turn evicts a few"
        assert not desk.tier.look_up(family(), gone).present.any()
        reported.extend(gone)

    watch(desk, monkeypatch, see)
    stored = store_until(desk, lambda: len(reported) >= 20)
    desk.check()
    there = len(desk.present(range(stored)))
    assert len(reported) == len(set(reported)) == stored - there


def test_used_blocks_are_offered_before_they_are_evicted(
    desk: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: set[bytes] = set()

    def see(gone: list[bytes]) -> None:
        assert offered.issuperset(gone), "evicted before anyone could copy it"
        for offer in desk.tier.take_offers():
            assert len(offer.keys) * LENGTH <= reclaim.REINSERT_BYTES
            assert desk.tier.look_up(offer.family, offer.keys).present.all()
            offered.update(offer.keys)

    watch(desk, monkeypatch, see)
    store_until(desk, lambda: desk.counts["evicted_blocks"], use=True)
    assert offered
    desk.drain()


def test_a_tier_that_drains_evicts_nothing(desk: Opened) -> None:
    store_until(desk, lambda: desk.counts["evicted_blocks"], use=True)
    there = desk.tier.blocks
    desk.drain()
    desk.tier.poll()
    assert desk.tier.blocks >= there, "the next run finds them"


def test_a_block_that_is_forgotten_while_it_is_carried_does_not_come_back(tmp_path: Path) -> None:
    with Opened(tmp_path / "one", segments=6) as desk:
        desk.store_all([3, 4])
        assert desk.loaded([3, 4]) == [3, 4]

        slots, end = desk.arena.bytes.ctypes.data, desk.arena.bytes.nbytes

        def forget(each: Request) -> int:
            ours = any(0 <= address - slots < end for address, _ in each.pieces)
            if each.op is Op.WRITE and len(each.pieces) > 1 and not ours:
                desk.tier.forget(NAMESPACE, 0, [key_of(3)])
            return size_of(each)

        desk.drive.queue.fate = forget
        store_until(desk, lambda: desk.counts["carried_blocks"], first=100)
        assert desk.present([3, 4]) == [4]


def test_blocks_that_nobody_used_are_not_offered_to_shared_tiers(desk: Opened) -> None:
    store_until(desk, lambda: desk.tier.take_offers() or desk.counts["evicted_blocks"])
    assert desk.counts["evicted_blocks"]
    assert desk.tier.take_offers() == []


def test_blocks_too_large_for_one_directory_do_not_use_its_segments_up(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    with Opened(small):
        pass  # its directory keeps segments of 256 KiB
    with Opened(small, large, segment_bytes=4 << 20) as desk:
        broad = family(group=1, shards=30)  # 480 KiB with its headers
        for number in range(24):
            desk.store_all([number])
            desk.store_all([100 + number])  # the next directory's turn
            desk.store_all([number], broad)
        (of_small,) = [d for d in desk.tier.figures().directories if d.path == str(small)]
        assert of_small.segments["sealed"] <= 1
        assert desk.present(range(24)) == list(range(24))
